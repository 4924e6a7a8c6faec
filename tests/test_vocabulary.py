"""A vocabulary taken from a run, a prepared folder or a checkpoint, and what it lacks of a text."""

import json
import re
import shlex
from collections import Counter

import numpy as np
import pytest
import tokenizers
from helpers import make_config, nonsense, train_here, write_corpus
from tokenizers import decoders, normalizers

from data import prepare, tokenizer as tk
from data.dataset import Dataset
from data.tokenizer_out import tokenizer_json
from data.vocabulary import UnknownCharacters, borrow_tokenizer, preparing_again
from errors import MachineError, UserError
from ops.checkpoint import load


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A run on characters: its folder, with config.json and checkpoints."""
    folder = tmp_path_factory.mktemp("old")
    data = write_corpus(folder / "data", nonsense(2000))
    assert train_here(make_config(data, folder / "run", max_steps=1)) == 0
    return folder / "run"


def prepare_like(path, source, out, **options):
    prepare.prepare(prepare.Options((str(path),), tokenizer_from=source, out=out, **options))
    dataset = json.loads((out / "dataset.json").read_text())
    tokenizer = tk.load_tokenizer(dataset["tokenizer"])
    ids = [np.fromfile(out / f"{name}.bin", tokenizer.dtype) for name in ("train", "val")]
    return dataset, tokenizer.decode(np.concatenate(ids))


# --- where it is taken from ---


@pytest.mark.parametrize(
    "place", ["", "config.json", "best.pt", "checkpoint.pt", "../data", "../data/dataset.json"]
)
def test_places_of_a_vocabulary(place, old):
    assert borrow_tokenizer(old / place).spec() == load(old / "best.pt").tokenizer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "does not exist"),
        ("empty", "holds no run and no prepared data"),
        ("text.txt", "no checkpoint of train.py, or a damaged one"),
        ("half.pt", "no checkpoint of train.py, or a damaged one"),
    ],
)
def test_places_without_one(name, message, old, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("a text")
    whole = (old / "best.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=message) as caught:
        borrow_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["", "tokenizer.json"])
@pytest.mark.parametrize("name", ["char", "byte", "bpe", "sentencepiece"])
def test_a_tokenizer_json(name, place, tmp_path, capsys):
    """The library's own ids for the text, and back; a config.json beside it makes it no run."""
    text = nonsense(3000) + "caf\u00e9 \U0001f600"
    path = tmp_path / "t" / "tokenizer.json"
    path.parent.mkdir()
    (path.parent / "config.json").write_text("{}")
    if name == "sentencepiece":
        path.write_text(json.dumps(sentencepiece(text)))
    else:
        ours = {
            "char": lambda: tk.CharTokenizer("".join(sorted(set(text))), True),
            "byte": tk.ByteTokenizer,
            "bpe": lambda: tk.train_bpe([text], 300),
        }[name]()
        path.write_text(json.dumps(tokenizer_json(ours)))
        assert borrow_tokenizer(path).spec() == ours.spec()
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    dataset, decoded = prepare_like(tmp_path / "text.txt", path.parent / place, tmp_path / "out")
    assert decoded.strip() == text.strip()
    tokenizer = tk.load_tokenizer(dataset["tokenizer"])
    reference = tokenizers.Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False)
    assert tokenizer.encode(text).tolist() == reference.ids
    if name == "sentencepiece":
        assert tokenizer.separator == reference_end(path)
    assert "--init-from" not in capsys.readouterr().out


def sentencepiece(text):
    """A BPE of Llama's kind: spaces written as a letter, bytes for what no word covers."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(spaces)
    read = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, show_progress=False
    )
    made.train_from_iterator([text[:2000]], trainer)
    plain = json.loads(made.to_str())
    ordinary = [token for token in plain["added_tokens"] if not token["content"].startswith("<0x")]
    return plain | {"added_tokens": ordinary}


def reference_end(path):
    return tokenizers.Tokenizer.from_file(str(path)).token_to_id("</s>")


def test_a_tokenizer_json_that_can_not_take_the_text(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "text.txt").write_text(nonsense(300))
    with pytest.raises(MachineError, match=r"the tokenizer\.json can't take this text: WordPiece"):
        prepare_like(tmp_path / "text.txt", tmp_path / "t.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="is no tokenizer of the library tokenizers"):
        borrow_tokenizer(tmp_path / "other.json")


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize("separator", [False, True])
def test_the_vocabulary_of_a_prepared_folder(kind, separator, tmp_path):
    (tmp_path / "one.txt").write_text(nonsense(3000))
    (tmp_path / "two.txt").write_text(nonsense(1500, seed=5)[::-1])
    size = 300 if kind == "bpe" else 4096
    prepare.prepare(
        prepare.Options(
            (str(tmp_path / "one.txt"),),
            kind,
            size,
            out=tmp_path / "one",
            separator=separator,
        )
    )
    before = json.loads((tmp_path / "one" / "dataset.json").read_text())
    after, text = prepare_like(tmp_path / "two.txt", tmp_path / "one", tmp_path / "two")
    assert after["tokenizer"] == before["tokenizer"]
    assert after["options"]["tokenizer"] == kind
    assert text == (tmp_path / "two.txt").read_text()


def test_a_folder_with_another_vocabulary_is_not_taken_for_prepared(old, tmp_path):
    path = tmp_path / "new.txt"
    path.write_text("the cat sat on a mat.\n" * 50)
    write_corpus(tmp_path / "other", nonsense(2000) + "XYZ")
    prepare_like(path, old, tmp_path / "out")
    with pytest.raises(UserError, match="out holds another vocabulary\n--overwrite"):
        prepare_like(path, tmp_path / "other", tmp_path / "out")


# --- characters it lacks ---


def test_unknown_characters_are_counted_and_refused(old, tmp_path):
    text = "a cat\u2014caf\u00e9, \u00e9t\u00e9\n" * 40
    (tmp_path / "new.txt").write_text(text, encoding="utf-8")
    unknown = Counter(text) - Counter(dict.fromkeys(borrow_tokenizer(old).symbols, 10**6))
    with pytest.raises(UserError) as caught:
        prepare_like(tmp_path / "new.txt", old, tmp_path / "out")
    message = str(caught.value)
    assert f"{unknown.total():,} characters, {len(unknown)} different" in message
    for character, n in unknown.items():
        assert f"{character!r} ({n:,})" in message
    assert f"of {old}" in message
    assert "--unknown drop" in message
    assert len(message.splitlines()) == 2
    assert not list(tmp_path.glob("out*"))


def test_unknown_characters_are_left_out(old, tmp_path, capsys):
    documents = ["ca\u00e9 and a cat", "\u4e2d\u6587", "two dogs\u2026", "", "\u4e2d sat\u00e9"]
    path = tmp_path / "new.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents * 5))
    dataset, text = prepare_like(path, old, tmp_path / "out", unknown="drop")
    known = ["ca and a cat", "two dogs", " sat"]
    assert Counter(text) == Counter("".join(known * 5))
    assert dataset["documents"] == 15
    assert dataset["characters"] == len("".join(known)) * 5
    printed = capsys.readouterr().out
    assert "'\u00e9' (10), '\u4e2d' (10), '\u2026' (5), '\u6587' (5); in all: 30" in printed
    prepare.prepare(
        prepare.Options((str(path),), tokenizer_from=old, unknown="drop", out=tmp_path / "out")
    )
    assert "already prepared" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown 'drop', not 'error'"):
        prepare_like(path, old, tmp_path / "out")


def test_a_text_of_unknown_characters_alone(old, tmp_path):
    (tmp_path / "new.txt").write_text("\u4e2d\u6587" * 50, encoding="utf-8")
    with pytest.raises(UserError, match="no text, without the 100 characters that the vocabulary"):
        prepare_like(tmp_path / "new.txt", old, tmp_path / "out", unknown="drop")


def test_many_unknown_characters_make_a_short_list():
    unknown = UnknownCharacters(tk.CharTokenizer("a"))
    text = "a" + "".join(chr(0x4E00 + i) * (i + 1) for i in range(30))
    assert list(unknown.leave_out([(0, text[:100]), (0, text[100:]), (1, "\u4e2d")])) == [(0, "a")]
    assert unknown.listed().startswith("'\u4e1d' (30), '\u4e1c' (29), ")
    assert unknown.listed().endswith("'\u4e0a' (11), and 11 more")
    assert unknown.counts.total() == 30 * 31 // 2 + 1


def test_documents_count_on_where_one_is_left_out():
    unknown = UnknownCharacters(tk.CharTokenizer("ab"))
    texts = [(0, "xx"), (1, "ax"), (1, "x"), (1, "b"), (2, "yy"), (3, "b")]
    assert list(unknown.leave_out(texts)) == [(0, "a"), (0, "b"), (1, "b")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bpe"}, "--tokenizer bpe: the vocabulary of .* is of kind char"),
        ({"separator": True}, "--separator: .* has no separator"),
        ({"vocab_size": 300}, "--vocab-size 300: leave it out"),
    ],
)
def test_options_that_ask_for_another_vocabulary(options, message, old, tmp_path):
    (tmp_path / "new.txt").write_text(nonsense(500))
    with pytest.raises(UserError, match=message):
        prepare_like(tmp_path / "new.txt", old, tmp_path / "out", **options)


def test_unknown_is_for_a_vocabulary_that_exists(tmp_path):
    with pytest.raises(UserError, match="--unknown drop is for --tokenizer-from alone"):
        prepare.prepare(prepare.Options(("x",), unknown="drop"))


# --- fine-tuning ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_the_way_from_a_run_to_another_text(kind, tmp_path, capsys, monkeypatch):
    """As the messages lead: refused with a command, which prepares; its last line fine-tunes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first text.txt").write_text(nonsense(3000))
    (tmp_path / "second.txt").write_text("the cat sat on a mat.\n" * 100)
    size = 280 if kind == "bpe" else 4096
    for name in ("first text", "second"):
        prepare.prepare(prepare.Options((f"{name}.txt",), kind, size, out=tmp_path / "data" / name))
    train_here(make_config("data/first text", "runs/old", max_steps=2, eval_every=2))
    with pytest.raises(UserError) as caught:
        train_here(make_config("data/second", "runs/new", init_from="runs/old"))
    sentence, command = str(caught.value).split("\n")
    assert "train with --data data/second-for-old:" in sentence
    assert not (tmp_path / "runs" / "new").exists()
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "data.prepare"]
    assert words[3:] == ["second.txt", "--tokenizer-from", "runs/old", "--out", words[-1]]

    monkeypatch.setattr("sys.argv", words[2:])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert prepare.main() == 0
    hint = capsys.readouterr().out.splitlines()[-1]
    assert hint == (
        "next: python train.py runs/old/config.json --init-from runs/old "
        "--data data/second-for-old --out runs/second-for-old"
    )
    fields = {"max_steps": 2, "eval_every": 2, "init_from": "runs/old"}
    assert train_here(make_config("data/second-for-old", "runs/new", **fields)) == 0
    assert load(tmp_path / "runs/new/best.pt").tokenizer == load("runs/old/best.pt").tokenizer


def test_the_command_that_prepares_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_corpus(tmp_path / "data", "ab" * 100)
    command, out = preparing_again(Dataset(folder), "runs/x/best.pt")
    assert out == tmp_path / "data-for-best"
    assert command == (
        f"python -m data.prepare YOUR_TEXT --tokenizer-from runs/x/best.pt --out {out}"
    )
    dataset = json.loads((folder / "dataset.json").read_text())
    dataset["inputs"] = ["shakespeare", "a b.txt"]
    dataset["options"] = {"field": "body", "encoding": None, "lines": True, "separator": True}
    (folder / "dataset.json").write_text(json.dumps(dataset))
    assert "YOUR_TEXT" in preparing_again(Dataset(folder), "runs/x")[0]
    (tmp_path / "a b.txt").write_text("ab")
    command, _ = preparing_again(Dataset(folder), "runs/x")
    assert re.search("prepare shakespeare 'a b.txt' --tokenizer-from runs/x --out ", command)
    assert command.endswith("data-for-x --field body --lines")
