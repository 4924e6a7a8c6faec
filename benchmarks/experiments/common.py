"""What every experiment shares: a small model trained in this process, several seeds of each
variant, and a sentence that the numbers have to support.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.tables import spread
from configs import OptimConfig
from data.batches import dropout_seed, training_batch
from data.tokenizer import Tokenizer
from model.attention import Attend
from model.config import ModelConfig
from model.fast_attention import fast_attention
from model.gpt import GPT
from training.evaluate import split_loss
from training.finite import step_if_finite
from training.loss import cross_entropy
from training.optimizer import clip_gradients, learning_rate, make_optimizers

BatchOf = Callable[[int], tuple[Tensor, Tensor]]
"""Inputs and targets of a step."""
Watch = Callable[[int, GPT], None]
"""Called before the first step and after each, with the number of steps made."""
SMALL = ModelConfig(
    n_layer=2, n_head=4, d_model=64, context_length=64, positions="rotary", norm="rmsnorm"
)
"""The model that the experiments vary: 0.1 million parameters."""


@dataclass(frozen=True)
class Setting:
    """What a command was asked for."""

    tokens: dict[str, np.ndarray]
    """Ids of the corpus by split, `train` and `val`."""
    tokenizer: Tokenizer
    seeds: tuple[int, ...] = (1, 2, 3)
    steps: int = 500
    """Updates of each training."""
    batch_size: int = 8


@dataclass(frozen=True)
class Finding:
    """What an experiment found."""

    rows: list[dict]
    """The table: a row a variant, median and ends over the seeds."""
    record: Any
    """All numbers."""
    verdict: str
    """Whether the numbers support the sentence, and by how much."""
    draw: Callable[[Any], None]
    """Draws the picture on a pair of matplotlib's axes."""
    notes: str = ""
    """What the table can't hold, such as samples."""


@dataclass(frozen=True)
class Experiment:
    """A question, its sentence, and the function that answers it."""

    name: str
    about: str
    """In a line: what differs."""
    sentence: str
    """What the numbers are to support."""
    run: Callable[[Setting], Finding]
    steps: int = 500
    """Updates of each training, where the command says nothing else."""


def corpus_batch(setting: Setting, config: ModelConfig, seed: int) -> BatchOf:
    """Batches of the training split."""
    tokens = setting.tokens["train"]
    length, rows = config.context_length, setting.batch_size
    return lambda step: training_batch(tokens, length, rows, seed, step)


def train(
    config: ModelConfig,
    vocab_size: int,
    batch_of: BatchOf,
    setting: Setting,
    seed: int,
    attend: Attend = fast_attention,
    watch: Watch | None = None,
    lr: float = 3e-3,
) -> tuple[GPT, list[float]]:
    """A model trained as train.py does it, in float32 with AdamW and a rate that rises over a
    twentieth of the steps and falls to zero; and the training loss of each step, in nats.
    """
    optim = OptimConfig(
        lr=lr,
        warmup_steps=setting.steps // 20,
        max_steps=setting.steps,
        schedule="linear",
        beta2=0.99,
    )
    torch.manual_seed(seed)
    model = GPT(config, vocab_size, attend)
    optimizers = make_optimizers(model, optim)
    losses = []
    for step in range(setting.steps):
        if watch:
            watch(step, model)
        tokens, targets = batch_of(step)
        torch.manual_seed(dropout_seed(seed, step, 0))
        loss = cross_entropy(model.train()(tokens), targets)
        loss.backward()
        norm = clip_gradients(model, optim.grad_clip)
        step_if_finite(optimizers, learning_rate(step, optim), loss.detach(), norm)
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    if watch:
        watch(setting.steps, model)
    return model.eval(), losses


def held_out(model: GPT, tokens: np.ndarray, n_window: int = 400) -> float:
    """Loss on evenly spaced windows of a split the model was not trained on, nats per token."""
    return split_loss(model, tokens, 50, n_window)


def late(losses: Sequence[float]) -> float:
    """Mean training loss of the last twentieth of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // 20) :])


def is_below(lower: Sequence[float], higher: Sequence[float]) -> tuple[bool, str]:
    """Whether every seed of one variant lies below every seed of another, and words that say how
    far the medians are apart, beside the wider of the two spreads.
    """
    gap = statistics.median(higher) - statistics.median(lower)
    width = max(max(values) - min(values) for values in (lower, higher))
    return max(lower) < min(higher), f"{gap:.3f} apart, spread {width:.3f}"


def judge(findings: list[tuple[str, bool, str]]) -> str:
    """The verdict over several comparisons (what, whether it holds, by how much)."""
    holds = all(held for _, held, _ in findings)
    told = "; ".join(
        f"{what}: {'yes' if held else 'no'} ({amount})" for what, held, amount in findings
    )
    return f"{'supported' if holds else 'not supported here'}: {told}"


def bars(axis, values: dict[str, list[float]], label: str) -> None:
    """A line a variant: the median, and a bar from the least to the largest."""
    for row, numbers in enumerate(values.values()):
        axis.plot([min(numbers), max(numbers)], [row, row], color="tab:blue", linewidth=2)
        axis.plot(statistics.median(numbers), row, "o", color="tab:blue")
    axis.set_yticks(range(len(values)), list(values))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_xlabel(label)
    axis.grid(axis="x", alpha=0.3)


def curves(axis, steps: Sequence[float], values: dict[str, list[list[float]]], label: str) -> None:
    """Over `steps`, a line a variant: the median of its seeds, and a band between the ends."""
    for name, runs in values.items():
        columns = list(zip(*runs, strict=True))
        middle = [statistics.median(column) for column in columns]
        (line,) = axis.plot(steps, middle, label=name)
        low, high = ([end(column) for column in columns] for end in (min, max))
        axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axis.set_ylabel(label)
    axis.legend(frameon=False)


def loss_table(values: dict[str, list[float]], what: str = "held-out loss") -> list[dict]:
    """A row a variant."""
    return [{"variant": name, what: spread(numbers, ".3f")} for name, numbers in values.items()]
