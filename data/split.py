"""Which part of the text is for validation: whole documents, or the end of the text.

Whole documents are drawn at random, by their characters. A text of one document has none to spare:
its end is for validation. So it is where no set of whole documents comes within a point of the
share asked for, as with two books: then the documents that fit are, and what they lack is cut from
the end of those that training would have had.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from io import BufferedRandom
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from data.tokenizer import Tokenizer

BLANK_DOCUMENTS = "documents of white space left out"
NEAR = 0.01  # of all characters: as near to the share asked for as whole documents have to come


# --- before encoding: documents ---


def plan_split(
    characters: Sequence[int], val_fraction: float, seed: int
) -> tuple[np.ndarray, bool]:
    """Which documents are for validation, a boolean for each, and whether the end of the others is
    to be cut off for it as well. `characters`: of each document.
    """
    import numpy as np

    sizes = np.array(characters, np.int64)
    if len(sizes) == 1:
        return np.zeros(1, bool), True
    chosen = choose_validation(characters, val_fraction, seed)
    share = sizes[chosen].sum() / sizes.sum()
    if abs(share - val_fraction) <= NEAR:
        return chosen, False
    return _fitting(sizes, val_fraction, seed)[0], True


def choose_validation(characters: Sequence[int], val_fraction: float, seed: int) -> np.ndarray:
    """Which documents are for validation: a boolean per document, neither all nor none if there are
    two or more; a single one is for training.

    In a seeded order, a document is taken where it still fits into `val_fraction` of the
    characters; one more is taken if that comes closer to it.
    """
    import numpy as np

    sizes = np.array(characters, np.int64)
    if len(sizes) == 1:  # its end is for validation: `cut_end`
        return np.zeros(1, bool)
    chosen, missing = _fitting(sizes, val_fraction, seed)
    # What would remain or be exceeded if one more were taken. Where none is taken yet, every
    # document is too large, and it is the smallest.
    distance = np.where(chosen, np.inf, abs(sizes - missing))
    if distance.min() < missing or not chosen.any():
        chosen[distance.argmin()] = True
    if chosen.all():
        chosen[sizes.argmin()] = False
    return chosen


def _fitting(sizes: np.ndarray, val_fraction: float, seed: int) -> tuple[np.ndarray, float]:
    """The documents that, taken in a seeded order, fit into `val_fraction` of the characters, and
    how many characters are still missing.
    """
    import numpy as np

    chosen = np.zeros(len(sizes), bool)
    missing = val_fraction * sizes.sum()
    for document in np.random.default_rng(seed).permutation(len(sizes)):
        if sizes[document] <= missing:
            chosen[document] = True
            missing -= sizes[document]
    return chosen, missing


def by_line(texts: Iterable[tuple[int, str]], events: Counter[str]) -> Iterator[tuple[int, str]]:
    """Make a document of every line: yield (number, line with its end). Blank lines are left out,
    and counted in `events`. `texts`: (document, chunk of its text).
    """
    from data.rows import lines_of

    number = 0
    for _, chunks in groupby(texts, key=itemgetter(0)):
        for line in lines_of(text for _, text in chunks):
            if line.strip():
                yield number, f"{line}\n"
                number += 1
            elif line:
                events["lines of white space left out"] += 1


def dropped_event(delimiter: str) -> str:
    """What `split_on` counts delimiters under."""
    return f"delimiters {delimiter!r} dropped"


def split_on(
    texts: Iterable[tuple[int, str]], delimiter: str, events: Counter[str]
) -> Iterator[tuple[int, str]]:
    """Make a document of what stands between two delimiters: yield (number, chunk of its text).

    The delimiter is dropped and nothing else is: documents are those of `str.split`. Those of white
    space alone are left out. Both are counted in `events`. `texts`: (document, chunk of its text);
    the end of each is the end of a document too, and a delimiter that ends in a newline may lack
    that there. No more is held than a chunk, and white space that a document begins with.
    """
    dropped = dropped_event(delimiter)
    events[dropped] = 0  # so that it is reported before what follows from it
    number = 0
    for _, chunks in groupby(texts, key=itemgetter(0)):
        has_begun = False
        blank: list[str] = []  # white space that belongs to the next document, if there is one
        for part, is_end in _parts((text for _, text in chunks), delimiter):
            if has_begun or not part or part.isspace():
                beginning = ""
            else:
                has_begun = True
                beginning = "".join(blank)
                if (beginning + part).startswith("\n") and not delimiter.endswith("\n"):
                    way = repr(delimiter + "\n")
                    events[f"of the documents begin with a line end (--split-on {way})"] += 1
            if has_begun and part:
                yield number, beginning + part
            elif part:
                blank.append(part)
            if is_end:
                events[dropped] += 1
                events[BLANK_DOCUMENTS] += not has_begun
                number += has_begun
                has_begun = False
                blank.clear()
        events[BLANK_DOCUMENTS] += bool(blank) and not has_begun
        number += has_begun


def _parts(chunks: Iterable[str], delimiter: str) -> Iterator[tuple[str, bool]]:
    """Yield (part of a text, whether a delimiter ends it)."""
    n_held = len(delimiter) - 1  # characters that may be the beginning of a delimiter
    held = ""
    for chunk in chunks:
        *parts, rest = (held + chunk).split(delimiter)
        for part in parts:
            yield part, True
        certain = max(0, len(rest) - n_held)
        yield rest[:certain], False
        held = rest[certain:]
    if held and delimiter == held + "\n":
        yield "", True
    else:
        yield held, False


# --- after encoding: tokens ---


@dataclass
class Split:
    """One of the two token files, and what was written into it."""

    file: BufferedRandom
    tokens: int = 0
    bytes: int = 0  # of text, as UTF-8
    documents: int = 0
    starts: array = field(default_factory=lambda: array("Q"))  # token at which each document begins


def separator_bytes(tokenizer: Tokenizer) -> bytes:
    """The separator as it stands in a token file; nothing where the tokenizer has none."""
    if tokenizer.separator is None:
        return b""
    return tokenizer.separator.to_bytes(tokenizer.dtype.itemsize, "little")


def _is_start(split: Split, token: int) -> bool:
    """Whether a document begins at that token."""
    index = bisect_left(split.starts, token)
    return index < len(split.starts) and split.starts[index] == token


def cut_end(tokenizer: Tokenizer, val_fraction: float, train: Split, val: Split) -> tuple[int, int]:
    """Move the last of training's tokens to the end of val, so that it holds `val_fraction` of all.

    Of n tokens train keeps int((1 - val_fraction) * n), computed exactly: in floats, (1 - 0.9) * 10
    is less than 1. Returns how many tokens were moved, and by how many separators there are more
    now (or fewer): one stands before what is moved, where val held documents, and one goes where
    the cut falls between two documents.
    """
    import numpy as np

    n_tokens = train.tokens + val.tokens
    n_kept = int((1 - Fraction(str(val_fraction))) * n_tokens)
    if n_kept >= train.tokens:
        return 0, 0
    begin = n_kept  # of what is moved
    n_separators = 0
    if tokenizer.separator is not None:
        if n_kept and _is_start(train, n_kept):
            n_kept -= 1
            n_separators -= 1
        elif _is_start(train, n_kept + 1):
            begin += 1
            n_separators -= 1
        if val.documents:
            val.file.write(separator_bytes(tokenizer))
            val.tokens += 1
            n_separators += 1
    n_moved = train.tokens - begin
    lengths = tokenizer.byte_lengths()
    size = tokenizer.dtype.itemsize
    n_bytes = 0
    train.file.seek(begin * size)
    while chunk := train.file.read(1 << 18):
        val.file.write(chunk)
        n_bytes += int(lengths[np.frombuffer(chunk, tokenizer.dtype)].sum())
    train.file.truncate(n_kept * size)
    first = bisect_left(train.starts, begin)
    begins_inside = first == len(train.starts) or train.starts[first] > begin
    val.documents += len(train.starts) - first + begins_inside
    train.documents = max(1, bisect_left(train.starts, n_kept))
    train.tokens = n_kept
    train.bytes -= n_bytes
    val.tokens += n_moved
    val.bytes += n_bytes
    return n_moved, n_separators
