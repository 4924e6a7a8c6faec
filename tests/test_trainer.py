"""The work of a step, without a run around it: the gradient is that of the mean over the global
batch, the update is of that gradient alone, and each micro-batch has its own dropout.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from helpers import MODERN, make_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.batches import dropout_seed, training_batch
from training.evaluate import split_loss
from training.head_loss import head_loss
from training.loss import cross_entropy
from training.state import State
from training.trainer import Trainer

TOKENS = np.random.default_rng(0).integers(0, 11, 400).astype("<u2")


def make_trainer(n_micro=2, **options):
    """A trainer of a batch of 4, in `n_micro` parts, and a session that does the least."""
    torch.manual_seed(0)
    config = make_config("d", "r", **options)
    size = 4 // n_micro
    share = SimpleNamespace(
        n_micro=n_micro,
        micro_batch_size=size,
        micro_batches=lambda: range(n_micro),
        rows=lambda index: range(index * size, (index + 1) * size),
    )
    session = MagicMock(config=config, share=share, device=torch.device("cpu"))
    session.tokenizer.vocab_size = 11
    session.dataset.tokens = {"train": TOKENS}
    session.restore.return_value = State()
    for context in (session.log.phase, session.autocast, session.accumulating):
        context.side_effect = lambda *_, **__: nullcontext()
    session.wrap.side_effect = lambda model, loss, *_: lambda x, y: loss(model(x), y)
    session.feed.side_effect = lambda micro_batch: micro_batch
    return Trainer(session)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("n_micro", [1, 2, 4])
def test_gradients_add_up_to_that_of_the_mean(n_micro):
    trainer = make_trainer(n_micro)
    loss = trainer.accumulate()
    found = gradients(trainer.model)
    trainer.model.zero_grad()
    tokens, targets = training_batch(TOKENS, 16, 4, trainer.config.run.seed, 0)
    log_p = trainer.model(tokens).log_softmax(-1).gather(-1, targets[..., None])
    mean = -log_p.sum() / 64  # of 4 sequences of 16 tokens
    mean.backward()
    assert float(loss) == pytest.approx(float(mean.detach()), rel=1e-5)
    for one, other in zip(found, gradients(trainer.model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_loss_is_a_mean():
    logits = torch.zeros(2, 3, 11)
    assert float(cross_entropy(logits, torch.zeros(2, 3, dtype=torch.long))) == pytest.approx(
        np.log(11)
    )


def test_a_step_starts_from_no_gradient():
    trainer = make_trainer()
    trainer.update(trainer.accumulate())
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_what_is_no_number_moves_no_weight(loss, gradient):
    trainer = make_trainer()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    trainer.update(torch.tensor(loss))
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_an_update_clips_the_gradient_as_a_whole():
    """Two entries of 4 and 3 have norm 5; clipped to 1 they are 0.8 and 0.6, not 1 and 1."""
    trainer = make_trainer(grad_clip=1.0)
    seen = []
    trainer.optimizers = [SimpleNamespace(param_groups=[], step=lambda: seen.append(weight.grad))]
    trainer.scaler = MagicMock()
    weight = trainer.model.blocks[0].mlp.up.weight
    weight.grad = torch.zeros_like(weight)
    weight.grad[0, :2] = torch.tensor([4.0, 3.0])
    _, norm = trainer.update(torch.tensor(1.0))
    assert float(norm) == pytest.approx(5.0)
    assert seen[0][0, :2].tolist() == pytest.approx([0.8, 0.6], rel=1e-5)


def test_every_micro_batch_of_every_step_drops_its_own(monkeypatch):
    trainer = make_trainer(dropout=0.1)
    seeds = []
    real = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: (seeds.append(seed), real(seed))[1])
    for step in (0, 1):
        trainer.state.step = step
        trainer.accumulate()
    run_seed = trainer.config.run.seed
    assert seeds == [dropout_seed(run_seed, step, index) for step in (0, 1) for index in (0, 1)]
    assert len(set(seeds)) == 4


def test_the_lowest_loss_is_the_best():
    state = State()
    assert [state.record(loss) for loss in (3.0, 4.0, 2.5, 2.5)] == [True, False, True, False]
    assert state.best_val_loss == 2.5
    assert state.evaluations_since_best == 1


class NoFloat64(TorchDispatchMode):
    """Raises where a tensor of float64 is made, as Apple's GPUs do."""

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise TypeError(f"{function}: there is no float64 on MPS")
        return made


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "options",
    [
        {"bigrams": 7, "window": 4, "dropout": 0.1},
        {"positions": "sinusoidal", "attention": "explicit"},
        {"positions": "none", "window": 15, "zero_init": True},
        {**MODERN, "n_kv_head": 1},
    ],
)
def test_a_step_and_an_evaluation_need_no_float64(optimizer, options):
    """With the loss as an accelerator computes it. What draws a token from logits is in float64,
    but goes to the CPU from MPS (model.transfer.where_drawn).
    """
    trainer = make_trainer(optimizer=optimizer, **options)
    model = trainer.model
    trainer.loss_of = lambda x, y: head_loss(model.features(x), model.unembed.weight, y)
    with NoFloat64():
        trainer.update(trainer.accumulate())
        split_loss(model, TOKENS, batch_size=2)
    with NoFloat64(), pytest.raises(TypeError, match="no float64"):
        model.embed.weight.double()
