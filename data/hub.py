"""Datasets of huggingface.co, by name, through the package `datasets` where that is installed.

A dataset is streamed once, and the column that holds the text copied to a temporary file, as
standard input is: a corpus is read twice, and the second time must not ask the network, nor get
another answer.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from typing import Any, BinaryIO

from errors import MachineError, UserError

PREFIX = "hf:"
"""What tells a dataset's name from a path."""
FORM = "hf:OWNER/NAME, hf:OWNER/NAME:SPLIT or hf:OWNER/NAME/CONFIGURATION:SPLIT"
_NAME = re.compile(r"hf:(\w[\w.-]*(?:/\w[\w.-]*)?)(?:/(\w[\w.-]*))?(?::(\w[\w.-]*))?")


def parse_name(name: str) -> tuple[str, str | None, str]:
    """Dataset, configuration or None, and split of a name. UserError where it is none.

    >>> parse_name("hf:roneneldan/TinyStories"), parse_name("hf:Salesforce/wikitext/v1:test")
    (('roneneldan/TinyStories', None, 'train'), ('Salesforce/wikitext', 'v1', 'test'))
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise UserError(f"{name} names no dataset: write {FORM}")
    return found[1], found[2], found[3] or "train"


def copy_column(name: str, field: str) -> BinaryIO:
    """A temporary file with the column `field` of a dataset as JSON Lines, in ASCII. UserError
    where the dataset can't be had or the column isn't text, MachineError where the disk is full.
    """
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the corpus is)
    try:
        for number, row in enumerate(_rows(name), start=1):
            line = json.dumps({field: _text_of(row, field, f"{name}, row {number:,}")})
            copy.write(f"{line}\n".encode())
        copy.flush()
    except OSError as error:  # of writing alone: what reading raises has become a UserError
        raise MachineError(
            f"{name} can't be copied to {tempfile.gettempdir()}: {error.strerror}; TMPDIR names "
            "another folder"
        ) from None
    return copy


def _text_of(row: dict[str, Any], field: str, where: str) -> str | None:
    if field not in row:
        columns = ", ".join(map(str, row))[:200]
        raise UserError(f"{where}: no column {field!r}; columns found: {columns} (--field)")
    text = row[field]
    if not isinstance(text, str | None):
        found = type(text).__name__
        raise UserError(f"{where}: column {field!r} holds {found}, not text (--field)")
    return text


def _rows(name: str) -> Iterable[dict[str, Any]]:
    """The rows of a dataset as they come over the network. UserError where they don't."""
    dataset, configuration, split = parse_name(name)
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{name} asks for the package datasets: pip install datasets; or pipe a file of it: "
            f"curl -L https://huggingface.co/datasets/{dataset}/resolve/main/FILE | "
            "python -m data.prepare -"
        ) from None
    from tqdm import tqdm

    try:
        rows = load_dataset(dataset, configuration, split=split, streaming=True)
        yield from tqdm(rows, desc="fetch", unit=" rows", leave=False, disable=None)
    except Exception as error:  # of the network, of the library, of the dataset's owner
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{name} could not be read ({why})") from None
