"""evaluate.py: each token is scored once, from enough before it; runs are compared piece by piece;
what a user gets wrong ends in a line.
"""

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    SHARED,
    make_config,
    make_model,
    nonsense,
    read_records,
    train_here,
    write_corpus,
)

import evaluate
from configs import Config, DataConfig
from data import prepare
from data.dataset import Dataset
from data.foreign import SPACE
from data.tokenizer import ByteTokenizer, ForeignTokenizer, load_tokenizer
from errors import UserError
from ops.checkpoint import Checkpoint, load, save
from training.evaluate import evaluate as training_evaluation
from training.scoring import (
    PIECE_BYTES,
    Pieces,
    Places,
    paired_difference,
    pooled,
    score,
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

    call.read = capsys.readouterr
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
    parts = list(token_losses(model, tokens, stride, batch_size))
    assert max(map(len, parts)) <= 8 * batch_size
    found = np.concatenate(parts)
    np.testing.assert_allclose(found, wanted, atol=1e-6)  # scored in float32


def test_a_piece_has_the_tokens_that_begin_in_it():
    tokens = np.arange(2 * PIECE_BYTES + 5) % 256
    losses = np.arange(len(tokens) - 1.0)
    places, pieces = Places(ByteTokenizer(), tokens, len(tokens)), Pieces(len(tokens))
    begins = np.concatenate([places.next(part) for part in np.split(tokens, [1, 9, 1500])])
    assert begins.tolist() == list(range(len(tokens)))
    for part in np.split(np.arange(1, len(tokens)), [7, 1200]):
        pieces.add(losses[part - 1], begins[part])
    found = pieces.bits
    # 1,026 1/2 bytes each, and the text's first token is not scored.
    first = PIECE_BYTES + 3 - 1
    wanted = [losses[:first].sum(), losses[first:].sum()]
    np.testing.assert_allclose(found, np.array(wanted) / math.log(2))


def test_a_text_that_is_alike_throughout_has_no_error():
    """Whatever is left over where it is cut: a last piece of twice the size would make one."""
    n_byte = 6 * PIECE_BYTES - 24
    begins, losses = np.arange(n_byte), np.full(n_byte - 1, math.log(2))
    one, other = Pieces(n_byte), Pieces(n_byte)
    one.add(3 * losses, begins[1:])
    other.add(losses, begins[1:])
    assert len(one.bits) == 5
    difference, error = paired_difference(one.bits, other.bits, one.sizes())
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
    for n_byte, begins in ((6, [0, 1, 3]), (12, [0, 2, 6]), (3, [0, 0, 1])):
        assert Places(Other(), tokens, n_byte).next(tokens).tolist() == begins


def test_the_paired_error_by_hand():
    """d = 1, 3, 5: their sum 9, their variance 4, so sqrt(3 x 4) for the sum of three."""
    one, other = np.array([11.0, 23.0, 35.0]), np.array([10.0, 20.0, 30.0])
    thirds = np.full(3, 100 / 3)
    assert paired_difference(one, other, thirds) == pytest.approx((0.09, math.sqrt(12) / 100))
    assert paired_difference(one[:1], other[:1], np.array([10.0])) == (0.1, None)
    # r = 9 / 100; of pieces of 10, 30 and 60 bytes d - r size is 0.1, 0.3 and -0.4.
    sizes = np.array([10.0, 30.0, 60.0])
    error = math.sqrt(3 / 2 * (0.1**2 + 0.3**2 + 0.4**2)) / 100
    assert paired_difference(one, other, sizes) == pytest.approx((0.09, error))


def test_several_texts_pooled_are_their_sums():
    """And nothing that is kept grows with the tokens."""
    model = make_model(vocab_size=256, seed=1).eval()
    texts = [np.arange(n_token) % 256 for n_token in (5, PIECE_BYTES * 2 + 3)]
    scores = [score(model, ByteTokenizer(), t, len(t), 8, 4) for t in texts]
    losses = [np.concatenate(list(token_losses(model, t, 8, 4))) for t in texts]
    found = pooled(scores)
    assert found.loss == pytest.approx(np.concatenate(losses).mean(), rel=1e-12)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2), rel=1e-12)
    assert found.tokens == found.bytes == sum(map(len, losses))
    assert found.pieces.sum() * math.log(2) == pytest.approx(found.nats, rel=1e-12)
    assert found.sizes.tolist() == [5, *[PIECE_BYTES + 1.5] * 2]


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
        assert measured["bits_per_byte"] == pytest.approx(last["val_bits_per_byte"], abs=1e-6)
        assert measured["step"] == last["step"]
        assert measured["checkpoint"] == str(Path("one", "best.pt"))
        assert measured["stride"] == 16
    else:
        assert measured["tokens"] == measured["bytes"] > 2000


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe", "gpt2"])
@pytest.mark.parametrize("n_document", [1, 9])
def test_bits_per_byte_are_those_of_the_log(tokenizer, n_document, evaluated, trained, monkeypatch):
    """What the log has is what training.evaluate finds; of a text whose first token is longer than
    most, and of documents with separators between them.
    """
    if tokenizer == "gpt2" and not (SHARED / "tiktoken_cache").is_dir():
        pytest.skip("no ../shared/tiktoken_cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    names = []
    for i in range(n_document):
        names.append(str(trained / f"document{i}.txt"))
        text = f" {'longer' * 9}\n {nonsense(700, seed=i)} caf\u00e9 \U0001f600"
        Path(names[-1]).write_text(text, encoding="utf-8")
    folder = trained / f"{tokenizer}{n_document}"
    size = {"vocab_size": 300} if tokenizer == "bpe" else {}
    options = {"separator": n_document > 1, "val_fraction": 0.4, "out": folder / "data", **size}
    assert prepare.prepare(prepare.Options(tuple(names), tokenizer, **options)) == 0
    data = Dataset(folder / "data")
    network = make_model(load_tokenizer(data.tokenizer_spec).vocab_size, seed=0)
    wanted = training_evaluation(network.eval(), data, 4, 0)
    config = Config(model=network.config, data=DataConfig(data=str(folder / "data"))).to_dict()
    config["optim"]["batch_size"] = 1
    config["run"]["eval_batches"] = 1 if n_document == 1 else 10_000  # more than there are
    checkpoint = Checkpoint(7, network.state_dict(), config, data.tokenizer_spec, data.fingerprint)
    save(checkpoint, folder / "checkpoint.pt")
    evaluated.read()  # what prepare printed
    _, out, notes = evaluated(str(folder), "--json")
    assert ("this is the whole split" in notes) == (n_document == 1)
    (measured,) = json.loads(out)["measured"]
    assert measured["loss"] == pytest.approx(wanted["val_loss"], abs=1e-6)
    assert measured["bits_per_byte"] == pytest.approx(wanted["val_bits_per_byte"], abs=1e-6)
    assert measured["step"] == 7


@pytest.mark.slow
def test_several_texts_are_measured_alone_and_together(evaluated, trained):
    names = ["a.txt", "b.txt"]
    for seed, name in enumerate(names):
        (trained / name).write_text(nonsense(1500 + 900 * seed, seed=seed), encoding="utf-8")
    code, out, _ = evaluated("one", "two", "--text", "a.txt", "--text", "b.txt", "--json")
    assert code == 0
    found = json.loads(out)
    first, second, both = found["measured"][:3]
    assert [row["text"] for row in found["measured"]] == [*names, "all 2 texts"] * 2
    assert [row["run"] for row in found["measured"]] == ["one"] * 3 + ["two"] * 3
    n_token = first["tokens"], second["tokens"]
    mean = np.average([first["loss"], second["loss"]], weights=n_token)
    assert both["loss"] == pytest.approx(mean, rel=1e-12)
    assert both["all_bytes"] == 3900
    assert [row["text"] for row in found["differences"]] == [*names, "all 2 texts"]
    apart = both["bits_per_byte"] - found["measured"][5]["bits_per_byte"]
    assert found["differences"][2]["difference"] == pytest.approx(apart, rel=1e-2)
    errors = [row["standard_error"] for row in found["differences"]]
    assert errors[0] is None
    assert errors[2] > 0


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
