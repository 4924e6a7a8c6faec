"""Which part is for validation: whole documents where they come near the share asked for, else an
end that is cut off, counted by hand.
"""

import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from data import prepare
from data.split import (
    Split,
    by_line,
    choose_validation,
    cut_end,
    dropped_event,
    plan_split,
    split_on,
)
from data.tokenizer import ByteTokenizer, CharTokenizer, load_tokenizer


def prepared(tmp_path, *texts, **options):
    """Prepare texts as files, in this process: dataset.json, and both splits as text."""
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    prepare.prepare(prepare.Options(tuple(map(str, paths)), out=out, **options))
    dataset = json.loads((out / "dataset.json").read_text())
    tokenizer = load_tokenizer(dataset["tokenizer"])
    splits = []
    for name in ("train", "val"):
        ids = np.fromfile(out / f"{name}.bin", tokenizer.dtype)
        assert dataset["splits"][name]["tokens"] == len(ids)
        assert dataset["splits"][name]["bytes"] == tokenizer.byte_lengths()[ids].sum()
        splits.append(tokenizer.decode(ids))
    n_separators = sum(text.count("<|endoftext|>") for text in splits)
    assert dataset["separators"] == n_separators
    return dataset, *splits


# --- whole documents ---


@pytest.mark.parametrize(
    ("characters", "val_fraction", "n_val"),
    [
        ([10, 10], 0.1, 1),
        ([1000, 1], 0.5, 1),
        ([10] * 10, 0.1, 1),
        ([10] * 10, 0.99, 9),
        ([10] * 10, 0.0001, 1),
        ([1] * 1000 + [9000], 0.09, 900),
    ],
)
def test_validation_documents(characters, val_fraction, n_val):
    chosen = choose_validation(characters, val_fraction, seed=0)
    assert chosen.sum() == n_val
    np.testing.assert_array_equal(chosen, choose_validation(characters, val_fraction, seed=0))


def test_validation_takes_the_smallest_when_all_are_too_large():
    assert choose_validation([500, 300, 700], 0.01, seed=5).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("characters", "val_fraction", "n_val", "is_cut"),
    [
        ([10] * 10, 0.1, 1, False),
        ([10] * 9 + [11], 0.1, 1, False),  # 9.9 or 10.9 %
        ([1] * 1000 + [9000], 0.09, 900, False),
        ([12] * 8, 0.1, 0, True),  # 12.5 %
        ([500, 500], 0.1, 0, True),
        ([100_000, 23], 0.1, 1, True),
        ([100_000, 23], 0.00023, 1, False),
        ([500, 300, 700], 0.195, 1, False),  # the one of 20 %
        ([80, 5, 5], 0.3, 2, True),
        ([7], 0.1, 0, True),
    ],
)
def test_an_end_is_cut_where_whole_documents_come_no_nearer(
    characters, val_fraction, n_val, is_cut
):
    chosen, found = plan_split(characters, val_fraction, seed=0)
    assert found == is_cut
    assert chosen.sum() == n_val
    if not is_cut:  # then the split is what it always was
        np.testing.assert_array_equal(chosen, choose_validation(characters, val_fraction, seed=0))


# --- ends ---


def files(tmp_path):
    return [(tmp_path / name).open("w+b") for name in ("train", "val")]


@pytest.mark.parametrize(
    ("documents", "in_val", "n_kept", "train_text", "val_text", "more", "counts"),
    [
        # "|" is the separator. Of 12 tokens in all, as many stay as the share says.
        (["abcdef", "ghijk"], [], 8, "abcdef|g", "hijk", 0, (2, 1)),
        (["abcdef", "ghijk"], [], 7, "abcdef", "ghijk", -1, (1, 1)),
        (["abcdef", "ghijk"], [], 6, "abcdef", "ghijk", -1, (1, 1)),
        (["abcdef", "ghijk"], [], 5, "abcde", "f|ghijk", 0, (1, 2)),
        (["abcde", "fghij"], ["x"], 9, "abcde|fgh", "x|ij", 1, (2, 2)),
        (["abcde", "fghij"], ["x"], 5, "abcde", "x|fghij", 0, (1, 2)),
    ],
)
def test_the_end_that_is_moved(
    documents, in_val, n_kept, train_text, val_text, more, counts, tmp_path
):
    tokenizer = CharTokenizer("abcdefghijkx", separator=True)
    splits = [Split(file) for file in files(tmp_path)]
    for split, texts in zip(splits, (documents, in_val), strict=True):
        for text in texts:
            ids = [tokenizer.separator] * bool(split.documents) + tokenizer.encode(text).tolist()
            split.starts.append(split.tokens + bool(split.documents))
            split.file.write(np.array(ids, tokenizer.dtype).tobytes())
            split.tokens += len(ids)
            split.bytes += len(text)
            split.documents += 1
    n_tokens = sum(split.tokens for split in splits)
    moved, found = cut_end(tokenizer, Fraction(n_tokens - n_kept, n_tokens), *splits)
    assert found == more
    for split, text, n_documents in zip(splits, (train_text, val_text), counts, strict=True):
        split.file.seek(0)
        ids = np.frombuffer(split.file.read(), tokenizer.dtype)
        assert tokenizer.decode(ids).replace("<|endoftext|>", "|") == text
        assert (split.tokens, split.documents) == (len(ids), n_documents)
        assert split.bytes == len(text.replace("|", ""))
        split.file.close()
    assert moved == len(val_text) - len("|".join(in_val)) - bool(in_val)


@pytest.mark.parametrize("separator", [False, True])
@pytest.mark.parametrize("val_fraction", [0.1, 0.25, 0.5])
@pytest.mark.parametrize(
    "texts",
    [
        ["ab" * 500, "cd" * 600],
        ["To the reader.\n", "ab" * 3000],
        ["ab" * 3000, "To the reader.\n"],
        ["a" * 700, "b" * 800, "c" * 900],
        ["a" * 5000, *["bc" * 10] * 4],
        ["\u4e2d\u6587" * 400, "english" * 200],
    ],
)
@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_validation_comes_within_a_point(
    texts, val_fraction, separator, tokenizer, tmp_path, capsys
):
    dataset, train, val = prepared(
        tmp_path, *texts, val_fraction=val_fraction, separator=separator, tokenizer=tokenizer
    )
    tokens = [dataset["splits"][name]["tokens"] for name in ("train", "val")]
    if tokenizer == "char" or "tokens_cut_off" in dataset:
        assert abs(tokens[1] / sum(tokens) - val_fraction) <= 0.011
    assert Counter((train + val).replace("<|endoftext|>", "")) == Counter("".join(texts))
    printed = capsys.readouterr().out
    said = f"the last {dataset.get('tokens_cut_off', 0):,} tokens of training's documents went to"
    assert (said in printed) == ("tokens_cut_off" in dataset)


def test_a_split_of_whole_documents_is_recorded_as_before(tmp_path, capsys):
    dataset, train, val = prepared(tmp_path, *(letter * 50 for letter in "abcdefghij"))
    assert len(set(val)) == 1
    assert len(val) == 50
    assert val not in train
    assert dataset.keys() == {
        *("format", "tokenizer", "dtype", "splits", "documents", "characters", "separators"),
        *("sources", "seed", "val_fraction", "options", "inputs"),
    }
    assert dataset["options"].keys() == {
        *("vocab_size", "tokenizer", "separator", "field", "encoding"),
    }
    assert "went to validation" not in capsys.readouterr().out


def test_a_folder_from_before_says_how_to_come_nearer(tmp_path, capsys):
    out = tmp_path / "out"
    prepared(tmp_path, "ab" * 500, "cd" * 500)
    dataset = json.loads((out / "dataset.json").read_text())
    assert "note" not in capsys.readouterr().err
    del dataset["tokens_cut_off"]  # as it was: a whole document for each split
    for name in ("train", "val"):
        (out / f"{name}.bin").write_bytes(bytes(2000))
        dataset["splits"][name]["tokens"] = 1000
    (out / "dataset.json").write_text(json.dumps(dataset))
    prepare._note_old_split(out, 0.1)
    assert "50.0% of its tokens are for validation; --overwrite" in capsys.readouterr().err


# --- lines as documents ---


def test_lines_as_documents_wherever_the_text_is_cut():
    texts = [(0, "an"), (0, "na\nbob"), (0, "\n \n\ncy"), (1, "dan\n"), (1, "eve\n")]
    events = Counter()
    assert list(by_line(texts, events)) == [
        (0, "anna\n"),
        (1, "bob\n"),
        (2, "cy\n"),
        (3, "dan\n"),
        (4, "eve\n"),
    ]
    assert events == {"lines of white space left out": 1}


def test_lines_are_drawn_at_random_for_validation(tmp_path, capsys):
    names = [f"{letter}{other}ra" for letter in "abcdefghij" for other in "abcdefghij"]
    text = "".join(f"{name}\n" for name in names)
    _, _, val = prepared(tmp_path, text)
    assert {name[0] for name in val.split()} == {"j"}
    assert "the lines are sorted by letter" in capsys.readouterr().err
    (tmp_path / "lines").mkdir()
    dataset, train, val = prepared(tmp_path / "lines", text, lines=True)
    assert len({name[0] for name in val.split()}) > 3
    assert sorted(train.split() + val.split()) == names
    assert dataset["documents"] == 100
    assert dataset["splits"]["val"]["documents"] == 10
    assert dataset["options"]["lines"] is True
    captured = capsys.readouterr()
    assert captured.err == ""
    options = prepare.Options((str(tmp_path / "lines" / "0.txt"),), out=tmp_path / "lines" / "out")
    with pytest.raises(prepare.UserError, match="lines True, not False"):
        prepare.prepare(options)


def test_bytes_and_separators_of_a_single_document(tmp_path):
    """The end of one document is cut as it always was, a separator asked for or not."""
    tokenizer = ByteTokenizer(separator=True)
    train, val = (Split(file) for file in files(tmp_path))
    train.file.write(tokenizer.encode("a" * 10).tobytes())
    train.starts.append(0)
    train.tokens = train.bytes = 10
    train.documents = 1
    assert cut_end(tokenizer, 0.9, train, val) == (9, 0)
    assert (train.tokens, val.tokens, val.bytes, val.documents) == (1, 9, 9, 1)


# --- documents between delimiters ---


def joined(pieces):
    """(number, chunk of a document) as documents; numbers count up and no chunk is empty."""
    documents = []
    for number, text in pieces:
        assert text
        if number == len(documents):
            documents.append("")
        assert number == len(documents) - 1
        documents[number] += text
    return documents


@pytest.mark.parametrize("delimiter", ["|", "<|end|>", "aba", "\n\n", "\n<|end|>\n", "=-=-="])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_documents_between_delimiters_wherever_the_text_is_cut(delimiter, size):
    letters = np.random.default_rng(7)
    symbols = [*dict.fromkeys(delimiter), "a", "b", " ", "\n", delimiter]
    for n in (0, 1, 5, 60, 200):
        text = "".join(letters.choice(symbols, n)) + "a"  # the end of a text is a case of its own
        events = Counter()
        chunks = [(0, text[i : i + size]) for i in range(0, len(text), size)]
        found = joined(split_on(iter(chunks), delimiter, events))
        pieces = text.split(delimiter)
        assert found == [piece for piece in pieces if piece.strip()]
        assert events[dropped_event(delimiter)] == len(pieces) - 1
        n_blank = sum(not piece.strip() for piece in pieces)
        assert events["documents of white space left out"] == n_blank


def test_delimiters_at_the_start_at_the_end_and_doubled():
    events = Counter()
    texts = [(0, "##a#"), (0, "#"), (0, "b#c##"), (1, "d"), (2, " # e"), (2, "\n")]
    assert joined(split_on(texts, "##", events)) == ["a", "b#c", "d", " # e\n"]
    assert events == {"delimiters '##' dropped": 3, "documents of white space left out": 1}


def test_the_last_delimiter_may_lack_its_line_end():
    for text in ("a\n--\nb\n--\n", "a\n--\nb\n--"):
        for size in (1, 2, 5, 99):
            chunks = [(0, text[i : i + size]) for i in range(0, len(text), size)]
            assert joined(split_on(chunks, "--\n", Counter())) == ["a\n", "b\n"]
    assert joined(split_on([(0, "a--")], "\n--\n", Counter())) == ["a--"]
    assert joined(split_on([(0, "a\n")], "\n", Counter())) == ["a"]


def test_stories_become_documents(tmp_path, capsys):
    stories = [f"Once there were {n} cats.\n" for n in range(40)]
    text = "<|endoftext|>\r\n".join(stories)
    dataset, train, val = prepared(tmp_path, text, split_on=r"<|endoftext|>\n", tokenizer="bpe")
    out, err = capsys.readouterr()
    assert dataset["documents"] == 40
    assert dataset["options"]["split_on"] == r"<|endoftext|>\n"
    assert dataset["separators"] == 38
    assert sorted("<|endoftext|>".join((train, val)).split("<|endoftext|>")) == sorted(stories)
    assert "\ndelimiters '<|endoftext|>\\n' dropped: 39\n" in out
    assert err == ""
    for split_on_, said in (("<|endoftext|>", "begin with a line end"), (None, "")):
        options = prepare.Options((str(tmp_path / "0.txt"),), split_on=split_on_)
        with pytest.raises(prepare.UserError, match=r"split_on '<\|endoftext\|>"):
            prepare.prepare(prepare.replace(options, out=tmp_path / "out", tokenizer="bpe"))
        prepare.prepare(prepare.replace(options, out=tmp_path / "other", overwrite=True))
        out, err = capsys.readouterr()
        if split_on_:
            assert f"of the documents {said} (--split-on '<|endoftext|>\\n'): 39\n" in out
        else:
            assert err.startswith("note: the text spells <|endoftext|> 39 times")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_on": ""}, "--split-on is empty"),
        ({"split_on": "<|eot|>"}, r"'<\|eot\|>': 0 never says that in 17 characters"),
        ({"split_on": "#", "lines": True}, "both say where documents end"),
        ({"split_on": "a#b and so on#\\t"}, "never says"),
    ],
)
def test_delimiters_that_are_refused(options, message, tmp_path):
    with pytest.raises(prepare.UserError, match=message):
        prepared(tmp_path, "a#b and so on#c d", **options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(prepare.UserError, match=r"(only white space|no text)"):
        prepared(tmp_path, " # \n # ", split_on="#")
