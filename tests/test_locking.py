"""One writer to a folder at a time."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, environment, make_config, nonsense, train_here, write_corpus

from data import locking
from data.locking import FolderLock
from errors import UserError

HOLDER = """
import sys, time
from data.locking import FolderLock
lock = FolderLock(sys.argv[1])
lock.take()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of a folder."""
    line = [sys.executable, "-c", HOLDER, str(tmp_path / "r")]
    process = subprocess.Popen(line, env=environment(), cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_told_who_the_first_is(tmp_path, holder):
    lock = FolderLock(tmp_path / "r")
    with pytest.raises(UserError, match=rf"written to by process {holder.pid} on .*, started 20"):
        lock.take()
    assert lock.file is None


def test_a_holder_that_was_killed_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    FolderLock(tmp_path / "r").take()
    assert f"process {os.getpid()} " in (tmp_path / "r" / ".lock").read_text()


def test_a_lock_is_let_go(tmp_path):
    for _ in range(2):
        lock = FolderLock(tmp_path / "r")
        lock.take()
        lock.take()  # it has it already
        lock.close()
        assert list((tmp_path / "r").iterdir()) == []


def test_looking_makes_no_folder(tmp_path):
    FolderLock(tmp_path / "r").take(may_create=False)
    assert not (tmp_path / "r").exists()


def test_a_file_system_without_locks_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    def fail(file):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locking, "_lock", fail)
    FolderLock(tmp_path / "r").take()
    assert "has no locks" in capsys.readouterr().err


@pytest.mark.slow
def test_two_trainings_in_one_folder(tmp_path, holder):
    data = write_corpus(tmp_path / "d", nonsense())
    config = make_config(data, tmp_path / "r")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UserError, match="is being written to by process"):
            train_here(config.replace(**options))
    assert [path.name for path in (tmp_path / "r").iterdir()] == [".lock"]
    holder.kill()
    holder.wait()
    assert train_here(config) == 0


@pytest.mark.slow
def test_two_preparings_into_one_folder(tmp_path):
    (tmp_path / "t.txt").write_text(nonsense())
    out = tmp_path / "out"
    arguments = ["-m", "data.prepare", tmp_path / "t.txt", "--out", out]
    lock = FolderLock(out, out.with_name(".out.lock"))
    lock.take()
    try:
        _, error = command_of(arguments, code=2)
        assert f"{out} is being written to by process {os.getpid()} on" in error
    finally:
        lock.close()
    command_of(arguments, code=0)
    assert {path.name for path in out.iterdir()} == {"train.bin", "val.bin", "dataset.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"t.txt", "out"}


def command_of(arguments, code):
    """Run python with these arguments; (stdout, stderr)."""
    line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        line, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr
