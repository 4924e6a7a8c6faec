"""One writer to a folder at a time."""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO

from errors import UserError


class FolderLock:
    """A lock on a folder, held by an open file: when its process ends, however it ends, the lock is
    gone. The file says who holds it.
    """

    def __init__(self, folder: str | Path, path: str | Path | None = None):
        self.folder = Path(folder)
        self.path = Path(path or self.folder / ".lock")
        self.file: IO[str] | None = None

    def take(self, may_create: bool = True) -> None:
        """Take the lock, unless it is held already; a folder for its file is made or, without
        `may_create`, left alone. Raises UserError, naming the holder, where another process has it.

        A file system that knows no locks is said to be one.
        """
        while self.file is None and (may_create or self.path.parent.is_dir()):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 (held open)
            except OSError:
                return  # whoever writes there next says what is wrong with the folder
            try:
                _lock(file)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise UserError(
                    f"{self.folder} is being written to by {holder}: "
                    "wait for it to end, or name another folder with --out"
                ) from None
            except OSError:
                print(
                    f"note: the file system of {self.folder} has no locks: "
                    "see to it that one process alone writes there",
                    file=sys.stderr,
                )
            if not self._is_in_place(file):  # its holder took it away while we waited for it
                file.close()
                continue
            file.truncate(0)
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, started {started}\n")
            file.flush()
            self.file = file

    def _is_in_place(self, file: IO[str]) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        return False

    def close(self) -> None:
        """Let the folder go; nothing of the lock is left."""
        if self.file is not None:
            with contextlib.suppress(OSError):  # Windows takes no open file away
                self.path.unlink()
            self.file.close()
            self.file = None


def _lock(file: IO[str]) -> None:
    """Lock an open file. Raises BlockingIOError where another process has it, OSError where the
    file system knows no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError from error
        return
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
