"""A JSON file of another program."""

import json
from pathlib import Path
from typing import Any

from errors import UserError


def read_json(path: Path, most: int = 1 << 27) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes. Raises UserError where there is none."""
    try:
        if path.stat().st_size > most:
            raise UserError(f"{path} is larger than {most >> 20} MiB: it is another file")
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is no JSON: it is damaged, or another file") from None
    if not isinstance(plain, dict):
        raise UserError(f"{path} holds no JSON object: it is another file")
    return plain
