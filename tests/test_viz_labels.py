"""Tokens as text that can be seen."""

import pytest

from viz.labels import label, word_index


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b"e", "e"),
        (b"\r", "⟨U+000D⟩"),
        (b"\x1b[", "⟨U+001B⟩["),
        (b"\xf0\x9f", "⟨F0 9F⟩"),
        (b" \xe2", "␣⟨E2⟩"),
        ("é".encode(), "é"),
        ("\u0301".encode(), "◌\u0301"),
        ("\u200b".encode(), "⟨U+200B⟩"),
        ("\u2028".encode(), "⟨U+2028⟩"),
        ("\u00a0".encode(), "⟨U+00A0⟩"),
        ("שלום".encode(), "שלום"),
        (b"", "⟨empty⟩"),
    ],
)
def test_label_is_visible_and_unambiguous(piece, shown):
    assert label(piece) == shown


def test_words_of_characters_and_of_subwords():
    assert word_index([c.encode() for c in "To be,\n'tis"]) == [0, 0, 1, 1, 1, 2, 3, 4, 4, 4, 4]
    assert word_index([b"un", b"believ", b"able", b"!!", b" It", b"'s"]) == [0, 0, 0, 1, 2, 2]
    assert word_index([b"a", b"\xc3", b"\xa9", b"b"]) == [0, 0, 0, 0]  # a character in two tokens
    assert word_index([b"!", b"\xe2\x80", b"\x94", b"x"]) == [0, 0, 0, 0]
    assert word_index([b" ", b"a", b" ", b" ", b"b"]) == [0, 0, 1, 1, 1]
