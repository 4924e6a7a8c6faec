"""A corpus of random words said again and again, on which a small model learns to look back.

A line is a word of random letters, said several times: "breotsia breotsia breotsia". No other line
has it. So the first time little can be known of it, and from the second time on everything, but
only by looking at what followed the same letter before, as an induction head does (Olsson et al.
2022, "In-context Learning and Induction Heads"). Words differ in length, so that looking back by a
fixed distance is of no use, and no letter stands twice in a word, so that the letter before says
where to look.

In six words of ten, on average, two consonants and two vowels take turns. Which of them comes next
says the letter before, beside the one that stands there: something to learn for a head that looks
one letter back, and an induction head is built on such a head.
"""

from random import Random

SEED = 2022
N_PART = 20
"""Documents, of which whole ones are for validation."""
LINES = 3_000
"""In each part."""
LETTERS = (6, 16)
"""Fewest and most in a word of any letters, none twice."""
SPOKEN_LETTERS = (6, 12)
"""In one where consonants and vowels take turns: there are but six vowels."""
FREE = 0.4
"""Share of the former."""
CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
TIMES = (3, 5)
"""How often a word is said, at the least and at the most."""


def random_words(n_part: int = N_PART, n_line: int = LINES) -> dict[str, str]:
    """The corpus: the name of each of `n_part` documents, and its text of `n_line` lines. The same
    on every machine and in every version of Python.
    """
    draw = Random(SEED)
    used: set[str] = set()
    parts = {}
    for number in range(1, n_part + 1):
        lines = [_line(draw, used) for _ in range(n_line)]
        parts[f"words-{number:02}.txt"] = "".join(lines)
    return parts


def _line(draw: Random, used: set[str]) -> str:
    """A word that is not among those `used`, to which it is added, said several times."""
    word = ""
    while not word or word in used:
        word = _word(draw)
    used.add(word)
    return " ".join([word] * _between(draw, TIMES)) + "\n"


def _word(draw: Random) -> str:
    """A word of either kind."""
    if draw.random() < FREE:
        left = list(CONSONANTS + VOWELS)
        return "".join(_take(draw, left) for _ in range(_between(draw, LETTERS)))
    consonants = list(CONSONANTS)
    vowels = list(VOWELS)
    turns = [consonants, consonants, vowels, vowels] * 3
    return "".join(_take(draw, left) for left in turns[: _between(draw, SPOKEN_LETTERS)])


def _take(draw: Random, left: list[str]) -> str:
    """One of the letters that are left, which it leaves."""
    return left.pop(_between(draw, (0, len(left) - 1)))


def _between(draw: Random, bounds: tuple[int, int]) -> int:
    """A whole number from the first to the last of `bounds`. By `random` alone, whose numbers are
    promised to stay what they are, as those of `randint` are not.
    """
    first, last = bounds
    return first + int(draw.random() * (last - first + 1))
