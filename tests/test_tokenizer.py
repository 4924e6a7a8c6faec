"""Ids against hand-made references and against tiktoken and regex; cuts that never change a
token.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import regex
from helpers import SHARED

from data import patterns, tokenizer as tk
from errors import MachineError, UserError

ROOT = Path(__file__).parent.parent
GPT2_CACHE = SHARED / "tiktoken_cache"
# As published with GPT-2.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TRAINING_TEXT = ["the cat sat on the mat, the hat's cat can't; it'll 1234 go\n\n  and so on\n"] * 30
TRAINING_TEXT += ["\u4e2d\u6587\u6587\u672c \u4e2d\u6587\u6587\u672c\u3002\n"] * 9


@pytest.fixture(scope="module")
def bpe():
    return tk.train_bpe(TRAINING_TEXT, 290)


@pytest.fixture(scope="module")
def gpt2():
    if not GPT2_CACHE.is_dir():
        pytest.skip("no cached copy of GPT-2's vocabulary in ../shared/tiktoken_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_CACHE))
        return tk.load_gpt2()


@pytest.fixture(scope="module")
def shakespeare():
    path = SHARED / "corpora" / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("no ../shared/corpora/tinyshakespeare.txt")
    return path.read_text(encoding="utf-8")


def test_ids_fit_their_dtype():
    assert [tk.dtype_for(n) for n in (256, 65_535, 65_536, 65_537)] == ["<u2", "<u2", "<u2", "<u4"]


@pytest.mark.parametrize(
    "text",
    [
        "hello, world\n",
        "caf\u00e9 \u00ff",
        "".join(map(chr, range(256))),
        "a\u4e2d\u6587b",
        "z\U0001f600a",
        "\uffff\U0010ffff",
    ],
    ids=["ascii", "latin-1", "all latin-1", "cjk", "emoji", "last code points"],
)
@pytest.mark.parametrize("separator", [False, True])
def test_char_ids_are_ranks_in_code_point_order(text, separator):
    symbols = sorted(set(text))
    tokenizer = tk.CharTokenizer("".join(symbols), separator)
    ids = tokenizer.encode(text)
    assert ids.tolist() == [symbols.index(character) for character in text]
    assert ids.dtype == "<u2"
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(symbols) + separator
    assert tokenizer.separator == (len(symbols) if separator else None)
    assert tokenizer.encode("").tolist() == []


def test_a_character_vocabulary_over_65536_does_not_wrap():
    symbols = "".join(
        chr(code) for code in range(0x20, 0x11000) if not 0xD800 <= code < 0xE000
    )  # 67,552
    ids = tk.CharTokenizer(symbols).encode(symbols)
    assert ids.dtype == "<u4"
    np.testing.assert_array_equal(ids, np.arange(len(symbols)))


@pytest.mark.parametrize("symbols", ["abc", "abc\u4e2d", "".join(map(chr, range(256)))])
@pytest.mark.parametrize("unknown", ["\u0100", "\u4e00", "\U0001f600", "\udc80"])
def test_unknown_characters_are_listed(symbols, unknown):
    with pytest.raises(UserError, match=r"^1 character.*" + regex.escape(ascii(unknown))):
        tk.CharTokenizer(symbols).encode("ab" + unknown + unknown)


def test_unknown_latin_characters_are_counted_and_the_list_is_short():
    with pytest.raises(UserError, match=r"^24 character\(s\).* 'd', 'e', 'f', .*\.\.\.") as error:
        tk.CharTokenizer("xz").encode("abcdefghijklmnopqrstuvwxyz")
    assert "'k'" not in str(error.value)


def test_alphabet_collects_every_kind_of_character():
    alphabet = tk.Alphabet()
    for text in ["banana", "\u00e9\xff\x00", "n\u4e2d\U0010ffff", "b"]:
        alphabet.add(text)
    assert alphabet.symbols() == "\x00abn\u00e9\xff\u4e2d\U0010ffff"


def test_byte_ids_are_utf8():
    tokenizer = tk.ByteTokenizer()
    text = "h\u00e9llo \u4e2d \U0001f600\0"
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.separator, tk.ByteTokenizer(True).separator) == (
        256,
        None,
        256,
    )
    assert tokenizer.decode(text.encode()[:-3]).endswith("\ufffd")


def test_bpe_counts_its_separator_and_agrees_with_tiktoken(bpe):
    assert (bpe.vocab_size, bpe.separator) == (290, 289)
    text = "the cat can't sit\n\n 12345  <|endoftext|> \u4e2d\u6587 \U0001f600"
    ids = bpe.encode(text)
    assert ids.tolist() == bpe._encoding.encode_ordinary(text)
    assert ids.dtype == "<u2"
    assert bpe.separator not in ids
    assert bpe.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert bpe.decode([289]) == "<|endoftext|>"


def test_bpe_merges_the_commonest_pair_first():
    tokenizer = tk.train_bpe(
        ["ab ab ab ab cd cd"] * 2, 258
    )  # one merge: "ab" 8 times (" a" 6, "cd" 4)
    assert tokenizer.pieces[256:] == [b"ab"]


def test_bpe_stops_when_nothing_is_left_to_merge():
    tokenizer = tk.train_bpe(["aaaa"], 5000)
    assert 257 < tokenizer.vocab_size < 262
    assert tokenizer.separator == tokenizer.vocab_size - 1


def test_bpe_too_small_a_vocabulary_is_refused():
    assert tk.train_bpe(["abab"], 257).vocab_size == 257
    with pytest.raises(UserError, match="257"):
        tk.train_bpe(["abab"], 256)


def test_bpe_is_trained_with_the_pattern_asked_for(gpt2):
    texts = ["in 123456 and in 123456\n" * 50]
    by_gpt2 = tk.train_bpe(texts, 280, "gpt2")
    by_gpt4 = tk.train_bpe(texts, 280)
    assert max(len(piece) for piece in by_gpt2.pieces if piece.strip().isdigit()) > 3
    assert max(len(piece) for piece in by_gpt4.pieces if piece.strip().isdigit()) == 3
    for tokenizer, pattern in ((by_gpt2, gpt2.pattern), (by_gpt4, patterns.GPT4)):
        assert tokenizer.spec()["pattern"] == pattern
        again = tk.load_tokenizer(tokenizer.spec())
        assert again.encode(texts[0]).tolist() == tokenizer.encode(texts[0]).tolist()


def test_the_default_pattern_is_the_trainers_own():
    rustbpe = pytest.importorskip("rustbpe")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(["ab"]), 256)
    assert trainer.get_pattern() == patterns.GPT4


def test_bpe_training_does_not_depend_on_chunks(bpe):
    text = "".join(TRAINING_TEXT)
    for size in (7, 100):
        again = tk.train_bpe((chunk for _, chunk in tk.safe_chunks([(0, text)], size)), 290)
        assert again.pieces == tk.train_bpe([text], 290).pieces


def test_gpt2_gives_gpt2s_ids(gpt2):
    assert gpt2.encode("hello world").tolist() == [
        31373,
        995,
    ]  # the example in tiktoken's documentation
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert (gpt2.vocab_size, gpt2.separator) == (50_257, 50_256)


def test_gpt2_without_cache_and_network_says_what_to_do(tmp_path):
    environment = {
        **os.environ,
        "TIKTOKEN_CACHE_DIR": str(tmp_path),
        "https_proxy": "http://127.0.0.1:9",
        "no_proxy": "",
    }
    code = "from data.tokenizer import *\ntry: load_gpt2()\nexcept UserError as error: print(error)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert len(result.stdout.splitlines()) == 2
    assert "TIKTOKEN_CACHE_DIR" in result.stdout
    assert "--tokenizer bpe" in result.stdout
    assert result.stderr == ""


def every_kind(request):
    return {
        "char": lambda: tk.CharTokenizer("\n abc\u4e2d\U0001f600", True),
        "byte": tk.ByteTokenizer,
        "bpe": lambda: request.getfixturevalue("bpe"),
        "gpt2": lambda: request.getfixturevalue("gpt2"),
    }


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
def test_spec_round_trips_through_json(kind, request, monkeypatch):
    tokenizer = every_kind(request)[kind]()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "/nowhere")
    again = tk.load_tokenizer(json.loads(json.dumps(tokenizer.spec())))
    text = "a cab\n\u4e2d b\U0001f600"
    assert (again.kind, again.vocab_size, again.separator) == (
        kind,
        tokenizer.vocab_size,
        tokenizer.separator,
    )
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()
    assert again.spec() == tokenizer.spec()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
def test_batches_and_byte_lengths_and_streaming(kind, request):
    tokenizer = every_kind(request)[kind]()
    text = "a cab\n\u4e2d\u4e2d b\U0001f600c"
    texts = [text, "", text * 30_000, *([text] * 500), "a"]
    for ids, expected in zip(tokenizer.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(expected))
    ids = tokenizer.encode(text)
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,)
    assert lengths[ids].sum() == len(text.encode())
    assert tokenizer.separator is None or lengths[tokenizer.separator] == 0
    decoder = tk.StreamDecoder(tokenizer)
    shown = [decoder.push(i) for i in ids]
    assert "".join(shown) + decoder.finish() == text
    assert all("\ufffd" not in piece for piece in shown)
    assert tokenizer.decode(ids) == text


def test_streaming_holds_half_a_character_back():
    decoder = tk.StreamDecoder(tk.ByteTokenizer())
    assert [decoder.push(i) for i in "\U0001f600".encode()] == ["", "", "", "\U0001f600"]
    assert decoder.push(0xF0) == ""
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_half_a_surrogate_pair_is_refused(kind, request):
    with pytest.raises(UserError, match="udc80"):
        every_kind(request)[kind]().encode("a\udc80")


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {},
        {"kind": "char", "symbols": "ab"},
        {"format": 0, "kind": "byte", "separator": False},
        {"format": 1, "kind": "wordpiece"},
        {"format": 1, "kind": "char", "separator": False},
        {"format": 1, "kind": "char", "symbols": "ba", "separator": False},
        {"format": 1, "kind": "char", "symbols": "aab", "separator": False},
        {"format": 1, "kind": "bpe", "pattern": "x", "tokens": "!"},
        {"format": 1, "kind": "bpe", "pattern": "x", "tokens": 3},
        {"format": 1, "kind": "bpe", "pattern": "x", "tokens": "YQ== Yg=="},
    ],
)
def test_unknown_or_damaged_specs_are_refused(spec):
    with pytest.raises(UserError):
        tk.load_tokenizer(spec)


def test_a_damaged_token_is_refused(bpe):
    with pytest.raises(UserError, match="damaged"):
        tk.load_tokenizer({**bpe.spec(), "tokens": bpe.spec()["tokens"] + " Y!WFh"})


# --- cuts ---

WHITE = [" ", " ", " ", "\n", "\n", "  ", "\t", "\r", "\u00a0", "\u2028", "\x1c", "\x85"]
OTHER = [
    "a",
    "Zz",
    "\u00e9",
    "\u4e2d\u6587",
    "1",
    "2345",
    "\u00b2",
    "\u0663",
    "'",
    "'s",
    "'LL",
    "n't",
    ".",
    "...",
    ",",
    "_",
    "-",
]
OTHER += [
    "\u3002",
    "\uff0c",
    "\U0001f600",
    "\u0301",
    "\u0915\u094d",
    "<|endoftext|>",
    "$",
    "\u2019",
    "\u017f",
]


def adversarial(rng: random.Random) -> str:
    pieces = rng.sample(WHITE, 3) + rng.sample(OTHER, 5)
    return "".join(rng.choices(pieces, k=rng.randrange(2, 60)))


@pytest.mark.slow
def test_safe_cuts_are_where_the_patterns_cut(bpe):
    patterns = [regex.compile(GPT2_PATTERN), regex.compile(bpe.pattern)]
    rng, n_cuts = random.Random(0), 0
    for _ in range(3000):
        text = adversarial(rng)
        cuts = [cut for cut in range(len(text) + 1) if tk.safe_cut(text, cut) == cut]
        n_cuts += len(cuts)
        for pattern in patterns:
            whole = pattern.findall(text)
            assert "".join(whole) == text
            for cut in cuts:
                assert pattern.findall(text[:cut]) + pattern.findall(text[cut:]) == whole, (
                    text,
                    cut,
                )
    assert n_cuts > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_chunks_give_the_tokens_of_the_whole(kind, size, request):
    tokenizer, rng = request.getfixturevalue(kind), random.Random(size)
    for _ in range(400):
        text = adversarial(rng)
        feed = [
            (0, text[i : i + 5]) for i in range(0, len(text), 5)
        ]  # as a file would come, in pieces of any length
        chunks = [chunk for _, chunk in tk.safe_chunks(feed, size)]
        assert "".join(chunks) == text
        assert [
            i for ids in tokenizer.encode_batch(chunks) for i in ids
        ] == tokenizer._encoding.encode_ordinary(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_chunks_of_real_text(kind, request, shakespeare):
    tokenizer = request.getfixturevalue(kind)
    whole = tokenizer._encoding.encode_ordinary(shakespeare)
    for size, n_chunks in [(100, 5_000), (4_096, 250), (100_000, 10)]:
        chunks = [chunk for _, chunk in tk.safe_chunks([(0, shakespeare)], size)]
        assert len(chunks) > n_chunks
        np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(chunks)), whole)


def test_chunks_keep_documents_apart_and_hold_text_that_has_no_safe_cut():
    feed = [(0, "aa bb cc"), (0, " dd"), (1, "x" * 50), (1, "x" * 50), (2, "e f")]
    assert list(tk.safe_chunks(feed, 3)) == [
        (0, "aa bb"),
        (0, " cc"),
        (0, " dd"),
        (1, "x" * 100),
        (2, "e f"),
    ]


# --- text without breaks ---


def test_a_run_is_cut_after_so_many_characters(monkeypatch):
    monkeypatch.setattr(tk, "LONGEST_RUN", 8)
    assert tk.run_cuts("a" * 8) == []
    assert tk.run_cuts("a" * 9) == [8]
    assert tk.run_cuts("a" * 24) == [8, 16]
    assert tk.run_cuts("a" * 25) == [8, 16, 24]
    assert tk.run_cuts("two words " * 20) == []
    assert tk.run_cuts("aa " + "b" * 20 + ", cc") == [10, 18]  # counted from the cut before " b"
    assert tk.run_cuts("a" + " " * 20 + "b") == [8, 16]
    assert tk.run_cuts("") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
@pytest.mark.parametrize(("size", "longest"), [(1, 8), (4, 16), (16, 8), (40, 16), (16, 32)])
def test_long_runs_give_the_same_tokens_in_chunks_and_whole(
    kind, size, longest, request, monkeypatch
):
    monkeypatch.setattr(tk, "LONGEST_RUN", longest)
    tokenizer, rng = request.getfixturevalue(kind), random.Random(size)
    n_cut = 0
    for _ in range(200):
        runs = [rng.choice(["acgt", " ", "\n", "-", "\u4e2d", "9"]) * rng.randrange(40)]
        text = "".join(rng.choices([*runs, adversarial(rng), "a word. "], k=6))
        feed = [(0, text[i : i + 5]) for i in range(0, len(text), 5)]
        chunks = [chunk for _, chunk in tk.safe_chunks(feed, size)]
        assert "".join(chunks) == text
        whole = tokenizer.encode(text)
        np.testing.assert_array_equal(np.concatenate(tokenizer.encode_batch(chunks)), whole)
        assert tokenizer.decode(whole) == text
        n_cut += bool(tk.run_cuts(text))
        if not tk.run_cuts(text):
            assert whole.tolist() == tokenizer._encoding.encode_ordinary(text)
    assert n_cut > 30


@pytest.mark.slow
@pytest.mark.parametrize("run", ["ac", " ", "\n"])
@pytest.mark.parametrize("kind", ["bpe", "gpt2"])
def test_a_run_of_any_length_has_ids(run, kind, request):
    """In one piece a million spaces are more than tiktoken's regular expressions can take."""
    tokenizer = request.getfixturevalue(kind)
    text = f"before {run * (1_500_000 // len(run))} after"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.has_cut_runs


def test_little_of_a_run_is_held():
    n_read = 0
    n_written = 0

    def feed():
        nonlocal n_read
        for _ in range(40):
            n_read += 40_000
            yield 0, "acgt" * 10_000

    for _, chunk in tk.safe_chunks(feed(), 1 << 17):
        assert n_read - n_written <= (1 << 17) + tk.LONGEST_RUN + 40_002
        n_written += len(chunk)
    assert n_written == 1_600_000


@pytest.mark.parametrize(
    ("text", "is_dense"),
    [
        ("acgt" * 1000, True),
        (("acgt" * 15 + "\n") * 100, True),
        ("".join(f"{i:064x}\n" for i in range(100)), True),
        ("acgt" * 10, False),  # too short to say
        ("The quick brown fox jumps over the lazy dog.\n" * 50, False),
        ("\u6628\u65e5\u306f\u5929\u6c17\u304c\u826f\u304b\u3063\u305f\u3002" * 50, False),
        ("https://example.org/a/page?id=5\n" * 50, False),
        ("function a(b){return b?c(b-1):d[e]}" * 50, False),
    ],
)
def test_text_with_hardly_a_break(text, is_dense):
    assert tk.is_dense(text) == is_dense


def test_a_bpe_learns_from_so_much_of_a_genome_and_no_more(monkeypatch, capsys):
    monkeypatch.setattr(tk, "DENSE_CHARACTERS", 1000)
    texts = ["some words, and so on. " * 5, "ac" * 500, "gt" * 500, "zz yy " * 30]
    tokenizer = tk.train_bpe(texts, 300)
    assert b"ac" in tokenizer.pieces
    assert b"zz" in tokenizer.pieces
    assert b"gt" not in tokenizer.pieces
    assert "not trained on 1,000 characters of text with hardly a break" in capsys.readouterr().err
    assert tk.train_bpe(texts[::3], 300).vocab_size
    assert capsys.readouterr().err == ""


def test_a_batch_stops_where_one_text_fails(bpe, monkeypatch):
    """As Ctrl-C does: the others wait for the text in hand, not for all of theirs."""
    encoded = []

    def encode(text):
        time.sleep(0.01)
        if text == "bad":  # by now the other share is in hand
            raise UserError("bad")
        encoded.append(text)

    monkeypatch.setattr(tk, "usable_cpus", lambda: 2)
    monkeypatch.setattr(bpe, "encode", encode)
    with pytest.raises(UserError):
        bpe.encode_batch(["bad"] + ["good"] * 199)
    assert len(encoded) < 50


# --- the process that learns ---


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Replaces the program that learns by another; returns the processes that were started."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def replace(code):
        (tmp_path / "stand_in.py").write_text(code)
        monkeypatch.setattr(tk.merging, "__file__", str(tmp_path / "stand_in.py"))
        return started

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    return replace


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.stdin.buffer.read(); raise MemoryError('too much')", "too much"),
        ("raise ImportError('no rustbpe')", "no rustbpe"),  # before it has read anything
        ("import os; os.kill(os.getpid(), 9)", "signal 9; is there memory enough"),
    ],
)
def test_a_training_that_fails_says_why(code, message, stand_in):
    stand_in(code)
    with pytest.raises(MachineError, match=message) as caught:
        tk.train_bpe(["ab ab " * 20_000] * 10, 300)
    assert "--tokenizer byte" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX knows them")
def test_ctrl_c_ends_the_training(stand_in):
    started = stand_in("import sys, time; sys.stdin.buffer.read(); time.sleep(60)")
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        tk.train_bpe(["ab ab"], 300)
    timer.join()
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_text_that_can_not_be_read_ends_the_training(stand_in):
    def texts():
        yield "ab " * 1000
        raise UserError("no text")

    started = stand_in("import sys, time; sys.stdin.buffer.read(); time.sleep(60)")
    with pytest.raises(UserError, match="no text"):
        tk.train_bpe(texts(), 300)
    assert started[0].returncode is not None
