"""One layer against two where a text repeats itself (Olsson et al. 2022, "In-context Learning and
Induction Heads").

A text is 8 to 16 random tokens, again and again up to 32. The first time they can't be guessed.
Then a head can that looks at what came after the last time this token stood there, and for that it
has to find the token that *follows* an equal one: an earlier layer must have told each token what
stands before it. As each text has a period of its own, distance alone doesn't help.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.experiments.common import (
    SMALL,
    Experiment,
    Finding,
    Setting,
    curves,
    is_below,
    judge,
    train,
)
from benchmarks.tables import spread
from model.gpt import GPT
from training.loss import cross_entropy

N_ID = 32
LENGTH = 32
LEARNED = 1.0
"""Nats below which what comes again counts as copied; guessing costs ln 32 = 3.47."""


def repeated(n_text: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Texts (n_text, LENGTH + 1) of random tokens that come again and again, and their periods."""
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = torch.randint(N_ID, (n_text, LENGTH // 2), generator=random)
    periods = torch.randint(LENGTH // 4, LENGTH // 2 + 1, (n_text, 1), generator=random)
    return tokens.gather(1, torch.arange(LENGTH + 1) % periods), periods


@torch.no_grad()
def losses_of(model: GPT) -> tuple[float, float]:
    """Loss of tokens that come for the first time, and again, on texts never trained on, nats."""
    texts, periods = repeated(256, seed=0, step=0)
    logits, targets = model.eval()(texts[:, :-1]), texts[:, 1:]
    again = torch.arange(1, LENGTH + 1) > periods  # the first of them could not be told from others
    first = torch.arange(1, LENGTH + 1) < periods
    found = [
        cross_entropy(logits[part][None], targets[part][None]).item() for part in (first, again)
    ]
    return found[0], found[1]


def run(setting: Setting) -> Finding:
    """Loss of the repetition over training, of one layer and of two."""
    every = max(1, setting.steps // 30)
    small = replace(SMALL, context_length=LENGTH)
    variants = {"1 layer": replace(small, n_layer=1), "2 layers": small}
    found: dict[str, dict[str, list]] = {}
    for name, config in variants.items():
        each: dict[str, list] = {"first": [], "second": [], "curves": []}
        for seed in setting.seeds:
            curve: list[float] = []

            def watch(step: int, model: GPT, curve: list[float] = curve) -> None:
                if step % every == 0:
                    curve.append(losses_of(model)[1])

            def batch_of(step: int, seed: int = seed) -> tuple[Tensor, Tensor]:
                texts, _ = repeated(4 * setting.batch_size, seed, step)
                return texts[:, :-1], texts[:, 1:]

            model, _ = train(config, N_ID, batch_of, setting, seed, watch=watch)
            first, second = losses_of(model)
            each["first"].append(first)
            each["second"].append(second)
            each["curves"].append(curve)
        found[name] = each
    one, two = found.values()
    verdict = judge(
        [
            ("two layers copy", max(two["second"]) < LEARNED, f"{max(two['second']):.3f} at most"),
            ("one does not", min(one["second"]) > LEARNED, f"{min(one['second']):.3f} at least"),
            ("two below one", *is_below(two["second"], one["second"])),
        ]
    )
    rows = [
        {
            "variant": name,
            "first time": spread(each["first"], ".3f"),
            "second time": spread(each["second"], ".3f"),
        }
        for name, each in found.items()
    ]

    def draw(axes) -> None:
        steps = [every * i for i in range(len(one["curves"][0]))]
        losses = {name: each["curves"] for name, each in found.items()}
        curves(axes, steps, losses, "loss of what comes again")
        axes.axhline(math.log(N_ID), color="0.6", linewidth=0.8, linestyle=":")
        axes.set_xlabel("step")

    return Finding(
        rows, found, verdict, draw, f"guessing blindly: ln {N_ID} = {math.log(N_ID):.3f}"
    )


EXPERIMENT = Experiment(
    "induction",
    "random tokens again and again, one layer against two",
    "Two layers learn to copy what came before; one layer can't.",
    run,
    steps=1000,
)
