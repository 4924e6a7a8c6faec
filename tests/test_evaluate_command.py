"""evaluate.py: each token is scored once, from enough before it; runs are compared piece by piece;
what a user gets wrong ends in a line.
"""

import hashlib
import json
import math
import sys

import numpy as np
import pytest
import torch
from helpers import make_config, make_model, nonsense, read_records, train_here, write_corpus

import evaluate
from configs import Config, DataConfig
from data.dataset import Dataset
from data.foreign import SPACE
from data.tokenizer import ByteTokenizer, ForeignTokenizer
from errors import UserError
from ops.checkpoint import Checkpoint, load, save
from training.scoring import (
    PIECE_BYTES,
    bits_of_pieces,
    first_bytes,
    paired_difference,
    scored_windows,
    text_digest,
    token_losses,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs on the same text, and its folder; all windows are evaluated."""
    folder = tmp_path_factory.mktemp("evaluated")
    data = write_corpus(folder / "data", nonsense(3000))
    for name, lr in (("one", 3e-3), ("two", 1e-4)):
        config = make_config(
            data, folder / name, max_steps=20, eval_every=10, eval_batches=0, lr=lr
        )
        assert train_here(config) == 0
    return folder


@pytest.fixture
def evaluated(trained, monkeypatch, capsys):
    """Calls the command; its exit code or error, what it printed, and its notes."""
    monkeypatch.chdir(trained)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *words])
        code = evaluate.main()
        out, err = capsys.readouterr()
        return code, out, err

    return call


# --- scoring ---


@pytest.mark.parametrize("n_token", [2, 3, 8, 9, 10, 17, 40])
@pytest.mark.parametrize("stride", [1, 3, 7, 8])
def test_each_token_is_scored_once_from_enough_before_it(n_token, stride):
    scored = []
    for start, end, first in scored_windows(n_token, 8, stride):
        assert 0 <= start < end <= n_token - 1
        assert end - start <= 8
        scored += range(first + 1, end + 1)
        assert start == 0 or first + 1 - start >= 8 - stride + 1
    assert scored == list(range(1, n_token))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("stride", [8, 3])
@pytest.mark.parametrize("n_token", [30, 9, 2])
def test_losses_are_those_of_a_loop(stride, batch_size, n_token):
    model = make_model(vocab_size=11, seed=1).double().eval()
    tokens = np.random.default_rng(0).integers(0, 11, n_token)
    wanted = []
    for target in range(1, n_token):
        # The first window that has the target, where windows begin `stride` apart.
        start = 0 if target <= 8 else stride * math.ceil((target - 8) / stride)
        logits = model(torch.tensor(tokens[None, start:target]))[0, -1]
        wanted.append(-logits.log_softmax(-1)[tokens[target]].item())
    found = token_losses(model, tokens, stride, batch_size)
    np.testing.assert_allclose(found, wanted, atol=1e-6)  # scored in float32


def test_a_piece_has_the_tokens_that_begin_in_it():
    tokens = np.arange(2 * PIECE_BYTES + 5) % 256
    losses = np.arange(len(tokens) - 1.0)
    begins = first_bytes(ByteTokenizer(), tokens, len(tokens))
    assert begins.tolist() == list(range(len(tokens)))
    found = bits_of_pieces(losses, begins, len(tokens))
    # 1,026 1/2 bytes each, and the text's first token is not scored.
    first = PIECE_BYTES + 3 - 1
    wanted = [losses[:first].sum(), losses[first:].sum()]
    np.testing.assert_allclose(found, np.array(wanted) / math.log(2))


def test_a_text_that_is_alike_throughout_has_no_error():
    """Whatever is left over where it is cut: a last piece of twice the size would make one."""
    n_byte = 6 * PIECE_BYTES - 24
    begins, losses = np.arange(n_byte), np.full(n_byte - 1, math.log(2))
    one, other = (bits_of_pieces(k * losses, begins, n_byte) for k in (3, 1))
    assert len(one) == 5
    difference, error = paired_difference(one, other, n_byte)
    assert difference == pytest.approx(2, rel=1e-3)
    assert error < 1e-3


def test_the_digest_is_of_the_whole_text(monkeypatch):
    tokens = np.arange(100)
    monkeypatch.setattr("training.scoring.AT_ONCE", 7)
    wanted = hashlib.sha256(bytes(range(100))).hexdigest()
    assert text_digest(ByteTokenizer(), tokens) == wanted


def test_tokens_that_do_not_add_up_to_the_text_are_stretched():
    """Pieces of 1, 2 and 3 bytes where the text has 12, or 3."""

    class Other:
        def byte_lengths(self):
            return np.array([1, 2, 3])

    tokens = np.array([0, 1, 2])
    assert first_bytes(Other(), tokens, 6).tolist() == [0, 1, 3]
    assert first_bytes(Other(), tokens, 12).tolist() == [0, 2, 6]
    assert first_bytes(Other(), tokens, 3).tolist() == [0, 0, 1]


def test_the_paired_error_by_hand():
    """d = 1, 3, 5: their sum 9, their variance 4, so sqrt(3 x 4) for the sum of three."""
    one, other = np.array([11.0, 23.0, 35.0]), np.array([10.0, 20.0, 30.0])
    assert paired_difference(one, other, 100) == pytest.approx((0.09, math.sqrt(12) / 100))
    assert paired_difference(one[:1], other[:1], 10) == (0.1, None)


# --- the command ---


@pytest.mark.slow
@pytest.mark.parametrize("split", ["val", "train"])
def test_it_agrees_with_the_log(split, evaluated, trained):
    code, out, err = evaluated("one", "--split", split, "--json")
    assert code == 0
    assert "reading" in err
    (measured,) = json.loads(out)["measured"]
    last = [r for r in read_records(trained / "one") if r["kind"] == "eval"][-1]
    if split == "val":
        assert measured["loss"] == pytest.approx(last["val_loss"], abs=1e-6)
        assert measured["bits_per_byte"] == pytest.approx(last["val_bits_per_byte"], rel=1e-2)
    else:
        assert measured["tokens"] == measured["bytes"] > 2000


@pytest.mark.slow
def test_two_runs_are_compared(evaluated, trained):
    (trained / "t.txt").write_text(nonsense(3000), encoding="utf-8")
    code, out, _ = evaluated("one", "two", "--text", "t.txt", "--stride", "3")
    assert code == 0
    first, second, last = out.splitlines()
    assert first.startswith("one, t.txt: loss ")
    assert second.startswith("two, t.txt: loss ")
    assert last.startswith("t.txt: one takes ")
    assert last.endswith("clearly")
    _, beside, _ = evaluated("one", "--text", "t.txt")
    assert beside.startswith("one, t.txt: loss ")
    assert beside != first + "\n"
    _, out, _ = evaluated("one", "one", "--text", "t.txt", "--json")
    assert json.loads(out)["differences"] == [
        {"text": "t.txt", "difference": 0.0, "standard_error": 0.0}
    ]


@pytest.mark.slow
def test_runs_on_other_data_are_not_compared(evaluated, trained):
    """As many bytes, another text."""
    write_corpus(trained / "other", nonsense(3000, seed=9))
    checkpoint = load(trained / "one" / "best.pt")
    checkpoint.config["data"]["data"] = "other"
    (trained / "four").mkdir()
    save(checkpoint, trained / "four" / "best.pt")
    with pytest.raises(UserError, match="other no longer holds the data of four"):
        evaluated("four")
    checkpoint.dataset = Dataset(trained / "other").fingerprint
    (trained / "three").mkdir()
    save(checkpoint, trained / "three" / "best.pt")
    with pytest.raises(UserError, match="different data"):
        evaluated("one", "three")
    code, _, _ = evaluated("one", "two")
    assert code == 0
    raw = bytearray((trained / "other" / "val.bin").read_bytes())
    raw[21] = 9  # the upper byte of an id
    (trained / "other" / "val.bin").write_bytes(raw)
    with pytest.raises(UserError, match=r"val.bin is damaged: token 10 is 2,\d\d\d"):
        evaluated("three")


@pytest.mark.slow
def test_runs_with_other_tokenizers_are_compared_on_a_text(evaluated, trained):
    """One of them puts a space in front of each text, as SentencePiece's do."""
    words = {chr(ord("a") + i): i for i in range(26)} | {SPACE: 26, ".": 27, "<0x0A>": 28}
    model = {"type": "BPE", "vocab": words, "merges": [], "byte_fallback": True}
    steps = [{"type": "Prepend", "prepend": SPACE}]
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    plain = {"model": model, "normalizer": {"type": "Sequence", "normalizers": steps}}
    tokenizer = ForeignTokenizer(json.dumps(plain), None)
    network = make_model(tokenizer.vocab_size, seed=0)
    config = Config(model=network.config, data=DataConfig(data="")).to_dict()
    (trained / "taken").mkdir()
    checkpoint = Checkpoint(1, network.state_dict(), config, tokenizer.spec(), "")
    save(checkpoint, trained / "taken" / "checkpoint.pt")
    text = nonsense(3000, seed=4)
    (trained / "t.txt").write_text(text, encoding="utf-8")
    assert len(tokenizer.encode(text)) == 3001
    code, out, _ = evaluated("one", "taken", "--text", "t.txt", "--json")
    assert code == 0
    one, other = json.loads(out)["measured"]
    assert one["all_bytes"] == other["all_bytes"] == 3000
    assert abs(one["bytes"] - other["bytes"]) <= 1
    (difference,) = json.loads(out)["differences"]
    apart = one["bits_per_byte"] - other["bits_per_byte"]
    assert difference["difference"] == pytest.approx(apart, abs=0.01)
    with pytest.raises(UserError, match="taken has no data of its own"):
        evaluated("taken")


def test_the_difference_in_words():
    row = {"text": "t", "difference": -0.25, "standard_error": 0.12}
    said = "t: a takes 0.2500 bits per byte less, more than two standard errors of 0.1200: clearly"
    assert evaluate.difference_text(("a", "b"), row) == said
    row["standard_error"] = 0.125
    said = evaluate.difference_text(("a", "b"), row)
    assert said.endswith("less, within two standard errors of 0.1250: which may be chance")
    row["difference"] = 0.0
    assert evaluate.difference_text(("a", "b"), row) == "t: no difference"


def test_a_text_and_a_split_are_not_both_taken():
    with pytest.raises(ValueError, match="--text and --split are given"):
        evaluate.Options(("one",), text=("t.txt",), split="train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        (["nowhere"], "", "there is no run nowhere"),
        (["one", "--text", "t.txt"], "", "the text t.txt is empty"),
        (
            ["one", "--text", "t.txt"],
            "\u00e9t\u00e9 42",
            r"holds 4 characters that one doesn't know",
        ),
        (["one", "--text", "t.txt"], "a", "is 1 token: two are needed"),
        (["one", "--text", "."], "", "the text . can't be read: Is a directory"),
        (["one", "--text", "t.txt"], b"a\xff", "isn't UTF-8"),
        (["one", "--stride", "17"], "", "--stride is 17; one reads 16 tokens at once"),
        (["bad"], "", "are NaN or infinite"),
        (["moved"], "", "is not there: give a text with --text"),
        (["taken"], "", "taken has no data of its own"),
    ],
)
def test_what_a_user_gets_wrong(words, content, message, evaluated, trained):
    raw = content if isinstance(content, bytes) else content.encode()
    (trained / "t.txt").write_bytes(raw)
    for name in ("bad", "moved", "taken"):
        (trained / name).mkdir(exist_ok=True)
        checkpoint = load(trained / "one" / "best.pt")
        if name == "bad":
            checkpoint.model["norm.weight"][0] = math.nan
        checkpoint.config["data"]["data"] = "gone" if name == "moved" else ""
        save(checkpoint, trained / name / "best.pt")
    with pytest.raises(UserError, match=message) as caught:
        evaluated(*words)
    assert len(str(caught.value).splitlines()) <= 2
