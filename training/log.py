"""What a run tells: JSON Lines always, one progress line, Weights & Biases when asked, a loss curve at the end."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from configs import Config


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log.jsonl; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def cut_log(path: Path, step: int) -> None:
    """Keep the records up to `step`, so that a resumed run writes what an undisturbed one would have."""
    kept = [json.dumps(record) + "\n" for record in read_log(path) if record["step"] <= step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
    samples = [f"--- step {r['step']} ---\n{r['text']}\n\n" for r in map(json.loads, kept) if r["kind"] == "sample"]
    (path.parent / "samples.txt").write_text("".join(samples), encoding="utf-8")


class RunLog:
    """Writes records to `folder`/log.jsonl as they come, moves the progress line, and passes numbers on to wandb."""

    def __init__(self, folder: Path, config: Config, start: int, quiet: bool = False):
        self.folder, self.tokens_per_step = folder, config.optim.batch_size * config.model.context_length
        self.clock, self.logged = time.perf_counter(), start
        self.file = open(folder / "log.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed in `close`)
        self.bar = tqdm(total=config.optim.max_steps, initial=start, unit="step", dynamic_ncols=True, smoothing=0.1, disable=quiet)
        if not self.bar.disable and not self.bar.fp.isatty():
            self.bar.mininterval = 15.0  # a log file wants a line now and then
        self.wandb = self._start_wandb(folder, config) if config.run.wandb else None

    def _start_wandb(self, folder: Path, config: Config):
        """A wandb run, offline where there is no account; a tracker that fails is a warning and the local log goes on."""
        try:
            import wandb

            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
            return wandb.init(
                project="glassgpt", name=folder.name, dir=str(folder), mode=mode, config=config.to_dict(), settings=wandb.Settings(silent=True)
            )
        except Exception as error:  # whatever a tracker does must not end a run
            self.say(f"warning: wandb is off ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})")
            return None

    def say(self, text: str) -> None:
        """Print a line without breaking the progress line."""
        self.bar.write(text)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append one record. A NaN or infinity is written as JSON's null."""
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self.file.write(json.dumps({"kind": kind, "step": step, **values}, ensure_ascii=False) + "\n")
        if self.wandb and kind != "sample":
            try:
                self.wandb.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)
            except Exception as error:  # as above
                self.say(f"warning: wandb is off from step {step} ({type(error).__name__})")
                self.wandb = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside (evaluating, saving) doesn't count into tokens per second."""
        began = time.perf_counter()
        yield
        self.clock += time.perf_counter() - began

    def train(self, step: int, loss: float, lr: float, grad_norm: float) -> None:
        """Record the update that made step `step`: its loss (nats per token), rate and gradient norm before clipping; move the progress line."""
        now = time.perf_counter()
        speed = (step - self.logged) * self.tokens_per_step / (now - self.clock)
        self.clock, self.logged = now, step
        self.write("train", step, loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_second=round(speed))
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
        self.bar.update(step - self.bar.n)

    def evaluation(self, step: int, losses: dict[str, float], sample: str, is_best: bool) -> None:
        """Record and print an evaluation; the sample goes to the log and to samples.txt."""
        self.write("eval", step, **losses)
        self.say(
            f"step {step:>6,}: loss {losses['train_loss']:.4f} on training, {losses['val_loss']:.4f} on validation data "
            f"(perplexity {losses['val_perplexity']:.2f}, {losses['val_bits_per_byte']:.3f} bits per byte)" + " *" * is_best
        )
        if sample:
            self.write("sample", step, text=sample)
            with open(self.folder / "samples.txt", "a", encoding="utf-8") as file:
                file.write(f"--- step {step} ---\n{sample}\n\n")

    def close(self) -> None:
        """Finish the progress line, the file and the tracker."""
        self.bar.close()
        self.file.close()
        if self.wandb:
            self.wandb.finish()


def plot_losses(folder: Path) -> None:
    """Draw the folder's log.jsonl as loss.png: training loss by step, and the evaluations of both splits."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = read_log(folder / "log.jsonl")
    train = [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]
    evals = [r for r in records if r["kind"] == "eval"]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), color="0.75", linewidth=0.8, label="batches")
    for key, label, color in (("train_loss", "training split", "tab:blue"), ("val_loss", "validation split", "tab:orange")):
        axes.plot([r["step"] for r in evals], [r[key] for r in evals], color=color, marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = folder / "loss.tmp.png"
    figure.savefig(temporary, dpi=150)
    plt.close(figure)
    os.replace(temporary, folder / "loss.png")
