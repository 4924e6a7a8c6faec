"""The configuration of a run: four frozen dataclasses, every field with its meaning. Nothing else
holds a default.
"""

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from errors import UserError
from model.config import ModelConfig


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class DataConfig:
    """What is read."""

    data: str = "data/prepared/shakespeare-char"
    """Folder made by `python -m data.prepare`."""


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all, or Muon for the blocks' matrices and AdamW for the rest."""
    lr: float = 6e-4
    """Learning rate at its peak."""
    min_lr: float = 0.0
    """Learning rate at max_steps (cosine and linear schedules)."""
    warmup_steps: int = 100
    """Steps over which the rate rises linearly to lr."""
    max_steps: int = 2000
    """Updates in the whole run."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after the warm-up."""
    batch_size: int = 32
    """Sequences in the global batch, of which one update is made."""
    micro_batch_size: int = 0
    """Sequences in one forward and backward pass; 0: as many as a process has of the global
    batch, on CUDA the most of them that fit.
    """
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.99
    """AdamW's decay of the mean squared gradient."""
    eps: float = 1e-8
    """What AdamW adds to the root of the mean squared gradient."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; embeddings, norms and biases are left alone."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""

    def __post_init__(self):
        _require(0 < self.lr < float("inf"), f"lr is {self.lr}; it must be above 0 and finite")
        _require(
            0 <= self.min_lr <= self.lr,
            f"min_lr is {self.min_lr}; it must lie between 0 and lr {self.lr}",
        )
        _require(self.max_steps >= 0, f"max_steps is {self.max_steps}; it must be at least 0")
        _require(
            self.warmup_steps >= 0, f"warmup_steps is {self.warmup_steps}; it must be at least 0"
        )
        _require(self.batch_size >= 1, f"batch_size is {self.batch_size}; it must be at least 1")
        _require(
            self.micro_batch_size >= 0,
            f"micro_batch_size is {self.micro_batch_size}; it must be at least 0",
        )
        for name in ("beta1", "beta2"):
            _require(
                0 <= getattr(self, name) < 1,
                f"{name} is {getattr(self, name)}; it must be at least 0 and below 1",
            )
        _require(0 < self.eps < float("inf"), f"eps is {self.eps}; it must be above 0 and finite")
        for name in ("weight_decay", "grad_clip"):
            _require(
                getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be at least 0"
            )


@dataclass(frozen=True)
class RunConfig:
    """Where and how it runs, what it records and when it ends."""

    out: str = ""
    """Run folder; empty: runs/PRESET."""
    seed: int = 1337
    """Seed of initial weights, batches and dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matrix products; weights and norms stay in float32, and so does the softmax but for fast
    attention in bfloat16 on a CPU. auto: the fastest that the hardware multiplies natively.
    """
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile. auto: on CUDA, where minutes of work are left to pay for it."""
    attention: Literal["fast", "explicit", "fused"] = "fast"
    """The equation line by line (explicit), or the same values faster and mostly in less memory;
    bfloat16 on a CPU rounds fast scores and weights. fused: the old name of fast.
    """
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Of several processes: each holds the whole model (DDP), or its share of it (FSDP2)."""
    recompute: bool = False
    """Activation checkpointing: keep a block's input alone and compute the rest again in the
    backward pass.
    """
    deterministic: bool = False
    """On CUDA, take kernels that repeat bit for bit, though slower; on CPU that is so always."""
    threads: int = 0
    """CPU threads; 0: as many as torch takes, on this machine, within a container's quota."""
    eval_every: int = 250
    """Steps between evaluations; the last step is always evaluated. 0: only the last."""
    eval_batches: int = 20
    """Batches of each split an evaluation reads, the same ones each time; 0: all of validation, a
    fifth as many of training.
    """
    save_every: int = 250
    """Steps between checkpoints; the last step is always saved. 0: only the last."""
    log_every: int = 10
    """Steps between lines of the log."""
    sample_tokens: int = 200
    """Tokens of the sample drawn at each evaluation; 0: none."""
    probe_tokens: int = 256
    """Tokens of validation text, as far as the context holds them, whose attention is kept for the
    page's slider: at step 0, 10, 20, 50, 100, 200, 500 ... and at each evaluation; 0: none.
    """
    wandb: bool = False
    """Report to Weights & Biases too; offline where there is no account (`wandb sync` sends it)."""
    resume: bool = False
    """Go on from the checkpoint in the run folder; start it if there is none."""
    init_from: str = ""
    """Run or checkpoint whose weights to start from, with a fresh optimiser."""
    stop_at: int = 0
    """End cleanly after this step, leaving the schedule alone; 0: at max_steps."""
    patience: int = 0
    """End when this many evaluations in a row have not improved on the best; 0: never."""
    max_minutes: float = 0.0
    """End cleanly after this many minutes; 0: no limit."""
    plan: bool = False
    """Train nothing: print what the run would take in memory and time."""
    overwrite: bool = False
    """Replace the run folder if it holds a run."""

    def __post_init__(self):
        if self.attention == "fused":  # runs recorded before the change of name go on as they were
            object.__setattr__(self, "attention", "fast")
        for name in (
            "threads",
            "eval_every",
            "eval_batches",
            "save_every",
            "sample_tokens",
            "probe_tokens",
            "stop_at",
            "patience",
            "max_minutes",
        ):
            _require(
                getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must be at least 0"
            )
        _require(self.log_every >= 1, f"log_every is {self.log_every}; it must be at least 1")
        _require(
            0 <= self.seed < 2**63, f"seed is {self.seed}; it must be at least 0 and below 2^63"
        )
        _require(
            not (self.resume and self.overwrite),
            "resume goes on with the run folder, overwrite replaces it: give one of them",
        )
        kind, _, index = self.device.partition(":")
        known = kind in ("auto", "cpu", "cuda", "mps") and (
            not index or (kind == "cuda" and index.isdigit())
        )
        _require(known, f"device is {self.device!r}; it must be auto, cpu, cuda, cuda:N or mps")


@dataclass(frozen=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def replace(self, **changes: Any) -> "Config":
        """The configuration with other values; a field is named without its section, as on the
        command line. Raises ValueError for a value that doesn't fit, TypeError for no such field.
        """
        sections = {}
        for section in dataclasses.fields(self):
            old = getattr(self, section.name)
            names = {f.name for f in dataclasses.fields(old)} & changes.keys()
            new = {name: changes.pop(name) for name in names}
            sections[section.name] = dataclasses.replace(old, **new)
        if changes:
            raise TypeError(f"no field of a configuration: {', '.join(changes)}")
        return Config(**sections)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain containers, for JSON and checkpoints."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(plain: dict[str, dict[str, Any]]) -> "Config":
        """The inverse of `to_dict`; a missing field takes its default. Raises UserError for a field
        or value that doesn't fit.
        """
        unknown = (
            plain.keys() - {section.name for section in dataclasses.fields(Config)}
            if isinstance(plain, dict)
            else ()
        )
        if unknown:
            raise UserError(
                f"configuration: there is no section {sorted(map(repr, unknown))[0][:60]}; "
                "there are model, data, optim and run"
            )
        sections = {}
        for section in dataclasses.fields(Config):
            kind: Any = section.default_factory
            values = plain.get(section.name, {}) if isinstance(plain, dict) else None
            _check_fields(section.name, kind, values)
            try:
                sections[section.name] = kind(**values)
            except ValueError as error:
                raise UserError(f"configuration: {error}") from None
        return Config(**sections)


def _check_fields(section: str, kind: type, values: Any) -> None:
    """Raise UserError unless `values` names fields of the dataclass `kind` with values of their
    types.
    """
    if not isinstance(values, dict):
        raise UserError(f"configuration: section {section!r} is missing or no object")
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            raise UserError(
                f"configuration: {section} has no field {name!r}; it has {', '.join(hints)}"
            )
        hint = hints[name]
        options = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
        fits = (
            value in options
            if options
            else isinstance(value, (int, float) if hint is float else hint)
        )
        if not fits or (isinstance(value, bool) and hint is not bool):
            wanted = " or ".join(map(str, options)) if options else hint.__name__
            raise UserError(f"configuration: {name} is {value!r}; it must be {wanted}")


def read_config(path: str | Path) -> Config:
    """The configuration in a run's config.json. Raises UserError where it can't be read."""
    if Path(path).suffix == ".pt":
        raise UserError(f"{path} is no configuration: give the run's folder or its config.json")
    try:
        plain = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read as a configuration: {error}") from None
    return Config.from_dict(plain)
