"""Standard output and error that training outlives: nobody has to read on for a run to go on."""

import contextlib
import errno
import os
import sys
from typing import Any, TextIO


class LastingStream:
    """A text stream whose reader may go away: `| head` that has seen enough, a `tee` that died, a
    terminal that was closed. What can't be written is dropped, and no caller hears of it.

    Everything but `write` and `flush` is the stream's own.
    """

    def __init__(self, stream: TextIO, name: str):
        self.stream, self.name = stream, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.stream, attribute)

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError as error:
            self._let_go(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        """From here on write to nowhere, whoever asks: C libraries, processes started later, and
        Python itself when it flushes at the end. A full disk may have room again, so it is kept.
        """
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
        other = sys.stdout if self is sys.stderr else sys.stderr
        reason = error.strerror or type(error).__name__
        print(
            f"note: {self.name} is gone ({reason}): the run goes on and writes its files",
            file=other,
            flush=True,
        )


def outlive_readers() -> None:
    """Have this process go on whatever becomes of its standard output and error."""
    for name, called in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if not isinstance(stream, LastingStream):
            setattr(sys, name, LastingStream(stream, called))
