"""Plant the faults of mutants.toml, one at a time, in a copy of the repository, and see which test
turns red: `make mutants`, or `python tests/mutants.py PART_OF_A_NAME`.

Exit code 1 where a fault is caught by no test: it wants a new one. A whole run writes
docs/mutants.md.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "mutants.md"
LEFT_OUT = (".git", ".venv", "runs", "prepared", "cache", "__pycache__", ".*_cache", "wandb")
LONGEST = 300  # seconds that the tests of one fault may take
HEAD = """# Mutants

A test is worth what it catches. `make mutants` plants each of these one-line faults in a copy of
the repository, runs the tests that could see it, and stops at the first that turns red. A fault
that no test catches is reported, and asks for a new test. The faults stand in
[tests/mutants.toml](../tests/mutants.toml), and this page is written by the command.

| fault | where | caught by |
|---|---|---|
"""


@dataclass(frozen=True)
class Fault:
    """A line of the program made wrong."""

    name: str
    file: str
    where: str
    old: str
    new: str
    tests: list[str]

    def planted(self, text: str) -> str:
        """The file's text with the fault. ValueError where `old` isn't there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {found} times in {self.file}")
        return text.replace(self.old, self.new)


def load() -> list[Fault]:
    """The faults, in the order of the file."""
    text = (Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8")
    return [Fault(**entry) for entry in tomllib.loads(text)["fault"]]


def copy_repository(to: Path) -> Path:
    """A copy of the working tree in which faults and patches may be planted."""
    return Path(shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*LEFT_OUT)))


def run_tests(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Pytest in a copy, stopping at the first red, without the slow tests."""
    # No bytecode is written: two faults within one second would share it.
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    options = ["-x", "-q", "-rfE", "-n", "0", "-p", "no:cacheprovider", "--tb=no"]
    line = [sys.executable, "-m", "pytest", *options, "-m", "not slow and not drill", *arguments]
    return subprocess.run(
        line,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LONGEST,
        check=False,
    )


def catch(fault: Fault, folder: Path) -> str:
    """The test that sees the fault, as tests/test_x.py::test_y; empty where none does."""
    path = folder / fault.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(fault.planted(sound), encoding="utf-8")
    try:
        done = run_tests(folder, [f"tests/test_{name}.py" for name in fault.tests])
    finally:
        path.write_text(sound, encoding="utf-8")
    red = re.search(r"^(?:FAILED|ERROR) (tests/\w+\.py::\w+)", done.stdout, re.MULTILINE)
    if red is None and done.returncode not in (0, 1, 5):  # 5: all of them are slow
        raise RuntimeError(f"{fault.name}: the tests did not run\n{done.stdout}{done.stderr}")
    return red[1] if red else ""


def catch_all(faults: list[Fault], n_worker: int = 2) -> list[str]:
    """`catch` for each, in order, printed as they come."""
    with tempfile.TemporaryDirectory() as place:
        folders: Queue[Path] = Queue()
        for number in range(n_worker):
            folders.put(copy_repository(Path(place) / str(number)))

        def work(fault: Fault) -> str:
            folder, start = folders.get(), time.monotonic()
            try:
                test = catch(fault, folder)
            finally:
                folders.put(folder)
            seconds = time.monotonic() - start
            where = f"{fault.file}:{fault.where}"
            print(f"{seconds:4.0f} s  {fault.name} ({where}): {test or 'NOBODY'}", flush=True)
            return test

        with ThreadPoolExecutor(n_worker) as pool:
            tests = list(pool.map(work, faults))
        # A test that is red without the fault proves nothing.
        done = run_tests(folders.get(), sorted({test for test in tests if test}))
        if done.returncode:
            raise RuntimeError(f"red without any fault:\n{done.stdout}")
    return tests


def table(faults: list[Fault], tests: list[str]) -> str:
    """docs/mutants.md."""
    rows = [
        f"| {fault.name} | `{fault.file}`: `{fault.where}` | `{test.removeprefix('tests/')}` |\n"
        for fault, test in zip(faults, tests, strict=True)
    ]
    return HEAD + "".join(rows)


def main() -> int:
    wanted = sys.argv[1:]
    faults = [f for f in load() if not wanted or any(word in f.name for word in wanted)]
    tests = catch_all(faults)
    missed = [fault.name for fault, test in zip(faults, tests, strict=True) if not test]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults are caught")
    for name in missed:
        print(f"no test sees it: {name}")
    if not missed and not wanted:
        TABLE.write_text(table(faults, tests), encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
