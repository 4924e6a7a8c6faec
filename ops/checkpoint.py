"""The state of a run as one file: whole or absent, and safe to open whoever made it."""

import contextlib
import os
import sys
import threading
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

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
from ops.distributed import gather, is_first
from ops.fitting import check_sizes, cut_positions, differing_fields, fields_text, other_meaning
from ops.integrity import ChecksumWriter, check_whole

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
    """Write to a temporary file beside `path`, with a sum of its contents, flush it to the disk,
    and rename: at any instant `path` is the old file or the new, whole.

    Raises OSError where it can't be written; the old file is then untouched and the temporary one
    gone.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            writer = ChecksumWriter(file)
            torch.save({f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}, writer)
            writer.seal()
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except RuntimeError as error:  # torch's zip writer reports a full disk so
        raise OSError(f"{path} can't be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Have a rename reach the disk too, where the system can do that: Windows has no such call, and
    some network file systems refuse it. The file itself is whole on the disk already.
    """
    with contextlib.suppress(AttributeError, OSError):
        descriptor = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
    """Read a checkpoint onto the CPU, mapped into memory, once the file is known to be whole. Its
    code is never run: `weights_only` admits tensors and plain containers alone.

    Raises UserError where the file is missing, damaged, of another program or version, or would run
    code; a whole checkpoint beside it is then named. One of an earlier version, which holds no sum
    of its contents, is said to be one.
    """
    path = Path(path)
    if not path.is_file():
        found = f": that is a folder{_way_out(path)}" if path.is_dir() else ""
        raise UserError(f"there is no checkpoint {path}{found}")
    try:
        checkpoint, is_sealed = _read(path)
    except UserError as error:
        raise UserError(f"{error}{_way_out(path)}") from None
    if not is_sealed and is_first():
        print(
            f"note: {path} is of an earlier version and holds no sum of its contents: "
            "its parts were checked one by one",
            file=sys.stderr,
        )
    return checkpoint


def _read(path: Path) -> tuple[Checkpoint, bool]:
    """A checkpoint, and whether its file holds a sum of its contents. Raises UserError."""
    try:
        is_sealed = check_whole(path)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror})") from None
    state = unpack(path)
    version = state.get("version") if isinstance(state, dict) else None
    if type(version) is not int or version != VERSION:
        found = " ".join(repr(version).split())[:40]
        raise UserError(
            f"{path} is no checkpoint of this program (version {found}, this one reads {VERSION})"
        )
    check_fields(state, path)
    return Checkpoint(**state), is_sealed


def unpack(path: Path) -> Any:
    """What torch finds in a file, mapped into memory; its code is never run. Raises UserError where
    it isn't plain.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a hostile file can raise nearly anything; torch's words help no user
        raise UserError(
            f"{path} can't be read as a checkpoint: it holds more than tensors, numbers and text, "
            "and so is of another program, or unsafe"
        ) from None


def check_fields(state: dict[Any, Any], origin: str | Path) -> None:
    """Raise UserError unless `state` has the fields of a Checkpoint, each of its type, and dense
    tensors for weights: one that says it is larger than the memory behind it is refused.
    """
    hints = get_type_hints(Checkpoint)
    if state.keys() != hints.keys():
        lacks = sorted(hints.keys() - state.keys())
        others = sorted(map(repr, state.keys() - hints.keys()))
        raise UserError(
            f"{origin} is no whole checkpoint: it lacks {lacks} and has "
            f"[{', '.join(others)[:120]}] besides"
        )
    for name, hint in hints.items():
        value = state[name]
        kind = get_origin(hint) or hint
        if not isinstance(value, kind) or isinstance(value, bool):
            found = type(value).__name__
            raise UserError(f"{origin} is no checkpoint: {name} is a {found}, not {kind.__name__}")
    if not 0 <= state["step"] < 2**63:
        raise UserError(f"{origin} is no checkpoint: step is {str(state['step'])[:40]}")
    for name, weights in state["model"].items():
        if not (isinstance(name, str) and isinstance(weights, Tensor) and _is_plain(weights)):
            raise UserError(f"{origin} is no checkpoint: {str(name)[:60]!r} holds no weights")
    if not all(type(count) is int for count in state["counters"].values()):
        raise UserError(f"{origin} is no checkpoint: its counters are no whole numbers")


def _is_plain(weights: Tensor) -> bool:
    """Whether a tensor is what it says: numbers in memory, one after the other."""
    return (
        weights.layout == torch.strided
        and weights.device.type == "cpu"
        and weights.is_floating_point()
        and weights.is_contiguous()
    )


def _way_out(path: Path) -> str:
    """What to do where `path` can't be read: the run's other checkpoint, if that is whole."""
    other = {BEST: LATEST, LATEST: BEST}.get(path.name)
    if other is None or not path.with_name(other).is_file():
        return ""
    try:
        step = _read(path.with_name(other))[0].step
    except UserError:
        return f"\n{path.with_name(other)} can't be read either: fetch them again, or train anew"
    return (
        f"\n{path.with_name(other)} is whole (step {step:,}): move {path.name} away, "
        "and the run's folder means that one"
    )


def find(run: str | Path) -> Path:
    """The checkpoint file meant by a run folder or by a file's own path.

    In a folder it is best.pt, but not while that holds the weights of step 0, which have learned
    nothing, and checkpoint.pt holds later ones; without best.pt it is checkpoint.pt.
    """
    run = Path(run)
    if run.is_dir():
        best, latest = run / BEST, run / LATEST
        if best.exists() and latest.exists() and _step(best) == 0 < _step(latest):
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


def _step(path: Path) -> int:
    """The step a checkpoint says it is of, unchecked; -1 where it can't be read."""
    try:
        return int(unpack(path)["step"])
    except (UserError, TypeError, KeyError, ValueError):
        return -1


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


def load_weights(model: GPT, checkpoint: Checkpoint, origin: str | Path) -> list[str]:
    """Copy a checkpoint's weights into a model of the same shape, or of a shorter context. Returns
    a line for what is not as it was there.

    Raises UserError, naming the fields that differ, where it is another.
    """
    theirs = Config.from_dict(checkpoint.config).model
    weights, theirs, notes = cut_positions(checkpoint.model, theirs, model.config)
    found = weights.get("embed.weight")
    n_row = len(found) if found is not None and found.ndim else 0
    differing = differing_fields(theirs, model.config, (n_row, model.vocab_size))
    reason = fields_text(differing)
    if not differing:
        try:
            check_sizes(model.config, model.vocab_size, weights)
            model.load_state_dict(weights)
            return notes + other_meaning(theirs, model.config, origin)
        except ValueError as error:
            reason = str(error)
    raise UserError(f"the weights in {origin} don't fit this model: {reason}")


def open_run(
    run: str | Path, device: str = "cpu", attend: Attend = fast_attention
) -> tuple[GPT, Tokenizer, Checkpoint]:
    """The model (float32, in eval mode), tokenizer and checkpoint of a run folder or checkpoint
    file. Raises UserError.
    """
    path = find(run)
    checkpoint = load(path)
    try:
        tokenizer = load_tokenizer(checkpoint.tokenizer)
        config = Config.from_dict(checkpoint.config).model
    except UserError as error:
        found = str(error).removesuffix(": prepare the corpus again")
        raise UserError(f"{path} is no whole checkpoint: {found}") from None
    try:
        check_sizes(config, tokenizer.vocab_size, checkpoint.model)
    except ValueError as error:
        raise UserError(f"{path} doesn't fit together: {error}") from None
    tokenizer.start = recorded_start(checkpoint, tokenizer)
    model = GPT(config, tokenizer.vocab_size, attend)
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
