"""A list in an order: lines that are items, sorted or counted, whose end is unlike the rest.

Of a list of names by their frequency, or from A to Z, the last tenth is another language: a loss
measured on it says little. What is here notices such a list, from an even sample of its lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

SAMPLE = 20_000  # lines that are looked at, spread evenly
LONG_LINE = 200  # characters; where lines are longer on average, the text is no list
FEWEST = 20  # lines below which nothing can be said
FEWEST_COMPARED = 40  # and below which ends are not compared
ITEM_WORDS = 4  # on average at most: names, words and numbers, no sentences
LEAST_STEPS = 10  # up or down, of which nearly all go one way where lines are sorted
DRAWS = 40  # random ends that the real one is compared with
PLAIN = 0.002  # bits above chance that matter
PAIRS = 1 << 12  # kinds of character pairs that are told apart


class LineSample:
    """An even sample of the lines of the latest document, gathered as its text goes by."""

    def __init__(self):
        self.document = -1
        self.is_list = True
        """False as soon as it is plain that this is no list of lines."""
        self._start()

    def _start(self) -> None:
        self.lines: list[str] = []
        self._stride = 1
        self._n_lines = 0
        self._n_blank = 0
        self._n_characters = 0
        self._rest = ""

    def add(self, document: int, text: str) -> None:
        """Take a chunk of a document's text. Of more than a few documents none is a list."""
        if document != self.document:
            self.document = document
            self.is_list = document < 8
            self._start()
        if not self.is_list:
            return
        *lines, self._rest = (self._rest + text).split("\n")
        self.lines += lines[-self._n_lines % self._stride :: self._stride]
        self._n_lines += len(lines)
        self._n_blank += lines.count("")
        self._n_characters += len(text)
        while len(self.lines) > 2 * SAMPLE:
            self.lines = self.lines[::2]
            self._stride *= 2
        has_long_lines = self._n_characters > LONG_LINE * (self._n_lines + FEWEST)
        has_paragraphs = 20 * self._n_blank > self._n_lines + FEWEST
        if has_long_lines or has_paragraphs:
            self.is_list = False
            self._start()

    def why_uneven(self, val_fraction: float) -> str:
        """What makes the last `val_fraction` of the lines unlike the rest, in a few words; "" where
        nothing does or where the text is no list.
        """
        lines = [line for line in self.lines if line.strip()]
        has_long_lines = self._n_characters > LONG_LINE * self._n_lines
        if not self.is_list or has_long_lines or len(lines) < FEWEST:
            return ""
        if order := order_of(lines):
            return f"the lines are sorted {order}"
        n_words = sum(len(line.split()) for line in lines)
        are_items = n_words <= ITEM_WORDS * len(lines) and len(lines) >= FEWEST_COMPARED
        if are_items and is_end_unlike(lines, val_fraction):
            return "the last lines are unlike the others"
        return ""


def order_of(lines: Sequence[str]) -> str:
    """By what lines are sorted, "by letter" or "by length"; "" where they are not."""
    ways: dict[str, list[Any]] = {
        "by length": [len(line) for line in lines],
        "by letter": [line.casefold() for line in lines],
    }
    for way, keys in ways.items():
        steps = [before < after for before, after in pairwise(keys) if before != after]
        rising = sum(steps)
        if len(steps) >= LEAST_STEPS and not 0.05 * len(steps) <= rising <= 0.95 * len(steps):
            return way
    return ""


def is_end_unlike(lines: Sequence[str], val_fraction: float) -> bool:
    """Whether the pairs of characters in the last lines are distributed otherwise than in random
    ones.

    The measure is the Jensen-Shannon divergence, in bits, of those lines' pairs from all others';
    that of as many lines drawn at random, again and again, says what chance does.
    """
    lengths = np.array([len(line) + 1 for line in lines])
    owner = np.repeat(np.arange(len(lines)), lengths)  # the line that a pair belongs to
    codes = np.frombuffer("\n".join(["", *lines, ""]).encode("utf-32-le", "replace"), "<u4")
    codes = codes.astype(np.int64)
    pairs = (codes[:-1] * 65_599 + codes[1:]) % PAIRS
    total = np.bincount(pairs, minlength=PAIRS)
    n_end = max(1, round(val_fraction * len(lines)))
    random = np.random.default_rng(0)

    def divergence(chosen: np.ndarray) -> float:
        inside = np.zeros(len(lines), bool)
        inside[chosen] = True
        part = np.bincount(pairs[inside[owner]], minlength=PAIRS)
        return jensen_shannon(part, total - part)

    chance = [divergence(random.choice(len(lines), n_end, replace=False)) for _ in range(DRAWS)]
    found = divergence(np.arange(len(lines) - n_end, len(lines)))
    mean = float(np.mean(chance))
    spread = float(np.std(chance))
    return found - mean > max(6 * spread, PLAIN)


def jensen_shannon(one: np.ndarray, other: np.ndarray) -> float:
    """The divergence of two distributions, given as counts, in bits: 0 for the same, 1 for none in
    common.
    """
    p = one / one.sum()
    q = other / other.sum()
    middle = (p + q) / 2

    def relative(distribution: np.ndarray) -> float:
        there = distribution > 0
        return float((distribution[there] * np.log2(distribution[there] / middle[there])).sum())

    return (relative(p) + relative(q)) / 2
