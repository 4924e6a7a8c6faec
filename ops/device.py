"""Device, precision, threads and compiling: chosen here and nowhere else."""

import contextlib
import ctypes
import errno
import math
import os
import platform
import sys

import torch

from configs import Config, RunConfig
from errors import UserError
from machine import usable_cpus

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPILE_PAYS_AFTER = 200.0
"""Seconds of eager work from which compiling is paid back on a GPU: it takes about a minute and
saves about three tenths of them.
"""


OUT_OF_MEMORY = (
    "can't allocate memory",
    "bad_alloc",
    "out of memory",
    "Cannot allocate memory",
    "can't start new thread",
)
"""Words by which a RuntimeError tells that an allocation has failed."""


def device_name(device: str) -> str:
    """What the hardware calls itself."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.machine())


def best_device() -> str:
    """cuda where there is one, else mps, else cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def best_precision(device: str) -> str:
    """bfloat16 where the hardware multiplies it faster than float32, float16 on older CUDA devices,
    float32 otherwise.

    AVX-512 has a bfloat16 product on both makers' processors: AMD's is several times as fast as
    float32, Intel's half as fast where the matrix unit (AMX) beside it is hidden, as in some
    virtual machines.
    """
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device == "cpu":
        native = torch.cpu.get_capabilities()
        of_avx512 = native.get("avx512_bf16") and "Intel" not in device_name("cpu")
        if native.get("amx_bf16") or native.get("bf16") or of_avx512:
            return "bfloat16"
    return "float32"


def has_device(device: str) -> bool:
    """Whether the device named is on this machine."""
    kind, _, number = device.partition(":")
    if kind == "cuda":
        return torch.cuda.is_available() and int(number or 0) < torch.cuda.device_count()
    return kind == "cpu" or torch.backends.mps.is_available()


def sampling_precision(precision: str, device: str) -> str:
    """`auto` as the precision of sampling: on a CPU float32, in which a text drawn among others is
    what it is alone, and which is about as fast there; on a GPU `best_precision`.
    """
    if precision != "auto":
        return precision
    return "float32" if device == "cpu" else best_precision(device)


def resolve_device(device: str) -> str:
    """`auto` as a concrete device. Raises UserError where the device named isn't there."""
    if device == "auto":
        return best_device()
    if has_device(device):
        return device
    if device == "mps":
        raise UserError("device is mps, but this torch finds none: use --device auto or cpu")
    raise UserError(
        f"device is {device}, but torch {torch.__version__} finds {torch.cuda.device_count()} "
        "CUDA devices: use --device auto or cpu"
    )


def default_threads() -> int:
    """CPU threads of this process: as many as torch takes, within a container's quota.

    torchrun sets OMP_NUM_THREADS to 1 where the user has set nothing. There the processes of this
    machine share its CPUs instead.
    """
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if not by_torchrun:
        return min(torch.get_num_threads(), usable_cpus())
    neighbours = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cpus() // max(1, int(neighbours) if neighbours.isdecimal() else 1))


def resolve(config: Config, seconds_left: float = math.inf) -> Config:
    """`auto` and 0 in the run section become what this machine offers. `seconds_left` is what the
    run would take on a GPU without a compiler (`ops.speed.seconds_left`). Raises UserError where
    what is set can't be had.
    """
    run = config.run
    device = resolve_device(run.device)
    precision = best_precision(device) if run.precision == "auto" else run.precision
    if precision == "float16" and not device.startswith("cuda"):
        raise UserError(
            f"precision is float16, which is for CUDA; "
            f"on {device} use bfloat16 or float32 (--precision auto)"
        )
    pays = device.startswith("cuda") and seconds_left >= COMPILE_PAYS_AFTER
    compiled = ("on" if pays else "off") if run.compile == "auto" else run.compile
    return config.replace(
        device=device,
        precision=precision,
        compile=compiled,
        threads=run.threads or default_threads(),
    )


def set_up(run: RunConfig) -> None:
    """Make this process compute as `run` (resolved) says: threads, seed of the initial weights, on
    CPU bit for bit the same.
    """
    torch.set_num_threads(run.threads)
    torch.manual_seed(run.seed)
    deterministic = run.device == "cpu" or run.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats only so
    # Compiled runs don't repeat without it, on CPU either.
    torch.use_deterministic_algorithms(deterministic)
    # Nothing here reads memory before writing it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # "high": TF32 on a GPU, for the float32 products that autocast leaves.
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
    if run.device == "cpu":
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Have glibc keep what a step frees for the next step, up to 256 MiB.

    It would give it back to the system, and getting fresh pages takes 7 % of a default step's time.
    Who has set one of the two thresholds in the environment is left to it.
    """
    already_set = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys()
    if sys.platform != "linux" or already_set:
        return
    mmap_threshold = -3  # mallopt's number for it, malloc.h
    trim_threshold = -1
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 << 20)  # the highest that glibc would raise it to by itself
        mallopt(trim_threshold, 256 << 20)


def autocast(device: str, precision: str) -> contextlib.AbstractContextManager:
    """The context in which the model runs at `precision`."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.partition(":")[0], dtype=DTYPES[precision])


def prefers_slabs(device: str, precision: str) -> bool:
    """Whether drawing tokens is faster with matrices cut into a slab for each thread: in float32 on
    a CPU, unless it is Intel's, whose library (MKL) uses all threads for one row by itself.
    """
    return precision == "float32" and device == "cpu" and "Intel" not in device_name("cpu")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocation has failed."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in OUT_OF_MEMORY)
