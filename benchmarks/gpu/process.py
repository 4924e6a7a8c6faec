"""A section in a process of its own: what crashes, hangs or spoils the device there leaves the
others alone.

The processes are forked from a server that has loaded torch and touched no device, so that a
section starts in a moment.
"""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.task import Missing, Task

Section = Callable[[Task], None]
PRELOADED = ["benchmarks.gpu.sections", "ops.session", "training.trainer", "viz.probe", "train"]
PATIENCE = 2.0
"""Seconds that a process has to end when it is told to."""


def context() -> multiprocessing.context.BaseContext:
    """Forked from a server where the system can fork, else started anew."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def run_apart(
    section: str, task: Task, limit: float, tell: Callable[[dict[str, Any]], None], log: Path
) -> str:
    """Run the section of this name until it ends or the clock (`time.monotonic`) passes `limit`:
    how it ended. `tell` gets its messages as they come; what it prints goes to `log`.
    """
    receiver, sender = context().Pipe(duplex=False)
    process = context().Process(target=_work, args=(section, task, sender, log))
    process.start()
    sender.close()
    try:
        return _listen(receiver, limit, tell)
    finally:
        process.join(PATIENCE)
        if process.is_alive():
            process.terminate()
            process.join(PATIENCE)
        if process.is_alive():
            process.kill()


def _listen(receiver: Connection, limit: float, tell: Callable[[dict[str, Any]], None]) -> str:
    """Pass messages on until one says how the section ended."""
    while receiver.poll(max(0.0, limit - time.monotonic())):
        try:
            message = receiver.recv()
        except EOFError:
            return "failed: its process died"
        if "ended" in message:
            return message["ended"]
        tell(message)
    return "time is up"


def _work(section: str, task: Task, sender: Connection, log: Path) -> None:
    """The process itself."""
    with open(log, "a", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        from benchmarks.gpu.sections import SECTIONS  # here, as it loads torch

        sender.send({"ended": outcome(SECTIONS[section], replace(task, send=sender.send))})
        sys.stdout.flush()


def outcome(section: Section, task: Task) -> str:
    """Do a section's work: "done", or in one line what is missing or went wrong."""
    try:
        section(task)
    except Missing as missing:
        return f"left out: {missing}"
    except BaseException as error:  # a report needs to tell of whatever a device does
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        return f"failed: {type(error).__name__}: {first[:200]}"
    return "done"
