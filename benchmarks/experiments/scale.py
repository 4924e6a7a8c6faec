"""The division by sqrt(d_head) left out, in one wide head."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.experiments.common import (
    SMALL,
    Experiment,
    Finding,
    Setting,
    bars,
    corpus_batch,
    held_out,
    is_below,
    judge,
    train,
)
from benchmarks.tables import spread
from model.attention import Mask, attention_weights
from model.fast_attention import fast_attention
from model.gpt import GPT

WIDE = replace(SMALL, n_head=1, d_model=128, qk_norm=True)
"""One head of 128. QK-norm gives queries and keys entries of variance 1, as the argument for the
root supposes; GPT-2's small first weights would hide it for a while.
"""


def unscaled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
    """softmax(Q K^T) V."""
    return fast_attention(q * math.sqrt(q.shape[-1]), k, v, mask, dropout)


class Witness:
    """Attention as `attend`, which remembers the mean of the largest weight in rows of many keys,
    of its first call alone.
    """

    def __init__(self, attend, factor: float):
        self.attend = attend
        self.factor = factor
        self.largest: float | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
        if self.largest is None:
            with torch.no_grad():
                weights = attention_weights(q * self.factor, k, mask)
                self.largest = weights[:, :, q.shape[2] // 2 :].amax(dim=-1).mean().item()
        return self.attend(q, k, v, mask, dropout)


def query_gradient(seen: list[float]):
    """A watcher that keeps the gradient's norm of the first layer's queries, before they move."""

    def watch(step: int, model: GPT) -> None:
        if step == 0:
            model.blocks[0].attention.query.weight.register_hook(
                lambda gradient: seen.append(gradient.norm().item()) if not seen else None
            )

    return watch


def run(setting: Setting) -> Finding:
    """Held-out loss, and at the start the largest weight and the queries' gradient."""
    ways = {"with 1/sqrt(d)": (fast_attention, 1.0), "without": (unscaled, math.sqrt(WIDE.d_head))}
    found: dict[str, dict[str, list]] = {}
    for name, (attend, factor) in ways.items():
        each: dict[str, list] = {"loss": [], "largest": [], "gradient": []}
        for seed in setting.seeds:
            witness = Witness(attend, factor)
            batch_of = corpus_batch(setting, WIDE, seed)
            seen: list[float] = []
            model, _ = train(
                WIDE,
                setting.tokenizer.vocab_size,
                batch_of,
                setting,
                seed,
                witness,
                query_gradient(seen),
            )
            each["loss"].append(held_out(model, setting.tokens["val"]))
            each["largest"].append(witness.largest)
            each["gradient"] += seen
        found[name] = each
    scaled, not_scaled = found.values()
    verdict = judge(
        [
            ("loss lower with the root", *is_below(scaled["loss"], not_scaled["loss"])),
            ("weights flatter at first", *is_below(scaled["largest"], not_scaled["largest"])),
        ]
    )
    rows = [
        {
            "variant": name,
            "held-out loss": spread(each["loss"], ".3f"),
            "largest weight at the start": spread(each["largest"], ".2f"),
            "norm of the queries' gradient at the start": spread(each["gradient"], ".3f"),
        }
        for name, each in found.items()
    ]
    losses = {name: each["loss"] for name, each in found.items()}
    return Finding(
        rows,
        found,
        verdict,
        lambda axes: bars(axes, losses, "held-out loss, nats per character"),
    )


EXPERIMENT = Experiment(
    "scale",
    "scores not divided by sqrt(d_head), in one head of 128",
    "Without the division a wide head's weights are saturated from the start, and it learns worse.",
    run,
)
