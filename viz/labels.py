"""Tokens as text that can be seen, and the words they make."""

import re
import unicodedata
from collections.abc import Sequence

_SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}


def label(piece: bytes) -> str:
    """A token as visible text: spaces, newlines and tabs as signs; bytes that are no whole
    character in hex; a character that can't be seen, or would rearrange its neighbours, by its code
    point.

    >>> label(b" the"), label(b"\\n"), label(b"\\xe2\\x80"), label("\\u202e".encode())
    ('␣the', '↵', '⟨E2 80⟩', '⟨U+202E⟩')
    """
    shown = []
    for part in re.findall(
        r"[^\udc80-\udcff]|[\udc80-\udcff]+", piece.decode("utf-8", "surrogateescape"), re.DOTALL
    ):
        kind = unicodedata.category(part[0])
        if kind == "Cs":
            shown.append(f"⟨{part.encode('utf-8', 'surrogateescape').hex(' ').upper()}⟩")
        elif part in _SHOWN:
            shown.append(_SHOWN[part])
        elif kind in ("Cc", "Cf", "Cn", "Co", "Zl", "Zp", "Zs"):
            shown.append(f"⟨U+{ord(part):04X}⟩")
        else:
            shown.append("◌" + part if kind.startswith("M") and not shown else part)
    return "".join(shown) or "⟨empty⟩"


def _kind(character: str) -> str:
    if character == "\n":
        return "newline"
    if character.isspace():
        return "space"
    return (
        "word"
        if character.isalnum()
        or character in "'\u2019_\ufffd"
        or unicodedata.category(character)[0] == "M"
        else "sign"
    )


def word_index(pieces: Sequence[bytes]) -> list[int]:
    """The number, from 0, of each token's word: a run of letters and digits, or of signs, and the
    white space before.

    Newlines stand apart; a token that is half a character goes with what stands before it.

    >>> word_index([b"He", b"llo", b",", b" wo", b"rld", b"\\n"])
    [0, 0, 1, 2, 2, 3]
    """
    index, before, words = -1, "", []
    for piece in pieces:
        text = piece.decode("utf-8", "replace")
        first = _kind(text[0]) if text else before
        opens = first == "newline" or before == "newline" or (before != "space" and first != before)
        index += not before or (opens and text[:1] != "\ufffd")
        before = _kind(text[-1]) if text else before
        words.append(index)
    return words
