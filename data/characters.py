"""Characters that hint at a fault: controls that no text needs, and letters with accents in two
forms, composed (é) and decomposed (e and U+0301), which look alike and are not.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection

import numpy as np

# What a text may hold of Latin-1: all but controls, save tab and newline.
_GOOD = bytes({9, 10, *range(32, 127), *range(160, 256)})
_COMPOSED = bytes(code for code in range(192, 256) if unicodedata.decomposition(chr(code)))
_NOT_COMPOSED = bytes(set(range(256)) - set(_COMPOSED))
_ODD_BEYOND = "\ufffd\ufeff\ufffe\uffff"
NAMES = {
    0x00: "NUL",
    0x08: "backspace",
    0x0B: "vertical tab",
    0x0C: "form feed",
    0x1A: "Ctrl-Z",
    0x1B: "escape",
    0x7F: "delete",
    0x85: "next line",
    0xFEFF: "byte-order mark",
    0xFFFD: "replacement of what did not decode",
}
NUMPY_PAYS = 1 << 14  # bytes
LONGEST = 3  # characters that one may be decomposed into, as Hangul is
SHOWN = 6  # characters that a line names


class Survey:
    """Counts what it is told of, a chunk of text at a time."""

    def __init__(self):
        self._n = np.zeros(0x110000, np.int64)  # of characters in text that goes beyond ASCII
        self._controls: dict[int, int] = {}
        self._tail = ""
        self.n_composed = 0
        self.n_decomposed = 0
        self.example = ""
        """A decomposed character."""

    def add(self, text: str) -> None:
        """Count the characters of a chunk; nearly free where they are ASCII."""
        if not text:
            return
        if text.isascii():
            self._add_controls(text.encode())
        else:
            self._add_letters(text)
        self._tail = (self._tail + text[-LONGEST:])[-LONGEST:]

    def _add_controls(self, raw: bytes) -> None:
        """Count controls in Latin-1 bytes."""
        if len(raw) > NUMPY_PAYS and not _may_hold_controls(np.frombuffer(raw, np.uint8)):
            return
        odd = raw.translate(None, _GOOD)
        for code in set(odd):
            self._controls[code] = self._controls.get(code, 0) + odd.count(code)

    def _add_letters(self, text: str) -> None:
        try:
            raw = text.encode("latin-1")
        except UnicodeEncodeError:
            codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
            counts = np.bincount(codes)
            self._n[: len(counts)] += counts
            self._add_decomposed(text)
            return
        self._add_controls(raw)
        self.n_composed += len(raw.translate(None, _NOT_COMPOSED))

    def _add_decomposed(self, text: str) -> None:
        text = self._tail + text  # whose mark may stand first
        if unicodedata.is_normalized("NFC", text):
            return
        self.n_decomposed += _n_joined(text) - _n_joined(self._tail)
        if not self.example:
            self.example = next(iter(_decomposed(text)), "")

    def report(self) -> list[str]:
        """A line on controls and one on mixed forms, where there is something to say."""
        codes = self._n.nonzero()[0].tolist()
        odd = dict(self._controls)
        n_composed = self.n_composed
        for code in codes:
            character = chr(code)
            if character in _ODD_BEYOND or (code < 160 and code not in _GOOD):
                odd[code] = odd.get(code, 0) + int(self._n[code])
            elif _is_composed(character):
                n_composed += int(self._n[code])
        lines = []
        if odd:
            lines.append(_controls_line(odd))
        if self.n_decomposed:
            lines.append(self._forms_line(n_composed))
        return lines

    def _forms_line(self, n_composed: int) -> str:
        composed = unicodedata.normalize("NFC", self.example)
        spelt = " + ".join(f"U+{ord(part):04X}" for part in self.example)
        example = f", such as {composed} as {spelt}" if self.example else ""
        line = f"decomposed characters: {self.n_decomposed:,}{example}"
        if n_composed:
            return (
                f"{line}; composed: {n_composed:,}. Both forms look alike and are learned apart; "
                "uconv -x nfc makes them one"
            )
        return f"{line}; none is composed, so prompts must be decomposed too"


def _may_hold_controls(codes: np.ndarray) -> bool:
    """False for ASCII without controls: three passes of numpy take a third of the time that
    `bytes.translate` takes.
    """
    return bool(codes.max() >= 127 or codes.min() < 9 or (codes - np.uint8(11)).min() <= 20)


def _n_joined(text: str) -> int:
    return len(text) - len(unicodedata.normalize("NFC", text))


def _is_composed(character: str) -> bool:
    parts = unicodedata.normalize("NFD", character)
    return len(parts) > 1 and unicodedata.normalize("NFC", parts) == character


def _decomposed(text: str) -> list[str]:
    """The first spelling in several characters for which there is one."""
    for place in range(1, len(text)):
        pair = text[place - 1 : place + 1]
        if len(unicodedata.normalize("NFC", pair)) < 2:
            return [pair]
    return []


def _controls_line(odd: dict[int, int]) -> str:
    """What controls there are, the most frequent first."""
    shown = []
    for code, n in sorted(odd.items(), key=lambda item: (-item[1], item[0]))[:SHOWN]:
        name = NAMES.get(code, "C1" if 128 <= code < 160 else "")
        shown.append(f"U+{code:04X}{f' ({name})' if name else ''} {n:,}")
    if len(odd) > SHOWN:
        shown.append("...")
    line = f"suspicious control characters: {sum(odd.values()):,}: {', '.join(shown)}"
    if any(128 <= code < 160 and code != 0x85 for code in odd):
        line += "; C1 is often Windows-1252 taken for Latin-1: try --encoding cp1252"
    if 0x1B in odd:
        line += "; escape begins terminal colours, or ISO-2022-JP: --encoding iso2022_jp"
    return line


# --- what a vocabulary lacks and has in another form ---


def known_forms(text: str, unknown: Collection[str], known: Collection[str]) -> dict[str, str]:
    """The parts of `text` with unknown characters that can be written in known ones, and how:
    composed, decomposed, or as what a wide or joined character is made of (the ligature "fi", a
    space that does not break).

    >>> known_forms("\ufb01n", {"\ufb01"}, set("fin"))
    {'ﬁ': 'fi'}
    """
    forms: dict[str, str] = {}
    for part in _with_marks(text[: 1 << 18]):
        if part in forms or not any(character in unknown for character in part):
            continue
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            other = unicodedata.normalize(form, part)
            if all(character in known for character in other):
                forms[part] = other
                break
    return forms


def _with_marks(text: str) -> list[str]:
    """The characters of a text, each with the marks behind it that belong to it."""
    parts: list[str] = []
    for character in text:
        joins = parts and (
            unicodedata.combining(character)
            or len(unicodedata.normalize("NFC", parts[-1] + character)) == 1
        )
        if joins:
            parts[-1] += character
        else:
            parts.append(character)
    return parts
