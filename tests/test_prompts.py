"""Prompts as text: escapes, files and their lines, what is said about them, what an empty one
starts from, and the order in which texts are printed.
"""

import io
from types import SimpleNamespace

import numpy as np
import pytest

from data import prompts as module
from data.prompts import (
    Output,
    TextRow,
    empty_prompt,
    encode_prompts,
    find_start,
    prompt_notes,
    read_escapes,
    read_prompts,
    start_text,
)
from data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from errors import UserError

# --- escapes ---


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (r"A:\n", "A:\n"),
        (r"a\tb\nc", "a\tb\nc"),
        (r"\\n", r"\n"),
        (r"\\\n", "\\\n"),
        (r"C:\dir \x \0 \r \"", r"C:\dir \x \0 \r \""),
        ("\\", "\\"),
        ("a\\", "a\\"),
        ("a real\nline", "a real\nline"),
        ("", ""),
    ],
)
def test_escapes(given, read):
    assert read_escapes(given) == read
    assert read_prompts(given) == [read]
    assert read_prompts(("x", given)) == ["x", read]


def test_files_have_real_newlines(tmp_path):
    (tmp_path / "p").write_bytes(rb"A:\n\\")
    assert read_prompts(prompt_file=str(tmp_path / "p")) == [r"A:\n\\"]
    assert read_prompts(prompts_file=str(tmp_path / "p")) == [r"A:\n\\"]


def test_no_prompt_is_an_empty_one():
    assert read_prompts() == read_prompts(()) == read_prompts("") == [""]


# --- a bad line ---


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"\xff", 1),
        (b"a\nb\n\xe4", 3),
        (b"a\r\n\r\nb\xc3(", 3),
        (b"a\rb\rc\rd \xff\n", 4),
    ],
)
@pytest.mark.parametrize("kind", ["prompt_file", "prompts_file"])
def test_the_line_that_is_no_utf_8(tmp_path, content, line, kind):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(
        UserError, match=rf"isn't UTF-8: byte 0x.. at offset \d+, in line {line}(\n|$)"
    ):
        read_prompts(**{kind: str(tmp_path / "p")})


def test_the_line_with_an_unknown_character():
    tokenizer = CharTokenizer("abc")
    lines = ["ab", "", "a?", "c", "!"]
    with pytest.raises(UserError, match=r"^line 3 of p\.txt \(1 more can't be read either\): 1 ch"):
        encode_prompts(lines, tokenizer, "p.txt")
    with pytest.raises(UserError, match=r"^line 3 of standard input: "):
        encode_prompts(lines[:4], tokenizer, "-")
    with pytest.raises(UserError, match=r"^prompt 2: "):
        encode_prompts(["a", "d"], tokenizer)
    with pytest.raises(UserError, match=r"^1 character\(s\) of the text"):
        encode_prompts(["d"], tokenizer)
    assert encode_prompts(["ab", ""], tokenizer, "p.txt") == [[0, 1], [0]]


# --- what is said ---


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["the cat sat on the mat.\n" * 30], 270)


def notes(prompts, tokenizer, limit=100, **files):
    return prompt_notes(prompts, encode_prompts(prompts, tokenizer), tokenizer, limit, **files)


def test_nothing_to_say(bpe):
    assert notes(["the cat", "a\tb", "x\n"], bpe) == []
    assert notes(["the cat "], ByteTokenizer()) == []
    assert notes(["the cat\n"], ByteTokenizer(), prompts_file="p") == []
    assert notes(["a b\nc"], ByteTokenizer(), prompt_file="p") == []


def test_a_space_at_the_end(bpe):
    (note,) = notes(["the cat "], bpe)
    assert note.startswith("note: the prompt ends in a space, which the bpe tokenizer joins")
    (note,) = notes(["a", "the ", "b", "cat "], bpe, prompts_file="p.txt")
    assert "2 of 4 prompts end (the first is line 2 of p.txt) in a space" in note


def test_an_editors_newline():
    (note,) = notes(["A:\n"], ByteTokenizer(), prompt_file="p.txt")
    assert note.startswith("note: p.txt ends in a newline, as editors leave one")
    (note,) = notes(["\n"], ByteTokenizer(), prompt_file="-")
    assert note.startswith("note: standard input ends in a newline")


def test_several_kinds_are_a_line_each(bpe):
    found = notes(["", "the cat sat on the mat the cat "], bpe, limit=4)
    assert [" ".join(note.split()[:4]) for note in found] == [
        "note: an empty prompt",
        "note: a prompt has",
        "note: 1 of 2",
    ]


# --- what an empty prompt starts from ---


def ids(tokenizer, text):
    return tokenizer.encode(text)


def test_start_of_one_text(bpe):
    """No separator in training: a newline, which is there."""
    for tokenizer in (bpe, ByteTokenizer(separator=True), CharTokenizer("\n .acehmnost", True)):
        assert tokenizer.separator is not None
        start = find_start(tokenizer, ids(tokenizer, "the cat\nsat\n"), 1)
        assert start == ids(tokenizer, "\n")[0]
        tokenizer.start = start
        assert empty_prompt(tokenizer) == [start]
        assert start_text(tokenizer).startswith("a newline, as training has seen no separator")
        tokenizer.start = None
        assert empty_prompt(tokenizer) == [tokenizer.separator]  # nothing is known


def test_start_between_documents(bpe):
    tokens = np.concatenate([ids(bpe, "the cat"), [bpe.separator], ids(bpe, "the mat\n")])
    assert find_start(bpe, tokens, 1) == bpe.separator  # it is seen, whatever is recorded
    assert find_start(bpe, ids(bpe, "the cat\n"), 2) == bpe.separator
    without = ByteTokenizer()
    assert find_start(without, ids(without, "a\nb"), 2) == 10


def test_start_of_a_text_without_newlines(bpe):
    for tokenizer in (bpe, ByteTokenizer(), CharTokenizer("\n acehmnost")):
        start = find_start(tokenizer, ids(tokenizer, "tea"), 1)
        assert start == ids(tokenizer, "tea")[0]
        tokenizer.start = start
        assert "'t', the training text's first token" in start_text(tokenizer)
        tokenizer.start = None


def test_a_long_split_is_searched_at_its_beginning(monkeypatch):
    tokens = ids(ByteTokenizer(), "abc\n")
    monkeypatch.setattr(module, "SEARCHED", 3)
    assert find_start(ByteTokenizer(), tokens, 1) == ord("a")
    monkeypatch.setattr(module, "SEARCHED", 4)
    assert find_start(ByteTokenizer(), tokens, 1) == 10


# --- printing ---


class Letters:
    """A decoder whose tokens are letters."""

    def push(self, token):
        return token

    def finish(self):
        return ""


def rows(*texts, done=()):
    made = []
    for index, text in enumerate(texts):
        row = TextRow(Letters(), ())
        for letter in text:
            row.push(letter)
        if index in done:
            row.push(None)
        made.append(row)
    return made


def printed(capsys):
    return capsys.readouterr().out


def test_texts_in_their_order_as_they_are_done(capsys):
    output = Output(["A", "B"], n_sample=2)
    output.show(0, rows("w", "x", done=[1]))
    assert printed(capsys) == ""
    output.show(0, rows("w", "x", done=[0, 1]))
    assert printed(capsys) == "--- 1 of 4 ---\nAw\n\n--- 2 of 4 ---\nAx\n"
    output.show(0, rows("w", "x", "y", done=[0, 1, 2]))  # a group drawn again says nothing twice
    assert printed(capsys) == "\n--- 3 of 4 ---\nBy\n"
    output.show(2, rows("y", "z", done=[0, 1]))
    assert printed(capsys) == "\n--- 4 of 4 ---\nBz\n"


def test_a_single_text_grows(capsys):
    output = Output(["A"])
    assert printed(capsys) == "A"
    for text, shown in (("x", "x"), ("xy", "y"), ("xy", "")):
        output.show(0, rows(text))
        assert printed(capsys) == shown
    output.show(0, rows("xyz", done=[0]))
    output.show(0, rows("xyz", done=[0]))
    assert printed(capsys) == "z\n"


def test_the_prompt_left_out(capsys):
    Output(["A"], show_prompt=False).show(0, rows("x", done=[0]))
    assert printed(capsys) == "x\n"
    Output(["A", "B"], show_prompt=False).show(0, rows("x", "y", done=[0, 1]))
    assert printed(capsys) == "--- 1 of 2 ---\nx\n\n--- 2 of 2 ---\ny\n"


def test_standard_input(monkeypatch):
    stdin = SimpleNamespace(buffer=io.BytesIO(b"a\\n\r\nb"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert read_prompts(prompts_file="-") == ["a\\n", "b"]


def test_a_prompts_file_without_a_line(tmp_path):
    """An empty line is an empty prompt; no line is none."""
    path = tmp_path / "p"
    path.write_bytes(b"\n")
    assert read_prompts("", "", str(path)) == [""]
    for content in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is empty: write a prompt on each line"):
            read_prompts("", "", str(path))
