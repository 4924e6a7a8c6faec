"""What a run tells: JSON Lines always, one progress line, Weights & Biases when asked, a loss curve
at the end.
"""

import contextlib
import json
import logging
import math
import os
import secrets
import shlex
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

import machine
from configs import Config

PHASES = ("data", "forward", "backward", "optimizer", "evaluate", "save")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log.jsonl; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def sample_entry(step: int, text: str) -> str:
    """A sample as it stands in samples.txt."""
    return f"--- step {step} ---\n{text}\n\n"


def cut_log(path: Path, step: int | None) -> None:
    """Keep the records up to `step` (None: none), so that a resumed run writes what an undisturbed
    one would have; the extra evaluation of a stop goes.
    """
    kept = [
        json.dumps(record, ensure_ascii=False) + "\n"
        for record in read_log(path)
        if step is not None and record["step"] <= step and not record.get("extra")
    ]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
    samples = [
        sample_entry(r["step"], r["text"]) for r in map(json.loads, kept) if r["kind"] == "sample"
    ]
    (path.parent / "samples.txt").write_text("".join(samples), encoding="utf-8")


class RunLog:
    """Writes records to `folder`/log.jsonl as they come, moves the progress line, and passes
    numbers on to wandb.

    In a process that isn't the main one it does nothing. Times are in seconds, memory in MiB.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        start: int,
        flops_per_token: float,
        peak_flops: float,
        is_main: bool = True,
        device: str = "cpu",
        makers_flops: float = 0.0,
    ):
        self.device, self.makers_flops = device, makers_flops
        self.folder, self.is_main = folder, is_main
        self.tokens_per_step = config.optim.batch_size * config.model.context_length
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self.clock, self.logged = time.perf_counter(), start
        path = folder / "log.jsonl" if is_main else os.devnull
        self.file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed by close)
        self.bar = tqdm(
            total=config.optim.max_steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=not is_main,
        )
        if is_main and not self.bar.fp.isatty():
            self.bar.mininterval = 15.0  # a log file wants a line now and then
        self.wandb = start_wandb(folder, config, self.say) if config.run.wandb and is_main else None

    def say(self, text: str) -> None:
        """Print a line without breaking the progress line."""
        if self.is_main:
            self.bar.write(text)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one record. A NaN or infinity is written as JSON's null."""
        values = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        self.file.write(
            json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n"
        )
        if self.wandb and kind != "sample":
            try:
                self.wandb.log(
                    {f"{kind}/{name}": value for name, value in values.items()}, step=step
                )
            except Exception as error:  # a tracker that fails must not end a run
                self.say(f"warning: wandb is off from step {step} ({type(error).__name__})")
                self.wandb = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done inside as `name`, one of PHASES. (On CUDA, forward and backward are the
        time to queue them.)
        """
        began = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - began

    def train(self, step: int, loss: float, lr: float, grad_norm: float) -> None:
        """Record the update that made `step`: loss (nats per token), rate, gradient norm before
        clipping; move the progress line.

        Tokens per second do not count the time spent evaluating and saving. `mfu` is the model
        FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B) against the rate of this
        machine's own matrix product, `mfu_maker` against its maker's figure, where that is known.
        """
        now = time.perf_counter()
        training = now - self.clock - self.seconds["evaluate"] - self.seconds["save"]
        speed = (step - self.logged) * self.tokens_per_step / max(training, 1e-9)
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        numbers = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_second": round(speed),
        }
        numbers |= {
            "mfu": round(speed * self.flops_per_token / self.peak_flops, 4),
            "memory": peak_memory(self.device),
        }
        if self.makers_flops:
            numbers["mfu_maker"] = round(speed * self.flops_per_token / self.makers_flops, 4)
        self.write("train", step, **numbers, seconds=seconds)
        self.clock, self.logged, self.seconds = now, step, dict.fromkeys(PHASES, 0.0)
        if self.is_main:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            self.bar.update(step - self.bar.n)

    def evaluation(
        self,
        step: int,
        losses: dict[str, float],
        sample: str,
        is_best: bool,
        is_extra: bool = False,
    ) -> None:
        """Record and print an evaluation; the sample goes to the log and to samples.txt.

        One that `is_extra`, made because the run stops, is forgotten when the run goes on.
        """
        extra = {"extra": True} if is_extra else {}
        self.write("eval", step, **losses, **extra)
        self.say(
            f"step {step:>6,}: loss {losses['train_loss']:.4f} on training, "
            f"{losses['val_loss']:.4f} on validation data "
            f"(perplexity {losses['val_perplexity']:.2f}, {losses['val_bits_per_byte']:.3f} "
            "bits per byte)" + " *" * is_best
        )
        if sample and self.is_main:
            self.write("sample", step, text=sample, **extra)
            with open(self.folder / "samples.txt", "a", encoding="utf-8") as file:
                file.write(sample_entry(step, sample))

    @contextlib.contextmanager
    def dispensable(self, what: str) -> Iterator[None]:
        """What is done inside may fail: then a line says that `what` is left out, and why."""
        try:
            yield
        except Exception as error:  # whatever goes wrong, training matters more
            reason = (str(error).strip() or "no reason given").splitlines()[0][:120]
            self.say(f"warning: {what} is left out ({type(error).__name__}: {reason})")

    @contextlib.contextmanager
    def looking(self, step: int) -> Iterator[None]:
        """A snapshot of attention is taken inside: timed as part of evaluating, and dispensable."""
        with (
            self.phase("evaluate"),
            self.dispensable(f"the snapshot of attention at step {step:,}"),
        ):
            yield

    def close(self) -> None:
        """Finish the progress line, the file and the tracker."""
        self.bar.close()
        self.file.close()
        with contextlib.suppress(Exception):  # a tracker that fails must not end a run
            if self.wandb:
                is_offline = getattr(self.wandb, "offline", False)
                self.wandb.finish()
                if is_offline:
                    self.say(f"wandb was offline; to send the run: {sending_command(self.folder)}")


def sending_command(folder: Path) -> str:
    """The command that sends what wandb has written in a run folder without a network: a part for
    each time the run went on, all of one run.
    """
    parts = sorted(map(str, folder.glob("wandb/offline-run-*")))
    return shlex.join(["wandb", "sync", *(parts or [str(folder / "wandb")])])


def start_wandb(folder: Path, config: Config, say: Callable[[str], None]) -> Any:
    """A wandb run, offline where there is no account, the same one when a run goes on; None, with a
    warning, where it fails.
    """
    try:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        remembered = folder / "wandb_id"
        if not remembered.exists():
            remembered.write_text(secrets.token_hex(4), encoding="utf-8")
        settings = wandb.Settings(silent=True, init_timeout=20)
        place = {"project": "glassgpt", "name": folder.name, "dir": str(folder), "mode": mode}
        run = wandb.init(
            **place,
            id=remembered.read_text(encoding="utf-8"),
            resume="allow",
            config=config.to_dict(),
            settings=settings,
        )
        if mode == "offline":
            say(
                f"note: wandb works offline: its files lie in {folder / 'wandb'}, and are sent "
                f"with {sending_command(folder)}"
            )
        return run
    except Exception as error:  # whatever a tracker does must not end a run
        reason = (str(error).strip() or "no reason given").splitlines()[0][:120]
        say(f"warning: wandb is off, the local log goes on ({type(error).__name__}: {reason})")
        return None


def peak_memory(device: str = "cpu") -> int:
    """The most memory this process has held so far, in MiB: on a GPU, else resident; 0 where it
    can't be told.
    """
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device) >> 20
    return machine.peak_memory() >> 20


def plot_losses(folder: Path) -> None:
    """Draw the folder's log.jsonl as loss.png: training loss by step, and the evaluations of both
    splits.
    """
    # How the system's fonts and caches are is of no interest here.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure  # pyplot would load a third of a second more

    records = read_log(folder / "log.jsonl")
    train = [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="0.75", linewidth=0.8, label="batches")
    for key, label, color in (
        ("train_loss", "training split", "tab:blue"),
        ("val_loss", "validation split", "tab:orange"),
    ):
        axes.plot(
            [r["step"] for r in evals],
            [r[key] for r in evals],
            color=color,
            marker="o",
            markersize=3,
            label=label,
        )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(folder.name, parse_math=False)  # a name is text, never mathematics
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = folder / "loss.tmp.png"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a character that the font lacks becomes a box
        figure.savefig(temporary, dpi=150)
    os.replace(temporary, folder / "loss.png")
