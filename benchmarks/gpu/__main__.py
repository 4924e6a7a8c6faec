"""All that is to be measured on a card, by one command.

    python -m benchmarks.gpu --minutes 6                  # all; docs/gpu.md says how to read it
    python -m benchmarks.gpu --sections facts sampling    # these alone
    python -m benchmarks.gpu --device cpu                 # a rehearsal: it measures nothing

Each section runs in a process of its own and has its share of the time; what one leaves over goes
to those behind it. JSON and Markdown are written anew with every figure, so that a run that is cut
short leaves what it has. What is missing (transformers, a compiler, nvidia-smi, the corpus) is said
and left out. Exit code 1: a section went wrong; its traceback is in the .log file. 2: there is no
such device.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.process import run_apart
from benchmarks.gpu.report import Report
from benchmarks.gpu.task import REHEARSAL, ROOT, TINYSHAKESPEARE, Scale, Task

SHARES = {
    "facts": 12,
    "training": 105,
    "train.py": 40,
    "sampling": 50,
    "tests": 45,
    "resume": 15,
    "attention": 18,
    "batches": 10,
    "speedruns": 65,
}
"""Section -> its part of the time; in this order, the most wanted first."""
GRACE = 8.0
"""Seconds that a section may overrun its share, so that a compilation in hand is not lost."""
LOADING = 60.0
"""The same for the first section, for which torch is loaded."""


def deadlines_share(section: str, later: list[str], left: float) -> float:
    """Seconds of a section, when so many are left to it and to those behind it."""
    return left * SHARES[section] / sum(SHARES[name] for name in [section, *later])


def measure(arguments: argparse.Namespace, report: Report, task: Task, end: float) -> bool:
    """Run the sections, one after the other; False where there is no such device."""
    log = Path(f"{arguments.out}.log")
    log.unlink(missing_ok=True)
    for number, section in enumerate(arguments.sections):
        began = time.monotonic()
        left = end - began
        if left < 1:
            report.say(section, "left out, the time is up")
            continue
        report.open(section)
        share = deadlines_share(section, arguments.sections[number + 1 :], left)
        own = Task(task.device, task.scale, began + share, task.folder, task.data)
        limit = min(end, began + share + (GRACE if number else LOADING))
        ended = run_apart(
            section, own, limit, lambda message, to=section: report.add(to, message), log
        )
        report.close(section, ended, time.monotonic() - began)
        if section == "facts" and ended.startswith("left out"):
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="of all sections together")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for the rehearsal")
    parser.add_argument(
        "--sections", nargs="+", choices=SHARES, default=list(SHARES), metavar="SECTION"
    )
    parser.add_argument("--data", type=Path, default=TINYSHAKESPEARE)
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "benchmarks" / "gpu",
        help="NAME.json, NAME.md and NAME.log are written (default: %(default)s)",
    )
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    os.environ.setdefault("MPLBACKEND", "Agg")
    scale = REHEARSAL if arguments.device == "cpu" else Scale()
    report = Report(arguments.out, f"benchmarks.gpu on {arguments.device}")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        task = Task(arguments.device, scale, end, Path(folder), arguments.data)
        has_device = measure(arguments, report, task, end)
    print(report.markdown())
    print(f"written to {arguments.out}.md, .json and .log", file=sys.stderr)
    if not has_device:
        return 2
    return 1 if report.failed() else 0


if __name__ == "__main__":
    sys.exit(main())
