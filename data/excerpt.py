"""A stretch of a text to look at attention on: one in which much is said again."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

SEARCHED = 1 << 20
"""Tokens of a split that are searched, from its beginning."""
CANDIDATES = 1 << 13
"""Stretches that are compared; of more, every second, third ... is."""
PIECE_BYTES = 5
"""Bytes of a piece that counts as said again: longer than what letters repeat by chance."""
FEWEST = 4
"""Paragraphs, or lines, among which there is a choice."""
SPARSE = 64
"""Stretches for which there must be one paragraph, or line, at the least."""
AT_ONCE = 1 << 9  # stretches that are compared at once


def choose_excerpt(tokens: np.ndarray, tokenizer: "Tokenizer", n_token: int) -> list[int]:
    """`n_token` of the (n,) ids of a split, or all if it has no more: where a model that looks back
    finds most to look at.

    Of the stretches that begin a paragraph, or else a line, or else anywhere, it is the one in
    which the most different pieces of some letters (`PIECE_BYTES`) stand twice or more; of equals
    the first. In dialogue that is where speakers take turns, in code where names recur. What is
    repeated many times counts once: a row of dashes is one piece. The same text gives the same
    stretch always.
    """
    searched = np.asarray(tokens[: max(SEARCHED, n_token)])
    if len(searched) <= n_token:
        return searched[:n_token].tolist()
    starts = _starts(searched, tokenizer, n_token)
    starts = starts[:: -(-len(starts) // CANDIDATES)]
    pieces = _pieces(searched, tokenizer)
    size = len(searched) - len(pieces) + 1
    counts = [
        _said_again(pieces[first[:, None] + np.arange(n_token - size + 1)])
        for first in np.split(starts, range(AT_ONCE, len(starts), AT_ONCE))
        if n_token > size
    ]
    best = int(np.concatenate(counts).argmax()) if counts else 0
    first = int(starts[best])
    return searched[first : first + n_token].tolist()


def _starts(searched: np.ndarray, tokenizer: "Tokenizer", n_token: int) -> np.ndarray:
    """Where a stretch of `n_token` may begin: at paragraphs and documents; where there are hardly
    any, at lines; else anywhere.
    """
    last = len(searched) - n_token
    before = searched[:last]
    ids = np.unique(before)
    texts = [tokenizer.decode_bytes([i]) for i in ids.tolist()]
    which = np.searchsorted(ids, before)
    is_end = np.array([text.endswith(b"\n") for text in texts])[which]
    is_blank = np.array([text.endswith(b"\n\n") for text in texts])[which]
    is_break = np.array([text == b"\n" for text in texts])[which]
    is_blank[1:] |= is_end[:-1] & is_break[1:]
    if tokenizer.separator is not None:
        is_blank |= before == tokenizer.separator
    for is_before in (is_blank, is_end):
        if is_before.sum() >= max(FEWEST, last / (SPARSE * n_token)):
            return np.flatnonzero(is_before) + 1
    return np.arange(last + 1)


def _pieces(searched: np.ndarray, tokenizer: "Tokenizer") -> np.ndarray:
    """The number of the piece that begins at each token: the same for the same tokens."""
    lengths = tokenizer.byte_lengths()
    size = max(2, round(PIECE_BYTES / max(1.0, lengths[searched].mean())))
    ids = searched.astype(np.uint64)
    numbers = ids
    for offset in range(1, size):
        # Beyond 64 bits it wraps, and two pieces in an astronomical number share theirs.
        numbers = numbers[:-1] * np.uint64(tokenizer.vocab_size) + ids[offset:]
    return numbers


def _said_again(pieces_WT: np.ndarray) -> np.ndarray:
    """Of each of W stretches, how many different pieces stand in it twice or more, (W,)."""
    ordered = np.sort(pieces_WT, axis=-1)
    is_same = ordered[:, 1:] == ordered[:, :-1]
    is_first = np.pad(~is_same[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return (is_same & is_first).sum(-1)
