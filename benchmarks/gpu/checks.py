"""The project's own tests of a card: `pytest -m gpu`."""

import importlib.util
import subprocess
import sys

from benchmarks.gpu.task import ROOT, Missing, Task

NONE_COLLECTED = 5
"""pytest's exit code where no test was left to run."""


def tests(task: Task) -> None:
    """Run them, up to twenty failures, and tell of each that failed."""
    if importlib.util.find_spec("pytest") is None:
        raise Missing("pytest isn't installed: pip install -r requirements-dev.txt")
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "--tb=short", "--maxfail=20"]
    try:
        done = subprocess.run(
            [*words, "-p", "no:cacheprovider", *task.scale.tests],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=max(1.0, task.left()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        task.note(f"pytest -m gpu: time is up\n\n{str(error.stdout)[-500:]}")
        return
    print(done.stdout, done.stderr)
    lines = done.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            task.note(line)
    task.note(f"pytest -m gpu: {lines[-1] if lines else done.stderr[-300:]}")
    if done.returncode not in (0, NONE_COLLECTED):
        raise RuntimeError(f"pytest ended with {done.returncode}")
