"""What every benchmark shares: the machine described, figures printed and kept, and train.py run as
a user runs it.
"""

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.tables import markdown_table, spread as spread
from ops.device import best_precision, device_name
from ops.log import read_log
from ops.speed import matrix_rate

ROOT = Path(__file__).parents[1]
TINYSHAKESPEARE = ROOT / "data" / "prepared" / "tinyshakespeare-char"
RESULTS = ROOT / "runs" / "benchmarks"


def cpu_precisions() -> list[str]:
    """float32, and beside it bfloat16 where the CPU multiplies that faster: emulated, a product
    would take minutes.
    """
    return ["float32"] + [p for p in [best_precision("cpu")] if p != "float32"]


def describe_machine() -> str:
    """Machine, versions, thread count and matrix rates, in a line each."""
    rates = ", ".join(f"{p} {matrix_rate('cpu', p, 2048) / 1e9:,.0f}" for p in cpu_precisions())
    lines = [
        f"machine: {device_name('cpu')}, {platform.machine()}, {torch.get_num_threads()} "
        f"threads, {platform.system()}",
        f"versions: Python {platform.python_version()}, torch {torch.__version__}, numpy "
        f"{numpy.__version__}",
        f"matrix product of 2048 x 2048 on CPU, GFLOP/s: {rates}",
    ]
    if torch.cuda.is_available():
        lines.append(
            f"GPU: {device_name('cuda')}, bfloat16 "
            f"{matrix_rate('cuda', 'bfloat16', 8192) / 1e12:,.0f} TFLOP/s"
        )
    return "\n".join(lines)


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """A command line with `--out`, where `publish` puts its files."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--out",
        type=Path,
        default=RESULTS / name,
        help="NAME.json and NAME.md are written (default: %(default)s)",
    )
    return made


def publish(out: Path, sections: dict[str, list[dict]], record: Any, notes: str = "") -> None:
    """Print the machine, a table a section and the notes; write them to `out`.md, and `record`
    beside them to `out`.json.
    """
    machine = describe_machine()
    tables = [f"## {title}\n\n{markdown_table(rows)}" for title, rows in sections.items() if rows]
    text = "\n\n".join([machine, *tables, *([notes] if notes else [])]) + "\n"
    print(text)
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.md").write_text(text, encoding="utf-8")
    Path(f"{out}.json").write_text(
        json.dumps({"machine": machine, "figures": record}, indent=1) + "\n", encoding="utf-8"
    )
    print(f"written to {out}.md and {out}.json")


@contextlib.contextmanager
def launch(*arguments: object) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process of train.py at work in a run folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "train.py", *map(str, arguments), "--out", str(run)]
        yield (
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            ),
            run,
        )


def finish(process: subprocess.Popen) -> None:
    """Wait for the process; where it fails, say so and exit."""
    _, errors = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(process.args)} failed:\n{errors[-2000:]}")


def run_training(*arguments: object) -> dict[str, Any]:
    """Run train.py: the seconds from its start to its exit, and the records of its log."""
    began = time.perf_counter()
    with launch(*arguments) as (process, run):
        finish(process)
        seconds = time.perf_counter() - began
        log = read_log(run / "log.jsonl")
    losses = [
        record["val_loss"] for record in log if record["kind"] == "eval"
    ]  # none where a run ended early
    return {"seconds": seconds, "log": log, "val_loss": losses[-1] if losses else None}
