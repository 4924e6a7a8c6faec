"""Odd characters counted, mixed forms told, and the form that a vocabulary knows offered."""

import re
import unicodedata

import pytest
from reading import read, write

from data.characters import Survey, known_forms
from data.tokenizer import CharTokenizer
from errors import UserError


def survey(text, size=1 << 20):
    found = Survey()
    for start in range(0, len(text), size):
        found.add(text[start : start + size])
    return found.report()


@pytest.mark.parametrize("around", ["plain", "d\xe9j\xe0", "\u4e2d\u6587"])
@pytest.mark.parametrize("length", [10, 30_000])
@pytest.mark.parametrize(
    ("character", "name"),
    [
        ("\0", r"U\+0000 \(NUL\) 3"),
        ("\x0c", r"U\+000C \(form feed\) 3"),
        ("\x1a", r"U\+001A \(Ctrl-Z\) 3"),
        ("\x1b", r"U\+001B \(escape\) 3; escape .*--encoding iso2022_jp"),
        ("\x7f", r"U\+007F \(delete\) 3"),
        ("\x01", r"U\+0001 3"),
        ("\x1f", r"U\+001F 3"),
        ("\x92", r"U\+0092 \(C1\) 3; C1 .*--encoding cp1252"),
        ("\x85", r"U\+0085 \(next line\) 3$"),
        ("\ufffd", r"U\+FFFD \(.*\) 3"),
        ("\ufeff", r"U\+FEFF \(byte-order mark\) 3"),
    ],
)
def test_controls_are_counted(around, length, character, name):
    text = (around * length)[:length]
    (line,) = survey(text + character + text + character * 2 + "\n")
    assert line.startswith("suspicious control characters: 3: ")
    assert re.search(name, line)


@pytest.mark.parametrize(
    "text", ["", "tab\tand\nnewline ~", "d\xe9j\xe0 vu\xa0", "\u4e2d\u6587 \U0001f600"]
)
def test_ordinary_text_is_not_reported(text):
    assert survey(text * 9) == []


@pytest.mark.parametrize("size", [1, 2, 3, 1 << 20])
def test_mixed_forms_are_told_wherever_chunks_are_cut(size):
    text = "d\xe9j\xe0 cafe\u0301 nai\u0308ve \u1112\u1161\u11ab \u304b\u3099\n"
    (line,) = survey(text * 5, size)
    n_decomposed = len(text) - len(unicodedata.normalize("NFC", text))
    assert line.startswith(f"decomposed characters: {5 * n_decomposed}, such as \xe9 as U+0065 + ")
    assert "composed: 10. Both forms" in line


def test_decomposed_characters_alone():
    (line,) = survey("cafe\u0301 ")
    assert line.startswith("decomposed characters: 1, ")
    assert "prompts must be decomposed too" in line
    assert survey("caf\xe9 \u4e2d") == []


# --- the known form of an unknown character ---


@pytest.mark.parametrize(
    ("symbols", "text", "offered"),
    [
        ("acf\xe9", "cafe\u0301", "'\\xe9' (\xe9) for 'e\\u0301'"),
        ("acef\u0301", "caf\xe9", "'e\\u0301' (e\u0301) for '\\xe9'"),
        ("a\uac00", "a\u1100\u1161", "'\\uac00' (\uac00) for '\\u1100\\u1161'"),
        ("\u304c", "\u304b\u3099", "'\\u304c' (\u304c) for '\\u304b\\u3099'"),
        ("\u1ec7", "e\u0323\u0302", "'\\u1ec7' (\u1ec7) for 'e\\u0323\\u0302'"),
        (" a", "a\xa0a", "' ' ( ) for '\\xa0'"),
    ],
)
def test_the_known_form_is_offered(symbols, text, offered):
    symbols = "".join(sorted(set(symbols)))
    with pytest.raises(UserError) as caught:
        CharTokenizer(symbols).encode(text)
    first, second = str(caught.value).splitlines()
    assert "not among" in first
    assert second.startswith(f"known in another form: write {offered}; else leave them out")


def test_nothing_is_offered_that_is_not_known():
    with pytest.raises(UserError, match=r"\nleave them out"):
        CharTokenizer("abc").encode("\xe9")
    assert known_forms("e\u0301x\xe9", {"\u0301", "x"}, set("e")) == {}


def test_prepare_counts_what_the_corpus_holds(tmp_path):
    corpus = read(write(tmp_path / "a.jsonl", b'{"text": "a\\u0000b\\u0092"}\n'))[2]
    found = Survey()
    for _, text in corpus.documents():
        found.add(text)
    assert "U+0000 (NUL) 1, U+0092 (C1) 1" in found.report()[0]
