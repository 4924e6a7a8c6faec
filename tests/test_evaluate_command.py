"""evaluate.py: each token is scored once, from enough before it; runs are compared piece by piece;
what a user gets wrong ends in a line.
"""

import json
import math
import sys

import numpy as np
import pytest
import torch
from helpers import make_config, make_model, nonsense, read_records, train_here, write_corpus

import evaluate
from data.tokenizer import ByteTokenizer
from errors import UserError
from ops.checkpoint import load, save
from training.scoring import (
    PIECE_BYTES,
    bits_of_pieces,
    paired_difference,
    scored_windows,
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
    found = bits_of_pieces(losses, tokens, ByteTokenizer())
    first = PIECE_BYTES - 1  # the text's first token is not scored
    wanted = [losses[:first].sum(), losses[first:].sum()]
    np.testing.assert_allclose(found, np.array(wanted) / math.log(2))


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
    (trained / "three").mkdir()
    save(checkpoint, trained / "three" / "best.pt")
    with pytest.raises(UserError, match="different data"):
        evaluated("one", "three")
    code, _, _ = evaluated("one", "two")
    assert code == 0


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
