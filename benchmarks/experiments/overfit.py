"""A page learned by heart, and what dropout does about it."""

from dataclasses import replace

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
    late,
    train,
)
from benchmarks.tables import spread

PAGE = 4000
"""Characters of the page."""
SHARES = (0.0, 0.2, 0.4)


def run(setting: Setting) -> Finding:
    """Loss on the page and on unread text over training, for three shares of dropout."""
    page = replace(setting, tokens={**setting.tokens, "train": setting.tokens["train"][:PAGE]})
    every = max(1, setting.steps // 20)
    found: dict[str, dict[str, list]] = {}
    for share in SHARES:
        config = replace(SMALL, dropout=share)
        each: dict[str, list] = {"page": [], "curves": [], "best": [], "last": []}
        for seed in setting.seeds:
            curve: list[float] = []

            def watch(step: int, model, curve: list[float] = curve) -> None:
                if step % every == 0:
                    curve.append(held_out(model, setting.tokens["val"], 100))

            batch_of = corpus_batch(page, config, seed)
            vocab_size = setting.tokenizer.vocab_size
            _, losses = train(config, vocab_size, batch_of, page, seed, watch=watch)
            each["page"].append(late(losses))
            each["curves"].append(curve)
            each["best"].append(min(curve))
            each["last"].append(curve[-1])
        found[f"dropout {share}"] = each
    without = next(iter(found.values()))
    told = [("without dropout unread text gets worse", *is_below(without["best"], without["last"]))]
    for name, each in list(found.items())[1:]:
        told.append((f"{name} ends lower", *is_below(each["last"], without["last"])))
    verdict = judge(told)
    rows = [
        {
            "variant": name,
            "loss on the page, with dropout": spread(each["page"], ".3f"),
            "best on unread text": spread(each["best"], ".3f"),
            "at the end": spread(each["last"], ".3f"),
        }
        for name, each in found.items()
    ]

    def draw(axes) -> None:
        steps = [every * i for i in range(len(without["curves"][0]))]
        curves(axes, steps, {n: each["curves"] for n, each in found.items()}, "loss, unread text")
        axes.set_xlabel("step")

    return Finding(rows, found, verdict, draw)


EXPERIMENT = Experiment(
    "overfit",
    "a single page, with dropout 0, 0.2 and 0.4",
    "On a single page the loss of unread text falls, then rises while the page is learned by "
    "heart; dropout keeps it from rising.",
    run,
)
