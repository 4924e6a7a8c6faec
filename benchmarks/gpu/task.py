"""What a section of `benchmarks.gpu` is given: the device, how large to measure, until when, and
whom to tell.

Imports no torch, so that the process that waits for the sections starts at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.config import ModelConfig

ROOT = Path(__file__).parents[2]
TINYSHAKESPEARE = ROOT / "data" / "prepared" / "tinyshakespeare-char"


class Missing(Exception):
    """A piece that isn't there; the message names it, and what would bring it."""


@dataclass(frozen=True)
class Scale:
    """How large what is measured is."""

    model: ModelConfig = ModelConfig()  # noqa: RUF009  (it is frozen)
    """Of the training sections: GPT-2 of 124M parameters."""
    vocab_size: int = 50_257
    rows: int = 16
    """Sequences in a micro-batch; fewer where memory is short."""
    n_micro: int = 4
    """Micro-batches in an update."""
    rounds: int = 8
    """Times that each program's turn comes, at most."""
    most_rows: int = 512
    """Micro-batch up to which memory is tried."""
    backend: str = "inductor"
    """Of torch.compile."""
    generators: tuple[tuple[str, ModelConfig, int], ...] = (
        ("124M", ModelConfig(), 256),
        ("1.5B", ModelConfig(n_layer=48, n_head=25, d_model=1600), 64),
    )
    """Models that sample: name, shape, tokens drawn."""
    batches: tuple[int, ...] = (1, 32)
    """Texts drawn at once."""
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Contexts of the attention section."""
    n_head: int = 12
    tests: tuple[str, ...] = ()
    """Files for pytest; none: all."""
    runs: tuple[tuple[str, ...], ...] = (("shakespeare-gpu",), ("speedrun-best",))
    """Arguments of train.py, whose time to `target` is taken."""
    target: float = 1.4697
    """Loss of nanoGPT's GPU recipe on tinyshakespeare."""
    resumed: tuple[str, ...] = (
        *("shakespeare-gpu", "--max-steps", "40", "--warmup-steps", "5", "--eval-every", "20"),
        *("--eval-batches", "2", "--save-every", "20", "--log-every", "10", "--compile", "off"),
    )
    """Arguments of train.py for the run that is interrupted in the middle."""


SHORT = ("--max-steps", "6", "--warmup-steps", "2", "--eval-every", "3", "--save-every", "3")
SMALL_RUN = (
    *("shakespeare-gpu", "--n-layer", "1", "--n-head", "2", "--d-model", "16"),
    *("--context-length", "16", "--batch-size", "4", "--eval-batches", "2", "--log-every", "1"),
    *("--sample-tokens", "8", "--probe-tokens", "8", "--compile", "off", *SHORT),
)
SMALL_MODEL = ModelConfig(n_layer=1, n_head=2, d_model=16, context_length=16)
REHEARSAL = Scale(
    model=SMALL_MODEL,
    vocab_size=101,
    rows=2,
    n_micro=2,
    rounds=1,
    most_rows=2,
    backend="eager",
    generators=(("small", SMALL_MODEL, 4),),
    batches=(2,),
    lengths=(256, 512),
    n_head=1,
    tests=("tests/test_gpu.py",),
    runs=(SMALL_RUN,),
    target=4.5,
    resumed=SMALL_RUN,
)
"""The same in seconds on a CPU: it shows that every section runs, and measures nothing."""


@dataclass(frozen=True)
class Task:
    """One section's work."""

    device: str
    scale: Scale
    deadline: float
    """On the clock of `time.monotonic`, which is the same in all processes of a machine."""
    folder: Path
    """For files that the section may leave behind."""
    data: Path = TINYSHAKESPEARE
    """Prepared characters of tinyshakespeare."""
    send: Callable[[dict[str, Any]], None] = print

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def left(self) -> float:
        """Seconds of this section's share."""
        return self.deadline - time.monotonic()

    def row(self, table: str, **cells: Any) -> None:
        """A row of a table with this title; a row whose first cell is known takes its place."""
        self.send({"table": table, "row": {name: str(cell) for name, cell in cells.items()}})

    def note(self, text: str) -> None:
        """A line below the tables."""
        self.send({"note": text})

    def figures(self, **values: Any) -> None:
        """Raw numbers, for the JSON alone."""
        self.send({"figures": values})
