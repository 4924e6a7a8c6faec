"""Give a run out as a program of PyTorch's own, which needs none of this code: torch.export of the
step that reads one token a row, with its cache.

python -m interop.program runs/shakespeare-char --out shakespeare.pt2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from data.command_line import parse_options
from errors import UserError, run_command


@dataclass(frozen=True)
class Options:
    """Give a run out as one file for torch.export.load, which needs PyTorch alone: a function of
    (tokens, positions), int64 of shape (rows,), to the logits behind them, (rows, vocabulary). It
    keeps keys and values itself; position 0 begins a new text. tokenizer.json lies in the file.
    """

    run: tyro.conf.Positional[str]
    """Run folder (its best.pt, else checkpoint.pt) or checkpoint file."""
    out: Path
    """File to write, such as model.pt2."""
    rows: int = 1
    """Texts that are continued at once."""
    overwrite: bool = False
    """Replace the file, if it is there."""

    def __post_init__(self):
        if self.rows < 1:
            raise ValueError(f"rows is {self.rows}; it must be at least 1")


def main() -> int:
    options = parse_options(
        Options, prog="python -m interop.program", config=(tyro.conf.OmitArgPrefixes,)
    )
    if options.out.is_dir():
        raise UserError(f"{options.out} is a folder, where a file should be: name one with --out")
    if options.out.exists() and not options.overwrite:
        raise UserError(f"{options.out} is there: --overwrite replaces it, --out takes another")
    from interop.tracing import write_program  # only now: torch is slow to import

    print(write_program(options.run, options.out, options.rows))
    return 0


if __name__ == "__main__":
    run_command(main)
