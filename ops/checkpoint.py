"""The state of a run as one file: whole or absent, and safe to open whoever made it."""

import os
import threading
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from configs import Config
from data.dataset import Dataset
from data.tokenizer import Tokenizer, load_tokenizer
from errors import MachineError, UserError
from model.attention import Attend
from model.fast_attention import fast_attention
from model.gpt import GPT
from ops.distributed import gather

VERSION = 1
LATEST, BEST = "checkpoint.pt", "best.pt"


@dataclass
class Checkpoint:
    """Everything that `resume` and sampling need; sampling needs no other file. Plain containers
    and tensors throughout.
    """

    step: int
    """Updates made."""
    model: dict[str, Tensor]
    """State of the eager, unwrapped model."""
    config: dict[str, Any]
    """`Config.to_dict()`, device and precision resolved."""
    tokenizer: dict[str, Any]
    """The tokenizer's spec, whole."""
    dataset: str
    """Fingerprint of the data."""
    optimizer: list[dict[str, Any]] = field(default_factory=list)
    """State of each optimiser."""
    best_val_loss: float = float("inf")
    """Lowest validation loss of the run so far."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """State of float16's gradient scaler."""
    counters: dict[str, int] = field(default_factory=dict)
    """Whatever else the loop remembers: evaluations since the best one, and the id that a text
    without a prompt starts from.
    """
    version: int = VERSION


def snapshot(
    model: GPT, optimizers: list[Optimizer], scaler: torch.amp.GradScaler, keep: bool
) -> dict[str, Any]:
    """The `model`, `optimizer` and `scaler` of a Checkpoint, copied so that training can go on.

    All processes take part; those with `keep` False get no tensors.
    """
    weights = model.state_dict()
    tied = weights.pop("unembed.weight") if model.config.tie_embeddings else None
    weights = gather(weights, keep)
    if tied is not None:
        weights["unembed.weight"] = weights["embed.weight"]  # one tensor, in memory and on disk
    moments = [gather(optimizer.state_dict(), keep) for optimizer in optimizers]
    return {"model": weights, "optimizer": moments, "scaler": scaler.state_dict()}


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write to a temporary file beside `path`, flush it to the disk, and rename: at any instant
    `path` is the old file or the new, whole.

    Raises OSError where it can't be written; the old file is then untouched and the temporary one
    gone.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except RuntimeError as error:  # torch's zip writer reports a full disk so
        raise OSError(f"{path} can't be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(
        os, "O_DIRECTORY"
    ):  # the rename itself reaches the disk too (there is no such call on Windows)
        folder = os.open(path.parent, os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)


class Saver:
    """Writes checkpoints in a thread, one at a time, so that training waits for no disk.

    What is handed over must be a copy that nobody changes (`distributed.gather` makes one). Raises
    MachineError, at the next call, where a file couldn't be written: the old one is as it was.
    """

    def __init__(self):
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def save(self, checkpoint: Checkpoint, *paths: Path) -> None:
        """Write to each path, in order, once the writing before is done."""
        self.wait()
        self.thread = threading.Thread(
            target=self._write, args=(checkpoint, paths), name="checkpoint"
        )  # no daemon: exit waits for it
        self.thread.start()

    def _write(self, checkpoint: Checkpoint, paths: tuple[Path, ...]) -> None:
        try:
            for path in paths:
                save(checkpoint, path)
        except Exception as error:
            self.error = error

    def check(self) -> None:
        """Raise MachineError if a save has failed."""
        if self.error:
            raise MachineError(
                f"a checkpoint could not be saved ({self.error}); "
                "the one before it is whole. Free some space and --resume"
            )

    def wait(self) -> None:
        """Wait for the writing in hand."""
        if self.thread:
            self.thread.join()
        self.check()


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint onto the CPU. Its code is never run: `weights_only` admits tensors and
    plain containers alone.

    Raises UserError where the file is missing, truncated, of another program or version, or would
    run code.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged or hostile file can raise nearly anything
        reason = (
            str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        )
        raise UserError(
            f"{path} can't be read as a checkpoint: "
            f"it is truncated, of another program, or unsafe ({reason})"
        ) from None
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise UserError(
            f"{path} is no checkpoint of this program (version {version!r}, this one reads "
            f"{VERSION})"
        )
    wanted = {f.name for f in fields(Checkpoint)}
    if state.keys() != wanted:
        raise UserError(
            f"{path} is no whole checkpoint: it lacks {sorted(wanted - state.keys())} and has "
            f"{sorted(state.keys() - wanted)}"
        )
    return Checkpoint(**state)


def find(run: str | Path) -> Path:
    """The checkpoint file meant by a run folder or by a file's own path.

    In a folder it is best.pt, but not while that holds the weights of step 0, which have learned
    nothing, and checkpoint.pt holds later ones; without best.pt it is checkpoint.pt.
    """
    run = Path(run)
    if run.is_dir():
        best, latest = run / BEST, run / LATEST
        if best.exists() and latest.exists() and load(best).step == 0 < load(latest).step:
            return latest
        for path in (best, latest):
            if path.exists():
                return path
        raise UserError(
            f"{run} holds neither {BEST} nor {LATEST}: give a folder that train.py has written"
        )
    if not run.exists():
        where = "" if run.is_absolute() else f" in {Path.cwd()}"
        raise UserError(f"there is no run {run}{where}: train one with `python train.py PRESET`")
    return run


def what_is_read(run: str | Path, checkpoint: Checkpoint) -> str:
    """A line that names the file, step and loss of what `open_run` has opened."""
    path, loss = find(run), checkpoint.best_val_loss
    if loss == float("inf"):
        known = "not evaluated yet"
    elif path.name == LATEST:
        known = f"best validation loss so far {loss:.4f}"
    else:
        known = f"validation loss {loss:.4f}"
    return f"reading {path}: step {checkpoint.step:,}, {known}"


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint, origin: str | Path) -> None:
    """Copy a checkpoint's weights into a model of the same shape.

    Raises UserError, with the first difference, where it is another.
    """
    try:
        model.load_state_dict(checkpoint.model)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[1 if isinstance(error, RuntimeError) else 0].strip()[:200]
        raise UserError(f"the weights in {origin} don't fit this model: {reason}") from None


def open_run(
    run: str | Path, device: str = "cpu", attend: Attend = fast_attention
) -> tuple[GPT, Tokenizer, Checkpoint]:
    """The model (float32, in eval mode), tokenizer and checkpoint of a run folder or checkpoint
    file. Raises UserError.
    """
    path = find(run)
    checkpoint = load(path)
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    tokenizer.start = recorded_start(checkpoint, tokenizer)
    model = GPT(Config.from_dict(checkpoint.config).model, tokenizer.vocab_size, attend)
    load_weights(model, checkpoint, path)
    check_finite(model, path)
    return model.to(device).eval(), tokenizer, checkpoint


OTHER = "training has diverged here; take an earlier one, or train again with a lower --lr"
"""What to do where a checkpoint's weights make no sense."""


def check_finite(model: torch.nn.Module, origin: str | Path) -> None:
    """Raise UserError where a weight is NaN or infinite. Not every kernel passes a NaN on, so the
    logits alone don't tell.
    """
    for name, weights in model.named_parameters():
        if n_bad := int((~weights.isfinite()).sum()):
            raise UserError(
                f"{origin} can't be used: {n_bad:,} of the {weights.numel():,} numbers in {name} "
                f"are NaN or infinite: {OTHER}"
            )


def recorded_start(checkpoint: Checkpoint, tokenizer: Tokenizer) -> int | None:
    """The id that a text without a prompt starts from, as training has seen it. A checkpoint of an
    earlier version doesn't say: it is found in the run's data, where that is still there; else it
    is None.
    """
    start = checkpoint.counters.get("start")
    if isinstance(start, int) and 0 <= start < tokenizer.vocab_size:
        return start
    try:
        dataset = Dataset(checkpoint.config["data"]["data"])
        if dataset.fingerprint == checkpoint.dataset:
            return dataset.start(tokenizer)
    except (UserError, OSError, KeyError, TypeError, ValueError):
        pass  # no data, or other data: nothing is known
    return None
