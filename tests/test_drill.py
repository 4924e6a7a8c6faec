"""A training process is killed, again and again, at random instants; the run that goes on each time
ends as if nothing had been.

`pytest -m drill` does it twenty-four times to the real command.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import (
    ROOT,
    assert_same_run,
    environment,
    fork_training,
    make_config,
    nonsense,
    train_here,
    write_corpus,
)

from ops.checkpoint import load

pytestmark = pytest.mark.slow

FIELDS = {
    "max_steps": 60,
    "dropout": 0.1,
    "optimizer": "muon",
    "eval_every": 3,
    "save_every": 1,
    "probe_tokens": 8,
}


def steps_logged(folder):
    try:
        return (folder / "log.jsonl").read_bytes().count(b'"kind": "train"')
    except FileNotFoundError:
        # Not there yet, or a new start has put away the log of one that was killed before step 0.
        return 0


def watch(folder, alive, until):
    """Look at the folder until `until()` holds: once it holds a checkpoint it holds a whole one, of
    no earlier step.
    """
    last = load(folder / "checkpoint.pt").step if (folder / "checkpoint.pt").exists() else -1
    looks = 0
    while alive() and not until():
        if (folder / "checkpoint.pt").exists() or last >= 0:
            step = load(folder / "checkpoint.pt").step
            assert step >= last
            last, looks = step, looks + 1
        if (folder / "best.pt").exists():
            load(folder / "best.pt")
    return looks


def drill(start, folder, n_kill, seed):
    """Start, kill at a random instant, start again: `n_kill` times, then to the end. Returns how
    often the folder was looked at.

    An instant is a random way into what is left of the run and a random moment in that step or, one
    time in four, before the first step: while the folder is opened, the log cut back, step 0
    written.
    """
    draw, looks = random.Random(seed), 0
    for kill in range(n_kill):
        begun = steps_logged(folder)
        early = draw.random() < 0.25
        target = (
            begun if early else begun + draw.randint(1, max(1, (50 - begun) // (n_kill - kill)))
        )
        process = start()
        began, delay = time.monotonic(), draw.uniform(0.0, 0.5 if early else 0.03)

        def due(target=target, began=began, early=early):
            assert time.monotonic() - began < 120
            return early or steps_logged(folder) >= target

        looks += watch(folder, process.is_alive, due)
        time.sleep(delay)
        assert process.is_alive(), f"ended before kill {kill + 1}"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if (folder / "checkpoint.pt").exists():
            load(folder / "checkpoint.pt")
        else:
            assert steps_logged(folder) == 0  # no update was made before step 0 was saved
    process = start()
    looks += watch(folder, process.is_alive, lambda: False)
    process.join()
    assert process.exitcode == 0
    return looks


def leftovers(folder):
    return [path.name for path in folder.rglob("*") if "tmp" in path.name]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", nonsense())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    assert train_here(make_config(data, folder, **FIELDS)) == 0
    return folder


def check(folder, undisturbed):
    assert_same_run(folder, undisturbed)
    assert leftovers(folder) == []
    maps = [
        sorted((path.name, path.read_bytes()) for path in (f / "attention").iterdir())
        for f in (folder, undisturbed)
    ]
    assert [name for name, _ in maps[0]] == [name for name, _ in maps[1]]
    assert (folder / "loss.png").exists()


def test_killed_five_times(tmp_path, data, undisturbed):
    config = make_config(data, tmp_path / "killed", resume=True, **FIELDS)
    looks = drill(
        lambda: fork_training(config, tmp_path / "output"), tmp_path / "killed", n_kill=5, seed=1
    )
    assert looks > 5
    check(tmp_path / "killed", undisturbed)


class Command:
    """`python train.py` with what `drill` wants of a process."""

    def __init__(self, *arguments):
        line = [sys.executable, str(ROOT / "train.py"), *map(str, arguments)]
        quiet = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        self.process = subprocess.Popen(line, env=environment(), **quiet)
        self.pid = self.process.pid

    def is_alive(self):
        return self.process.poll() is None

    def join(self):
        self.exitcode = self.process.wait(120)


@pytest.mark.drill
@pytest.mark.parametrize("seed", [2, 3])
def test_the_command_killed_twelve_times(tmp_path, data, undisturbed, seed):
    config = make_config(data, tmp_path / "killed", **FIELDS)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    drill(
        lambda: Command(tmp_path / "config.json", "--resume"),
        tmp_path / "killed",
        n_kill=12,
        seed=seed,
    )
    check(tmp_path / "killed", undisturbed)
