"""The loss over a split against a plain loop in float64, the windows it reads, and what it leaves
as it was.
"""

import math

import numpy as np
import pytest
import torch
from helpers import write_corpus
from torch import nn

from configs import ModelConfig
from data.dataset import Dataset
from ops.distributed import Processes
from training.evaluate import bits_per_byte, evaluate, split_loss
from training.loss import cross_entropy

ULP = 2.0**-24
TOKENS = (
    np.random.default_rng(0).integers(0, 11, 53).astype(np.uint16)
)  # six windows of 8 and a last one of 4


class Spy(nn.Module):
    """Predicts evenly among `vocab_size` tokens and remembers what it was given."""

    def __init__(self, context_length=8, vocab_size=11):
        super().__init__()
        self.config, self.vocab_size = ModelConfig(context_length=context_length), vocab_size
        self.weight, self.seen, self.modes = nn.Parameter(torch.zeros(1)), [], []

    def forward(self, tokens_BT):
        self.seen.append(tokens_BT)
        self.modes.append((self.training, torch.is_grad_enabled()))
        return self.weight + torch.zeros(*tokens_BT.shape, self.vocab_size)


def plain_loss(model, tokens, windows):
    """-log p of every target by math.log, one window at a time."""
    total, count = 0.0, 0
    for start, end in windows:
        logits = model(torch.tensor(tokens[start:end].tolist())[None])[0].tolist()
        for scores, target in zip(logits, tokens[start + 1 : end + 1].tolist(), strict=True):
            total += math.log(sum(math.exp(score) for score in scores)) - scores[target]
            count += 1
    return total / count


def hand_windows(n_token, context_length):
    places = range(0, n_token - 1, context_length)
    return [(start, min(start + context_length, n_token - 1)) for start in places]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 6, 7, 50])
@pytest.mark.parametrize("n_token", [2, 9, 12, 49, 50, 53])
def test_whole_split_against_a_plain_loop(tiny, batch_size, n_token):
    model, tokens = tiny(), TOKENS[:n_token]
    with torch.no_grad():
        expected = plain_loss(model, tokens, hand_windows(n_token, 8))
    size = min(
        8 * batch_size, n_token
    )  # terms in the longest float32 sum; each has eight roundings, and is no longer than 20
    assert split_loss(model, tokens, batch_size) == pytest.approx(
        expected, abs=20 * (size + 8) * ULP
    )


def test_every_token_counts_alike():
    """A short window's tokens weigh as much as any other's: by hand, 8 tokens lost at log 2 and 2
    at log 1.
    """

    class Half(Spy):
        def forward(self, tokens_BT):
            logits = torch.full((*tokens_BT.shape, 2), 0.0)
            logits[..., 0] += 1e9 * (tokens_BT.shape[1] < 8)  # sure of token 0 in the short window
            return logits + self.weight

    assert split_loss(Half(), np.zeros(11, np.uint16), 4) == pytest.approx(
        0.8 * math.log(2), rel=4 * ULP
    )


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_reads_each_window_once(batch_size):
    spy = Spy()
    tokens = np.arange(53) % 11
    assert split_loss(spy, tokens, batch_size) == pytest.approx(math.log(11), rel=64 * ULP)
    assert torch.cat([batch.flatten() for batch in spy.seen]).tolist() == tokens[:-1].tolist()
    assert all(len(batch) <= batch_size for batch in spy.seen)
    assert all(mode == (False, False) for mode in spy.modes)


@pytest.mark.parametrize(
    ("n_window", "places"),
    [
        (1, [0]),
        (2, [0, 40]),
        (3, [0, 24, 48]),
        (5, [0, 16, 32, 48, 64]),
        (9, [0, 8, 16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_some_windows_evenly_spaced(n_window, places):
    """Ten windows: number i of n is floor(10 i / n), the same ones whenever it is asked."""
    spy = Spy(vocab_size=100)
    for _ in range(2):
        spy.seen.clear()
        split_loss(spy, np.arange(81), 2, n_window)
        assert torch.cat([batch[:, 0] for batch in spy.seen]).tolist() == places


@pytest.mark.parametrize("n_window", [7, 8, 1000])
def test_as_many_windows_as_there_are_or_more(n_window):
    spy = Spy()
    split_loss(spy, TOKENS, 4, n_window)
    assert sum(batch.numel() for batch in spy.seen) == 52


@pytest.mark.parametrize("mode", [True, False])
def test_mode_is_restored_and_dropout_off(tiny, mode):
    model = tiny(dropout=0.5)
    expected = split_loss(model.eval(), TOKENS, 4)
    model.train(mode)
    state = torch.get_rng_state()
    assert split_loss(model, TOKENS, 4) == expected
    assert model.training is mode
    assert model.blocks[0].mlp.training is mode
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("count", [2, 3, 4, 16])
def test_processes_share_the_windows(tiny, count):
    """Each process's total and count, added up, are those of one process; all make equally many
    calls, as sharded models must.
    """
    model, parts, calls = tiny(), [], []

    class Part(Processes):
        def sum(self, *numbers, device="cpu"):
            parts.append(numbers)
            return [1.0, 1.0]

    for rank in range(count):
        before = model.register_forward_pre_hook(lambda *_, rank=rank: calls.append(rank))
        split_loss(model, TOKENS, 2, processes=Part(rank=rank, count=count))
        before.remove()
    total, tokens = map(sum, zip(*parts, strict=True))
    assert tokens == 52
    assert total / tokens == pytest.approx(split_loss(model, TOKENS, 2), rel=1e-12)
    assert len({calls.count(rank) for rank in range(count)}) == 1


def test_cross_entropy_is_computed_in_float32():
    logits = torch.randn(2, 3, 11)
    targets = torch.randint(0, 11, (2, 3))
    wide = cross_entropy(logits.bfloat16(), targets)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, cross_entropy(logits.bfloat16().float(), targets))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(cross_entropy(logits.bfloat16(), targets), wide)


def test_bits_per_byte_by_hand():
    # log 2 nats are one bit; a token of 4 bytes that costs log 16 nats costs 4 bits, 1 a byte
    assert bits_per_byte(math.log(2), 1.0) == pytest.approx(1.0, rel=1e-15)
    assert bits_per_byte(math.log(16), 4.0) == pytest.approx(1.0, rel=1e-15)
    assert bits_per_byte(math.log(16), 2.0) == pytest.approx(2.0, rel=1e-15)


def test_evaluate_both_splits(tmp_path):
    """An even guess among 4 tokens: log 4 nats, perplexity 4, 2 bits a token; in `val` a token has
    7 / 4 bytes.
    """
    data = Dataset(write_corpus(tmp_path, "ab\u00e9c" * 10, "\u00e9\u00e9\u00e9a"))
    found = evaluate(Spy(vocab_size=4), data, 2, 0)
    assert list(found) == ["train_loss", "val_loss", "val_perplexity", "val_bits_per_byte"]
    assert list(found.values()) == pytest.approx(
        [math.log(4), math.log(4), 4.0, 2 / (7 / 4)], rel=64 * ULP
    )


def test_the_whole_of_validation_and_a_fifth_as_much_of_training(tmp_path):
    """83 targets in windows of 4 are 21 windows; a fifth, rounded up, is 5 (a sixth would be 4, a
    quarter 6).
    """
    data, spy = (
        Dataset(write_corpus(tmp_path, "abcd" * 50, "abc" * 28)),
        Spy(context_length=4, vocab_size=4),
    )
    evaluate(spy, data, 2, 0)
    assert sum(batch.numel() for batch in spy.seen) == 5 * 4 + 83


def test_perplexity_does_not_overflow(tmp_path):
    class Lost(Spy):
        def forward(self, tokens_BT):
            return torch.nn.functional.one_hot(tokens_BT * 0 + 3, 4) * 1e6 + self.weight

    data = Dataset(write_corpus(tmp_path, "abcd" * 10, "abab"))
    assert math.isfinite(evaluate(Lost(), data, 2, 0)["val_perplexity"])
