"""What each idea buys: from GPT-2 to speedrun-cpu, one idea at a time, equal training time, three
seeds.

    python -m benchmarks.ideas             # 20 s a run, three seeds: about 20 minutes on two cores
    python -m benchmarks.ideas --seconds 60

Each row adds its idea to all those above it. A few timed steps say how many fit into the time, and
the run is train.py's own with so many; the loss is the whole-split loss. Needs tinyshakespeare:
python -m data.prepare tinyshakespeare
"""

import statistics
import sys
from pathlib import Path

from benchmarks.machine import (
    RESULTS,
    TINYSHAKESPEARE,
    cpu_precisions,
    parser,
    publish,
    run_training,
    spread,
)
from viz.figures import make_figure

START = (
    "nanogpt-cpu",
    "--eval-every",
    0,
    "--eval-batches",
    0,
    "--save-every",
    0,
    "--sample-tokens",
    0,
    "--probe-tokens",
    0,
)
IDEAS: list[tuple[str, tuple]] = [
    ("GPT-2: nanoGPT's CPU recipe", ()),
    ("schedule: linear, down to zero", ("--schedule", "linear", "--min-lr", 0)),
    ("rate: 3e-3, beta2 0.95", ("--lr", 3e-3, "--beta2", 0.95)),
    ("rotary positions", ("--positions", "rotary")),
    ("RMSNorm", ("--norm", "rmsnorm")),
    ("QK-norm", ("--qk-norm",)),
    ("squared ReLU", ("--mlp", "relu2")),
    ("untied head", ("--no-tie-embeddings",)),
    ("zero-init of what writes to the stream", ("--zero-init",)),
    ("Muon, rate 1e-2, no clipping", ("--optimizer", "muon", "--lr", 1e-2, "--grad-clip", 0)),
    ("context 160, batch 8", ("--context-length", 160, "--batch-size", 8)),
    ("2 layers in place of 4", ("--n-layer", 2)),
    (
        "width 64 in place of 128, 2 heads, beta2 0.99",
        ("--d-model", 64, "--n-head", 2, "--beta2", 0.99),
    ),
    ("a vector for each pair of tokens", ("--bigrams", 65**2)),
]


def recipes() -> list[tuple[str, tuple]]:
    """Names, and the arguments of train.py that hold for each: its own behind all those before
    it.
    """
    ideas = [
        *IDEAS,
        *((f"{p} products", ("--precision", p)) for p in cpu_precisions() if p != "float32"),
    ]
    return [
        (name, sum((own for _, own in ideas[: index + 1]), START))
        for index, (name, _) in enumerate(ideas)
    ]


def seconds_per_step(arguments: tuple) -> float:
    """Median over the steps of a short run, the first ten left out."""
    log = run_training(*arguments, "--stop-at", 40, "--log-every", 1, "--eval-batches", 1)["log"]
    parts = ("data", "forward", "backward", "optimizer")
    return statistics.median(
        [sum(r["seconds"][part] for part in parts) for r in log if r["kind"] == "train"][10:]
    )


def main() -> None:
    command = parser(__doc__, "ideas")
    command.add_argument(
        "--seconds", type=float, default=20.0, help="of training, each run (default: %(default)s)"
    )
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--data", type=Path, default=TINYSHAKESPEARE)
    command.add_argument("--plot", type=Path, default=RESULTS / "ideas.png")
    arguments = command.parse_args()
    rows, record, before = [], [], None
    for name, recipe in recipes():
        recipe = (*recipe, "--data", arguments.data)
        n_step = max(20, round(arguments.seconds / seconds_per_step(recipe)))
        length = ("--max-steps", n_step, "--warmup-steps", n_step // 20)
        runs = [
            run_training(*recipe, *length, "--seed", 1337 + seed) for seed in range(arguments.seeds)
        ]
        losses = [run["val_loss"] for run in runs]
        middle = statistics.median(losses)
        change = "" if before is None else f"{middle - before:+.3f}"
        rows.append(
            {
                "one idea more": name,
                "steps": f"{n_step:,}",
                "loss": spread(losses, ".3f"),
                "change": change,
            }
        )
        record.append(
            {"idea": name, "arguments": list(map(str, recipe)), "steps": n_step, "losses": losses}
        )
        print(rows[-1], file=sys.stderr)
        before = middle
    publish(
        arguments.out,
        {f"What each idea buys in {arguments.seconds:.0f} s of training": rows},
        record,
    )
    plot(record, arguments.plot, arguments.seconds)


def plot(record: list[dict], out: Path, seconds: float) -> None:
    """A line an idea: the median loss, and a bar from the least to the largest."""
    figure, ((axes,),) = make_figure(7, 0.6 + 0.32 * len(record))
    for row, entry in enumerate(record):
        axes.plot(
            [min(entry["losses"]), max(entry["losses"])], [row, row], color="tab:blue", linewidth=2
        )
        axes.plot(statistics.median(entry["losses"]), row, "o", color="tab:blue")
    axes.set_yticks(
        range(len(record)), ["+ " * (row > 0) + entry["idea"] for row, entry in enumerate(record)]
    )
    axes.invert_yaxis()
    axes.set_xlabel(f"whole-split loss after {seconds:.0f} s of training")
    axes.grid(axis="x", alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
