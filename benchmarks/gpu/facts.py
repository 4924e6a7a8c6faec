"""What is measured on: driver, card, versions, and the two rates that all shares refer to."""

import importlib.metadata
import os
import shutil
import subprocess

import torch

from benchmarks.gpu.task import Missing, Task
from benchmarks.machine import describe_machine
from benchmarks.sample import read_rate
from ops.device import best_precision, device_name, has_device
from ops.speed import makers_rate, matrix_rate

PACKAGES = ("torch", "triton", "transformers", "numpy")
QUERY = "name,driver_version,memory.total,power.limit,clocks.max.sm"
READ_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
"""Of the array whose reading tells the bandwidth: far more than any cache holds."""


def facts(task: Task) -> None:
    """Raises Missing where the device named isn't there: nothing else can be measured then."""
    if not has_device(task.device):
        raise Missing(
            f"device {task.device}: torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices; --device cpu rehearses without one"
        )
    for line in describe_machine().splitlines():
        task.note(line)
    for line in driver_lines():
        task.note(line)
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    task.note(f"packages: {versions}; CPUs: {os.cpu_count()}; C compiler: {c_compiler()}")
    if task.on_gpu:
        for line in card_lines(task.device):
            task.note(line)
    rates(task)


def version(package: str) -> str:
    """Of an installed package; "none" where it isn't."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def c_compiler() -> str:
    """The one that Triton would find; compiling on a GPU needs it."""
    found = map(shutil.which, ("cc", "gcc", "clang"))
    return next((path for path in found if path), "none")


def driver_lines() -> list[str]:
    """What nvidia-smi says, or that there is none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi: none ({type(error).__name__})"]
    return [f"nvidia-smi ({QUERY}): {line}" for line in done.stdout.strip().splitlines()]


def card_lines(device: str) -> list[str]:
    """The card as torch sees it."""
    card = torch.cuda.get_device_properties(device)
    return [
        f"card: {card.name}, capability {card.major}.{card.minor}, "
        f"{card.total_memory / 2**30:.1f} GiB, {card.multi_processor_count} multiprocessors",
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
    ]


def rates(task: Task) -> None:
    """The rate of matrix products in each precision that the device has, the maker's figure, and
    the rate of reading memory.
    """
    best = best_precision(task.device)
    found = {}
    for precision in dict.fromkeys([best, "float32"]):
        found[precision] = matrix_rate(task.device, precision)
        task.row(
            "Rates",
            what=f"{precision} products, measured (ops.speed.matrix_rate)",
            rate=f"{found[precision] / 1e12:,.2f} TFLOP/s",
        )
    promised = makers_rate(device_name(task.device))
    task.row(
        "Rates",
        what="dense bfloat16 products, the maker's figure (ops.speed.makers_rate)",
        rate=f"{promised / 1e12:,.0f} TFLOP/s" if promised else "this card isn't in the table",
    )
    bandwidth = read_rate(READ_BYTES["cuda" if task.on_gpu else "cpu"], task.device)
    task.row("Rates", what="reading memory, measured", rate=f"{bandwidth / 1e9:,.0f} GB/s")
    task.figures(matrix_rates=found, makers_rate=promised, read_rate=bandwidth)
