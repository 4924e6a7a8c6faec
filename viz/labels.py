"""Tokens as a reader sees them: a printable label for each, and which of them make up a word."""

import re
import unicodedata
from collections.abc import Sequence

SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥"}
"""What stands for white space in a label."""
_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Zl", "Zp", "Zs")
"""Unicode categories of characters that can't be seen, or that rearrange their neighbours."""


def label(piece: bytes) -> str:
    """A token as visible text.

    Spaces, newlines and tabs become signs; bytes that are no whole character are given in hex; a
    character that can't be seen, or would rearrange its neighbours, is given by its code point.

    >>> label(b" the"), label(b"\\n"), label(b"\\xe2\\x80"), label("\\u202e".encode())
    ('␣the', '↵', '⟨E2 80⟩', '⟨U+202E⟩')
    """
    text = piece.decode("utf-8", "surrogateescape")
    shown = []
    for part in re.findall(r"[^\udc80-\udcff]|[\udc80-\udcff]+", text, re.DOTALL):
        category = unicodedata.category(part[0])
        if category == "Cs":
            shown.append(f"⟨{part.encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩")
        elif part in SIGNS:
            shown.append(SIGNS[part])
        elif category in _UNSEEN:
            shown.append(f"⟨U+{ord(part):04X}⟩")
        elif category.startswith("M") and not shown:
            shown.append("◌" + part)  # an accent needs something to stand on
        else:
            shown.append(part)
    return "".join(shown) or "⟨empty⟩"


def word_index(pieces: Sequence[bytes]) -> list[int]:
    """The number, from 0, of each token's word: a run of letters and digits, or of signs, and the
    white space before.

    Newlines stand apart; a token that is half a character goes with what stands before it.

    >>> word_index([b"He", b"llo", b",", b" wo", b"rld", b"\\n"])
    [0, 0, 1, 2, 2, 3]
    """
    index = -1
    before = ""
    words = []
    for piece in pieces:
        text = piece.decode("utf-8", "replace")
        first = _kind(text[0]) if text else before
        opens = first == "newline" or before == "newline" or (before != "space" and first != before)
        if not before or (opens and not text.startswith("\ufffd")):
            index += 1
        if text:
            before = _kind(text[-1])
        words.append(index)
    return words


def _kind(character: str) -> str:
    """Whether a character is a newline, other space, part of a word, or a sign."""
    if character == "\n":
        return "newline"
    if character.isspace():
        return "space"
    if character.isalnum() or character in "'\u2019_\ufffd":
        return "word"
    if unicodedata.category(character).startswith("M"):
        return "word"
    return "sign"
