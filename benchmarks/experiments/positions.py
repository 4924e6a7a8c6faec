"""No positions against three ways to tell them."""

from dataclasses import replace

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
    loss_table,
    train,
)


def run(setting: Setting) -> Finding:
    """Held-out loss of models that differ in their positions alone."""
    values: dict[str, list[float]] = {}
    for kind in ("none", "sinusoidal", "learned", "rotary"):
        config = replace(SMALL, positions=kind)
        values[kind] = []
        for seed in setting.seeds:
            batch_of = corpus_batch(setting, config, seed)
            model, _ = train(config, setting.tokenizer.vocab_size, batch_of, setting, seed)
            values[kind].append(held_out(model, setting.tokens["val"]))
    told = [
        (f"{kind} below none", *is_below(values[kind], values["none"]))
        for kind in ("sinusoidal", "learned", "rotary")
    ]
    return Finding(
        loss_table(values),
        values,
        judge(told),
        lambda axes: bars(axes, values, "held-out loss, nats per character"),
    )


EXPERIMENT = Experiment(
    "positions",
    "no positions, sinusoidal, learned, rotary",
    "Without positions the loss is higher than with any of the three ways to tell them.",
    run,
    steps=800,
)
