"""How a command ends: the one error a user can mend, and what becomes of it. Imports the standard
library alone.
"""

import errno
import os
import sys
from collections.abc import Callable

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What a system says where there is no room left for what is written."""


class UserError(Exception):
    """Something the user can put right. Its text says what was wrong, what was found and what to
    do.

    Any package may raise it; `run_command` turns it into one or two lines on stderr and exit code
    2, without a traceback.
    """


class MachineError(Exception):
    """The run or the machine failed in a way that is understood (a full disk, a loss that is no
    number): a line, exit code 1.
    """


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's `main` and exit with its code: 2 for a `UserError`, 1 for a `MachineError`,
    130 for Ctrl-C, else what `main` returns.

    A closed pipe (`... | head`) ends quietly, as a Unix filter does. Any other exception is a fault
    of the program or of the machine: its traceback is printed and Python exits with code 1.
    """
    _open_standard_streams()
    try:
        code = main()
        sys.stdout.flush()
    except (UserError, MachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = error.filename or "what is printed"
        print(f"error: {where} can't be written: {error.strerror}", file=sys.stderr)
        code = 1
    sys.exit(code or 0)


def _open_standard_streams() -> None:
    """Have all three streams there, and print text in any alphabet even where the locale is "C".

    One that was closed by whoever started the command (`2>&-`) leads nowhere from here on. Left
    closed, its number would be given to the next file opened, and what a library prints would be
    written into that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (kept to the end)
            setattr(sys, name, nowhere)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
