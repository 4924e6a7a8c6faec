"""One head against four at equal parameters."""

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
    """Held-out loss of one, two, four and eight heads that share one width."""
    values: dict[str, list[float]] = {}
    for n_head in (1, 2, 4, 8):
        config = replace(SMALL, n_head=n_head)
        name = f"{n_head} of {config.d_head}"
        values[name] = []
        for seed in setting.seeds:
            batch_of = corpus_batch(setting, config, seed)
            model, _ = train(config, setting.tokenizer.vocab_size, batch_of, setting, seed)
            values[name].append(held_out(model, setting.tokens["val"]))
    one, _, four, _ = values.values()
    verdict = judge([("four heads below one", *is_below(four, one))])
    return Finding(
        loss_table(values),
        values,
        verdict,
        lambda axes: bars(axes, values, "held-out loss, nats per character"),
    )


EXPERIMENT = Experiment(
    "heads",
    "one head, two, four or eight that share the same width",
    "Four heads reach a lower loss than one head of the same total width, at the same number of "
    "parameters and products.",
    run,
)
