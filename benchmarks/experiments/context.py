"""Longer contexts, at equally many tokens a step."""

from dataclasses import replace
from itertools import pairwise
from statistics import median

from benchmarks.experiments.common import (
    SMALL,
    Experiment,
    Finding,
    Setting,
    corpus_batch,
    curves,
    held_out,
    is_below,
    judge,
    loss_table,
    train,
)

LENGTHS = (4, 8, 16, 32, 64)
GAINS = 32
"""The context up to which so short a training is claimed to gain."""


def run(setting: Setting) -> Finding:
    """Held-out loss over the number of tokens that the model may look back on."""
    n_token = setting.batch_size * SMALL.context_length
    found: dict[str, list[float]] = {}
    for length in LENGTHS:
        config = replace(SMALL, context_length=length)
        sized = replace(setting, batch_size=max(1, n_token // length))
        found[str(length)] = []
        for seed in setting.seeds:
            batch_of = corpus_batch(sized, config, seed)
            model, _ = train(config, setting.tokenizer.vocab_size, batch_of, sized, seed)
            n_window = 400 * SMALL.context_length // length
            found[str(length)].append(held_out(model, setting.tokens["val"], n_window))
    told = [
        (f"{longer} below {shorter}", *is_below(found[longer], found[shorter]))
        for shorter, longer in pairwise(found)
        if int(longer) <= GAINS
    ]
    gains = [median(found[a]) - median(found[b]) for a, b in pairwise(found)]
    falling = all(later < earlier for earlier, later in pairwise(gains))
    told.append(("each by less", falling, ", ".join(f"{gain:.3f}" for gain in gains)))

    def draw(axes) -> None:
        by_seed = [list(column) for column in zip(*found.values(), strict=True)]
        curves(axes, LENGTHS, {"held-out": by_seed}, "loss, nats per character")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("context, tokens")

    return Finding(loss_table(found), found, judge(told), draw)


EXPERIMENT = Experiment(
    "context",
    "contexts from 4 to 64 tokens, equally many tokens a step",
    "Up to 32 tokens each doubling of the context lowers the loss, each by less than the one "
    "before.",
    run,
)
