"""A run goes on when nobody reads what it prints."""

import contextlib
import fcntl
import io
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from helpers import (
    ROOT,
    environment,
    flags,
    make_config,
    nonsense,
    read_records,
    start,
    write_byte_corpus,
)

from ops.checkpoint import load
from ops.streams import LastingStream


def broken_pipe():
    """A stream into a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def leads_nowhere(stream):
    """Whether a stream's descriptor is that of /dev/null."""
    return os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_a_broken_pipe_is_said_once(monkeypatch):
    other = io.StringIO()
    stream = LastingStream(broken_pipe(), "standard output")
    monkeypatch.setattr(sys, "stderr", other)
    for text in ("a line\n", "a line longer than any buffer\n" * 10_000, "a line\n"):
        assert stream.write(text) == len(text)
        stream.flush()
    assert leads_nowhere(stream)
    assert other.getvalue().count("standard output is gone (Broken pipe)") == 1
    stream.close()


def test_what_is_larger_than_the_buffer_fails_in_writing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    stream = LastingStream(broken_pipe(), "standard output")
    assert stream.write("x" * 10**6) == 10**6
    assert leads_nowhere(stream)
    stream.close()


def test_both_may_be_gone(monkeypatch):
    """Saying so on the other one finds that gone too."""
    streams = {name: LastingStream(broken_pipe(), name) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    print("x", flush=True)
    print("y", file=sys.stderr, flush=True)
    assert all(leads_nowhere(stream) for stream in streams.values())
    for stream in streams.values():
        stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_may_have_room_again():
    full = os.open("/dev/full", os.O_WRONLY)
    stream = LastingStream(os.fdopen(full, "w", encoding="utf-8"), "standard output")
    for _ in range(3):
        print("a line", file=stream, flush=True)
    assert os.fstat(full).st_rdev == os.stat("/dev/full").st_rdev
    with contextlib.suppress(OSError):
        stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("is_error_lost", [False, True])
def test_what_is_printed_to_a_full_disk_ends_with_a_line(is_error_lost):
    code = "from errors import run_command; run_command(lambda: print('a text'))"
    with open("/dev/full", "w", encoding="utf-8") as full:
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=full,
            stderr=full if is_error_lost else subprocess.PIPE,
            check=False,
        )
    assert result.returncode == 1
    if not is_error_lost:
        line = b"error: what is printed can't be written: No space left on device\n"
        assert result.stderr == line


def test_everything_else_is_the_streams_own(tmp_path):
    with open(tmp_path / "f", "w", encoding="utf-8") as file:
        stream = LastingStream(file, "standard output")
        assert (stream.isatty(), stream.encoding, stream.fileno()) == (
            False,
            "utf-8",
            file.fileno(),
        )
        print("äöü", file=stream)
    assert (tmp_path / "f").read_text(encoding="utf-8") == "äöü\n"


# --- whole runs ---


def training(tmp_path, **fields):
    """What to give to train.py for a small run into tmp_path/r."""
    data = write_byte_corpus(tmp_path / "d", nonsense())
    sections = make_config(data, tmp_path / "r", **fields).to_dict().values()
    options = {name: value for section in sections for name, value in section.items()}
    return ["shakespeare-char", *flags(**options)]


def is_whole(folder, steps):
    """A run's folder after its last step, its log untouched by what else was printed."""
    assert load(folder / "checkpoint.pt").step == steps
    assert (folder / "loss.png").exists()
    trained = [r["step"] for r in read_records(folder) if r["kind"] == "train"]
    assert trained == list(range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["2>&1 | head -n 1", ">&- 2>&- <&-"])
def test_a_run_outlives_its_readers(tmp_path, streams):
    line = [sys.executable, str(ROOT / "train.py"), *training(tmp_path, max_steps=30)]
    script = f'{{ "$@"; echo $? > {tmp_path / "rc"}; }} {streams}'
    subprocess.run(["bash", "-c", script, "bash", *line], env=environment(), timeout=60, check=True)
    end = time.monotonic() + 60
    while not (tmp_path / "rc").exists() or not (tmp_path / "rc").read_text().strip():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert (tmp_path / "rc").read_text().strip() == "0"
    is_whole(tmp_path / "r", 30)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["plain", "nohup"])
def test_a_terminal_that_is_closed(tmp_path, ignored):
    """The run hears of it and stops with a checkpoint; under nohup it goes on to its end."""
    steps = 1000 if ignored else 10**6
    arguments = training(tmp_path, max_steps=steps, eval_every=0, save_every=0)
    master, terminal = pty.openpty()

    def be_on_the_terminal():
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start(
        "train.py",
        *arguments,
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
        start_new_session=True,
        preexec_fn=be_on_the_terminal,
    )
    os.close(terminal)
    log = tmp_path / "r" / "log.jsonl"
    end = time.monotonic() + 60
    while not log.exists() or log.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    os.close(master)
    assert process.wait(60) == (0 if ignored else 75)
    last = load(tmp_path / "r" / "checkpoint.pt").step
    if ignored:
        is_whole(tmp_path / "r", steps)
    else:
        assert 0 < last < steps
