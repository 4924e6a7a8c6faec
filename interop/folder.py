"""A folder that appears whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from errors import UserError
from ops.run_folder import MADE_BY_A_RUN


def check_free(out: Path, overwrite: bool) -> None:
    """Raise UserError where `out` is a file, or holds something and isn't to be overwritten."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, where a folder should be: give another with --out")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(
            f"{out} is not empty: --overwrite replaces what this command writes and the files of a "
            "run in it, --out FOLDER takes another"
        )


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, beside `out`; what it holds moves there when the block ends well, and
    is gone when it doesn't. Files that a run left in `out` are then replaced.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UserError(
            f"the folder {out} can't be made ({error.strerror}): give another with --out"
        ) from None
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        if out.is_dir():
            for name in MADE_BY_A_RUN:
                if (out / name).is_dir():
                    shutil.rmtree(out / name)
                else:
                    (out / name).unlink(missing_ok=True)
            for path in partial.iterdir():
                os.replace(path, out / path.name)
        else:
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    """The bits that new files lack here; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
