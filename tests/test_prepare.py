"""The command from text to files: what it writes, what it prints, what it refuses, and what an
interruption leaves.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers import SHARED

from data import prepare as prepare_module
from data.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
TINY = SHARED / "corpora" / "tinyshakespeare.txt"
POEM = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n" * 20


def command(*arguments, **environment) -> tuple[list[str], dict]:
    line = [sys.executable, "-m", "data.prepare", *map(str, arguments)]
    return line, {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }


def run(*arguments, code=0, cwd=ROOT, stdin=b"", **environment) -> str:
    """Run the command; its standard output, or its standard error where it must fail (which is then
    short, and no traceback).
    """
    line, environment = command(*arguments, **environment)
    result = subprocess.run(
        line, cwd=cwd, env=environment, input=stdin, capture_output=True, timeout=120, check=False
    )
    error = result.stderr.decode()
    assert result.returncode == code, error
    if code == 0:
        assert error == ""
        return result.stdout.decode()
    assert error.startswith("error: ")
    assert len(error.splitlines()) <= 2
    assert result.stdout == b""
    return error


def load(folder) -> tuple[dict, np.ndarray, np.ndarray]:
    """dataset.json and the ids of both splits, checked against each other."""
    folder = Path(folder)
    assert {path.name for path in folder.iterdir()} == {"train.bin", "val.bin", "dataset.json"}
    dataset = json.loads((folder / "dataset.json").read_text())
    dtype = {"uint16": "<u2", "uint32": "<u4"}[dataset["dtype"]]
    ids = [np.fromfile(folder / f"{name}.bin", dtype) for name in ("train", "val")]
    separator = load_tokenizer(dataset["tokenizer"]).separator
    lengths = load_tokenizer(dataset["tokenizer"]).byte_lengths()
    for name, tokens in zip(("train", "val"), ids, strict=True):
        split = dataset["splits"][name]
        assert split["tokens"] == len(tokens)
        assert split["bytes"] == lengths[tokens].sum()
        assert split["sha256"] == hashlib.sha256((folder / f"{name}.bin").read_bytes()).hexdigest()
    assert dataset["separators"] == sum(
        int((tokens == separator).sum()) for tokens in ids if separator is not None
    )
    return dataset, *ids


@pytest.fixture
def poem(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text(POEM)
    return path


@pytest.fixture
def documents(tmp_path):
    """Twenty documents as JSON Lines, of 100 to 290 characters each."""
    texts = [chr(ord("a") + i) * (100 + 10 * i) for i in range(20)]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


# --- what is written ---


def test_tinyshakespeare_characters_split_as_everywhere(tmp_path):
    if not TINY.is_file():
        pytest.skip("no ../shared/corpora/tinyshakespeare.txt")
    printed = run(TINY, "--out", tmp_path / "out")
    dataset, train, val = load(tmp_path / "out")
    text = TINY.read_text()
    symbols = sorted(set(text))
    assert (len(symbols), len(train), len(val)) == (65, 1_003_854, 111_540)
    np.testing.assert_array_equal(
        np.concatenate([train, val]), [symbols.index(character) for character in text]
    )
    assert dataset["sources"] == [
        {
            "name": "tinyshakespeare.txt",
            "bytes": 1_115_394,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    ]
    assert printed.splitlines()[:-2] == [
        "corpus: tinyshakespeare.txt",
        "documents: 1, characters: 1,115,394, tokens: 1,115,394",
        "characters per token: 1.00",
        "vocabulary: 65 ids (char), stored as uint16",
        "train: 1,003,854 tokens (90.0%), documents: 1",
        "val: 111,540 tokens (10.0%), documents: 1",
        "separators inserted: 0 (none asked for)",
    ]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe", "gpt2"])
def test_one_document_with_every_tokenizer(tokenizer, tmp_path):
    if not TINY.is_file():
        pytest.skip("no ../shared/corpora/tinyshakespeare.txt")
    if tokenizer == "gpt2" and not (SHARED / "tiktoken_cache").is_dir():
        pytest.skip("no ../shared/tiktoken_cache")
    text = TINY.read_text() + "caf\u00e9 <|endoftext|> \U0001f600\n"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    cache = str(SHARED / "tiktoken_cache")
    printed = run(
        tmp_path / "text.txt",
        "--tokenizer",
        tokenizer,
        "--out",
        tmp_path / "out",
        TIKTOKEN_CACHE_DIR=cache,
    )
    dataset, train, val = load(tmp_path / "out")
    ids = np.concatenate([train, val])
    rebuilt = load_tokenizer(dataset["tokenizer"])
    np.testing.assert_array_equal(ids, rebuilt.encode(text))
    assert rebuilt.decode(ids) == text
    assert len(train) == int(0.9 * len(ids))
    assert rebuilt.vocab_size == {"byte": 256, "bpe": 4096, "gpt2": 50_257}[tokenizer]
    assert f"characters per token: {len(text) / len(ids):.2f}\n" in printed
    assert dataset["splits"]["train"]["bytes"] + dataset["splits"]["val"]["bytes"] == len(
        text.encode()
    )


@pytest.mark.parametrize(
    ("val_fraction", "n", "n_train"),
    [("0.1", 1000, 900), ("0.9", 10, 1), ("0.3", 10, 7), ("0.05", 101, 95), ("0.35", 20, 13)],
)
def test_the_split_is_exact_in_decimals(val_fraction, n, n_train, tmp_path):
    assert int((1 - 0.9) * 10) == 0  # what floats make of the second case
    (tmp_path / "n.txt").write_text("ab" * (n // 2) + "a" * (n % 2))
    if n_train < 2:
        assert f"make {n_train} tokens for training and {n - n_train} for" in run(
            tmp_path / "n.txt", "--val-fraction", val_fraction, "--out", tmp_path / "out", code=2
        )
        return
    run(tmp_path / "n.txt", "--val-fraction", val_fraction, "--out", tmp_path / "out")
    assert len(load(tmp_path / "out")[1]) == n_train


def test_whole_documents_fill_the_validation_split(documents, tmp_path):
    path, texts = documents
    printed = run(path, "--out", tmp_path / "out")
    dataset, train, val = load(tmp_path / "out")
    decode = load_tokenizer(dataset["tokenizer"]).decode
    in_val = [text for text in texts if text[0] in decode(val)]
    assert decode(val) == "".join(in_val)
    assert decode(train) == "".join(text for text in texts if text not in in_val)
    assert dataset["splits"]["val"]["documents"] == len(in_val)
    assert dataset["splits"]["train"]["documents"] == 20 - len(in_val)
    assert dataset["documents"] == 20
    assert 0.09 < len(val) / (len(val) + len(train)) < 0.11
    assert "separators inserted: 0" in printed
    run(path, "--out", tmp_path / "other", "--seed", 1)
    assert load(tmp_path / "other")[2].tolist() != val.tolist()


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_separators_stand_between_documents(tokenizer, documents, tmp_path):
    path, texts = documents
    options = ["--vocab-size", "300"] if tokenizer == "bpe" else ["--separator"]
    printed = run(path, "--out", tmp_path / "out", "--tokenizer", tokenizer, *options)
    dataset, *splits = load(tmp_path / "out")
    assert dataset["separators"] == 18  # 20 documents in two splits
    assert "separators inserted: 18" in printed
    rebuilt, seen = load_tokenizer(dataset["tokenizer"]), []
    for ids in splits:
        assert rebuilt.separator not in (ids[0], ids[-1])
        seen += rebuilt.decode(ids).split("<|endoftext|>")
    assert Counter(seen) == Counter(texts)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_tokens_do_not_depend_on_batches_or_cores(tokenizer, tmp_path, monkeypatch):
    text = POEM * 30 + "caf\u00e9 \u4e2d\u6587, 12345  \n\n  x"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    outputs = []
    for chunk, batch, cores in [(1 << 20, 256, 2), (777, 5, 1)]:
        monkeypatch.setattr(prepare_module, "BATCH", batch)
        monkeypatch.setattr("data.documents.CHUNK_BYTES", chunk)
        monkeypatch.setattr("data.tokenizer.CHUNK_CHARACTERS", 300)
        monkeypatch.setattr("data.tokenizer.usable_cpus", lambda cores=cores: cores)
        out = tmp_path / str(chunk)
        size = 400 if tokenizer == "bpe" else 4096
        prepare_module.prepare(
            prepare_module.Options((str(tmp_path / "text.txt"),), tokenizer, size, out=out)
        )
        outputs.append(load(out))
    assert outputs[0][0]["tokenizer"] == outputs[1][0]["tokenizer"]
    np.testing.assert_array_equal(outputs[0][1], outputs[1][1])
    np.testing.assert_array_equal(outputs[0][2], outputs[1][2])


def test_a_vocabulary_over_65536_is_stored_in_four_bytes(tmp_path):
    symbols = "".join(chr(code) for code in range(0x20, 0x11000) if not 0xD800 <= code < 0xE000)
    (tmp_path / "wide.txt").write_text(symbols, encoding="utf-8", newline="")
    assert "67,552 ids (char), stored as uint32" in run(
        tmp_path / "wide.txt", "--out", tmp_path / "out"
    )
    _, train, val = load(tmp_path / "out")
    np.testing.assert_array_equal(np.concatenate([train, val]), np.arange(len(symbols)))


def test_a_bpe_that_runs_out_of_pairs_says_so(poem, tmp_path):
    printed = run(poem, "--tokenizer", "bpe", "--vocab-size", "5000", "--out", tmp_path / "out")
    n_ids = load_tokenizer(load(tmp_path / "out")[0]["tokenizer"]).vocab_size
    assert 257 < n_ids < 400
    assert f"{n_ids} ids (bpe)" in printed
    assert "fewer than the 5,000 asked for" in printed


# --- sources and policy ---


def test_standard_input_under_the_c_locale(tmp_path):
    text = "\ufeffcaf\u00e9\r\n\u4e2d\u6587\r" * 20
    printed = run(
        "-",
        "--out",
        tmp_path / "out",
        stdin=text.encode(),
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    dataset, train, val = load(tmp_path / "out")
    expected = text.replace("\r\n", "\n").replace("\r", "\n")[1:]  # the marks inside are characters
    assert load_tokenizer(dataset["tokenizer"]).decode([*train, *val]) == expected
    assert "corpus: stdin\ndocuments: 1, " in printed
    assert "byte-order marks dropped: 1" in printed
    assert "line ends (CRLF or CR) made \\n: 40" in printed
    assert dataset["sources"] == [
        {
            "name": "stdin",
            "bytes": len(text.encode()),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
    ]


def test_a_file_named_in_any_alphabet_under_the_c_locale(tmp_path):
    path = tmp_path / "\u4e2d\u6587.txt"
    path.write_text("\u4e2d\u6587 caf\u00e9\n" * 9, encoding="utf-8")
    run(path, "--out", tmp_path / "out", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert load(tmp_path / "out")[0]["characters"] == 72


def test_the_default_folder_is_named_after_corpus_and_tokenizer(poem, tmp_path):
    printed = run(poem.name, "--tokenizer", "byte", cwd=tmp_path)
    load(tmp_path / "data" / "prepared" / "poem-byte")
    assert (
        "next: python train.py shakespeare-char --data data/prepared/poem-byte --out runs/poem-byte"
        in printed
    )


def test_hyphen_and_underscore_are_one(poem, tmp_path):
    run(poem, "--val_fraction", "0.5", "--out", tmp_path / "out")
    _, train, val = load(tmp_path / "out")
    assert len(train) == len(val)


def test_help_needs_no_heavy_import():
    code = (
        "import sys, data.prepare, data.sources, ops.command_line\n"
        "print({'torch', 'numpy', 'tiktoken', 'rustbpe', 'pyarrow'} & set(sys.modules))"
    )
    _, environment = command()
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True
        ).stdout
        == b"set()\n"
    )


# --- what is said of the text ---


def test_what_a_file_was_taken_for_is_said(tmp_path):
    lines = "".join(
        json.dumps({"body": f"Page {i}\x0c caf\xe9 cafe\u0301."}) + "\n" for i in range(40)
    )
    content = (lines + "{broken\n" + '{"body": null}\n').encode()
    out = run(
        "-", "--field", "body", "--skip-broken", "--out", tmp_path / "out", stdin=content
    ).split("\n")
    assert "documents: 40, characters: 790, tokens: 790" in out[1]
    assert "files recognised as JSON Lines, of which 'body' is read: 1" in out
    assert "broken rows skipped: 1" in out
    assert any(line.startswith("  the first: stdin, line 41: not JSON") for line in out)
    assert "empty documents skipped: 1" in out
    assert "suspicious control characters: 40: U+000C (form feed) 40" in out
    assert any(line.startswith("decomposed characters: 40, ") for line in out)
    assert load(tmp_path / "out")[0]["options"]["skip_broken"]


def test_a_folder_from_before_an_option_had_its_default(poem, tmp_path):
    out = tmp_path / "out"
    run(poem, "--out", out)
    dataset = json.loads((out / "dataset.json").read_text())
    for option in ("format", "skip_broken"):
        dataset["options"].pop(option, None)
    (out / "dataset.json").write_text(json.dumps(dataset))
    assert "already prepared" in run(poem, "--out", out)
    error = run(poem, "--out", out, "--format", "text", code=2)
    assert "format 'auto', not 'text'" in error


# --- what is refused ---


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", [], "no text in 0 bytes"),
        (b"\n \n", [], "only white space (3 characters)"),
        (
            b"a",
            [],
            "too small: 1 characters in 1 document(s) "
            "make 0 tokens for training and 1 for validation",
        ),
        (b"one line", [], "too small"),
        (b"ab" * 50, ["--val-fraction", "1"], "--val-fraction 1.0"),
        (b"ab" * 50, ["--val-fraction", "0"], "--val-fraction 0.0"),
        (b"ab" * 50, ["--val-fraction", "nan"], "--val-fraction nan"),
        (b"ab" * 50, ["--vocab-size", "500"], "--vocab-size is for --tokenizer bpe"),
        (b"ab" * 50, ["--pattern", "gpt2"], "--pattern is for --tokenizer bpe"),
        (b"ab" * 50, ["--tokenizer", "bpe", "--vocab-size", "256"], "257"),
        (b"ab" * 50, ["--tokenizer", "bpe", "--vocab-size", "0"], "257"),
        (b"ab" * 50, ["--tokenizer", "bpe", "--vocab-size", "-5"], "257"),
        (b"Hello \xd6\xd0\xce\xc4", [], "byte 0xd6 at offset 6"),
        (b"a\0b", [], "NUL byte at offset 1"),
        (b"\xfd7zXZ\0", [], "ended before"),
        (b"id,text\n1,one\n2,two\n", [], "--field text"),
        (b"plain words", ["--field", "text"], "--field text is given"),
    ],
)
def test_refused(content, options, message, tmp_path):
    (tmp_path / "x.txt").write_bytes(content)
    assert message in run(tmp_path / "x.txt", "--out", tmp_path / "out", *options, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["x.txt"]  # nothing half-written


@pytest.mark.parametrize("name", ["poem.txt", "docs.jsonl"])
def test_a_corpus_that_changes_while_it_is_read_is_refused(
    name, poem, documents, tmp_path, monkeypatch
):
    path = tmp_path / name
    original = prepare_module.count

    def count_then_change(*arguments):
        result = original(*arguments)
        with path.open("a") as file:
            file.write('{"text": "abc"}\n' if name == "docs.jsonl" else "more of summer\n")
        return result

    monkeypatch.setattr(prepare_module, "count", count_then_change)
    with pytest.raises(prepare_module.UserError, match="changed while it was read"):
        prepare_module.prepare(prepare_module.Options((str(path),), out=tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_ends_in_one_line(poem, tmp_path):
    resource = pytest.importorskip(
        "resource"
    )  # a limit on the size of files stands for the full disk
    line, environment = command(poem, "--out", tmp_path / "out")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # noqa: E731
    result = subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, preexec_fn=limit, check=False
    )
    assert result.returncode == 1
    assert (
        result.stderr.decode()
        == f"error: cannot write {tmp_path / 'out'}: File too large; nothing was kept\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["poem.txt"]


# --- folders that exist ---


def test_prepared_twice_is_prepared_once(poem, tmp_path):
    out = tmp_path / "out"
    first = run(poem, "--out", out)
    before = (out / "train.bin").stat().st_mtime_ns
    second = run(poem, "--out", out)
    assert "already prepared" in second
    assert first.splitlines()[-1] == second.splitlines()[-1]
    assert (out / "train.bin").stat().st_mtime_ns == before


def test_a_folder_with_other_content_is_replaced_only_when_told(poem, tmp_path):
    out = tmp_path / "out"
    run(poem, "--out", out)
    assert "tokenizer 'char', not 'byte'; seed 1337, not 7" in run(
        poem, "--out", out, "--tokenizer", "byte", "--seed", 7, code=2
    )
    poem.write_text(POEM.replace("Shall", "Shalt"))
    assert "other source text" in run(poem, "--out", out, code=2)
    run(poem, "--out", out, "--overwrite")
    assert load(out)[0]["sources"][0]["sha256"] == hashlib.sha256(poem.read_bytes()).hexdigest()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_a_damaged_or_older_folder_is_not_taken_for_prepared(poem, tmp_path):
    out = tmp_path / "out"
    run(poem, "--out", out)
    os.truncate(out / "val.bin", 10)
    assert re.search(
        "val.bin has 10 bytes, dataset.json says .*--overwrite", run(poem, "--out", out, code=2)
    )
    dataset = json.loads((out / "dataset.json").read_text())
    (out / "dataset.json").write_text(json.dumps({**dataset, "format": 0}))
    assert re.search(
        "in format 0, this version reads 1: .*--overwrite", run(poem, "--out", out, code=2)
    )
    run(poem, "--out", out, "--overwrite")
    load(out)


@pytest.mark.parametrize("own", ["notes.md", "dataset.json", None])
def test_a_folder_of_other_things_is_never_touched(own, poem, tmp_path):
    out = tmp_path / "out"
    if own is None:  # a prepared folder into which something was put
        run(poem, "--out", out)
    out.mkdir(exist_ok=True)
    (out / (own or "notes.md")).write_text("mine")
    before = sorted(path.name for path in out.iterdir())
    for overwrite in ([], ["--overwrite"]):
        assert "left as it is" in run(poem, "--out", out, *overwrite, code=2)
    assert sorted(path.name for path in out.iterdir()) == before


def test_a_failed_replacement_puts_the_old_folder_back(poem, tmp_path, monkeypatch):
    out, rename = tmp_path / "out", os.rename
    run(poem, "--out", out)
    before = load(out)[0]

    def refuse_new(source, target):
        if Path(source).name == "new":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_new)
    with pytest.raises(prepare_module.MachineError, match="No space left"):
        prepare_module.prepare(
            prepare_module.Options((str(poem),), "byte", out=out, overwrite=True)
        )
    assert load(out)[0] == before
    assert not list(tmp_path.glob("out.*"))


def test_what_does_not_reach_the_disk_is_not_kept(poem, tmp_path, monkeypatch):
    """Some file systems tell of a full disk only as a file is flushed to it."""

    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        prepare_module.MachineError, match="No space left on device; nothing was kept"
    ):
        prepare_module.prepare(prepare_module.Options((str(poem),), "byte", out=tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_an_empty_folder_is_used_and_a_file_is_not(poem, tmp_path):
    (tmp_path / "out").mkdir()
    run(poem, "--out", tmp_path / "out")
    load(tmp_path / "out")
    assert "left as it is" in run(poem, "--out", poem, code=2)
    assert poem.read_text() == POEM


# --- interruptions ---


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX knows them")
@pytest.mark.parametrize(
    ("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_prepare_leaves_nothing_that_looks_whole(how, code, tmp_path):
    big, out = tmp_path / "big.txt", tmp_path / "out"
    with big.open("w") as file:
        for _ in range(60):
            file.write(POEM * 1000)  # 98 MB
    line, environment = command(big, "--out", out)
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out.partial-*/new/train.bin")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(how)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code, error
    assert b"Traceback" not in error
    assert not out.exists()
    leftovers = list(tmp_path.glob("out.partial-*"))
    assert len(leftovers) == (how == signal.SIGKILL)
    assert not any(path.is_file() for path in tmp_path.glob("*/dataset.json"))
    big.write_text(POEM)
    assert all(
        f"left by one that was killed: {path}" in run(big, "--out", out) for path in leftovers
    )
    run(big, "--out", out)
    load(out)
