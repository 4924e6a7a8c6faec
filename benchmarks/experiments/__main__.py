"""What each part of a GPT is good for: small trainings that differ in one thing, several seeds, and
a sentence that the numbers support or don't.

    python -m benchmarks.experiments              # list them
    python -m benchmarks.experiments heads        # one of them: under three minutes on two cores

Needs a prepared corpus of characters: python -m data.prepare
"""

import sys
from pathlib import Path

from benchmarks.experiments import context, heads, induction, mask, overfit, positions, scale
from benchmarks.experiments.common import Setting
from benchmarks.machine import RESULTS, ROOT, parser, publish
from data.dataset import Dataset
from data.tokenizer import load_tokenizer
from errors import UserError, run_command
from viz.figures import make_figure, save_figure

MODULES = (heads, positions, mask, scale, overfit, context, induction)
EXPERIMENTS = {module.EXPERIMENT.name: module.EXPERIMENT for module in MODULES}
PLAYS = ROOT / "data" / "prepared" / "shakespeare-char"
"""What `python -m data.prepare` makes."""


def listing() -> str:
    """A line an experiment."""
    lines = [f"  {name:10} {each.about}" for name, each in EXPERIMENTS.items()]
    return "\n".join(["python -m benchmarks.experiments NAME", *lines])


def open_corpus(folder: Path) -> tuple[dict, object]:
    """Token ids by split, and the tokenizer. UserError where nothing is prepared."""
    if not (folder / "dataset.json").exists():
        raise UserError(f"{folder} holds no prepared corpus: python -m data.prepare makes it")
    dataset = Dataset(folder)
    return dataset.tokens, load_tokenizer(dataset.tokenizer_spec)


def main() -> int:
    import torch

    command = parser(__doc__, "experiment")
    command.add_argument("name", nargs="?", choices=list(EXPERIMENTS))
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--steps", type=int, help="of each training; default: the experiment's")
    command.add_argument("--data", type=Path, default=PLAYS)
    command.add_argument("--plot", type=Path, help="FILE.svg or FILE.png; default: beside --out")
    arguments = command.parse_args()
    if not arguments.name:
        print(listing())
        return 0
    experiment = EXPERIMENTS[arguments.name]
    if arguments.out == RESULTS / "experiment":
        arguments.out = RESULTS / f"experiment-{experiment.name}"
    torch.set_num_threads(1)  # products this small gain nothing from a second
    seeds = tuple(range(1, arguments.seeds + 1))
    setting = Setting(*open_corpus(arguments.data), seeds, arguments.steps or experiment.steps)
    print(f"{experiment.about}; {len(seeds)} seeds, {setting.steps} steps each", file=sys.stderr)
    finding = experiment.run(setting)
    told = [finding.notes, f"claim: {experiment.sentence}", finding.verdict]
    notes = "\n".join(line for line in told if line)
    publish(arguments.out, {experiment.about: finding.rows}, finding.record, notes)
    picture = arguments.plot or arguments.out.with_suffix(".svg")
    figure, ((axes,),) = make_figure(6.5, 2.8)
    finding.draw(axes)
    save_figure(figure, picture)
    print(f"drawn: {picture}")
    return 0


if __name__ == "__main__":
    run_command(main)
