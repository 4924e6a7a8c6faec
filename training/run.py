"""Around the loop: the run folder, resuming, signals, and what is printed before the first step."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from configs import Config
from data.batches import Dataset, n_windows
from data.tokenizer import Tokenizer
from errors import UserError
from model.generate import generate
from model.gpt import GPT
from training.checkpoint import BEST, LATEST, Checkpoint, find, load, load_weights
from training.distributed import Processes, gather
from training.log import cut_log
from training.runtime import device_name

MADE_BY_A_RUN = (
    "config.json",
    "log.jsonl",
    LATEST,
    BEST,
    "loss.png",
    "samples.txt",
    "attention",
    "wandb",
    "wandb_id",
)

BAD_STEPS_ALLOWED = {"float32": 5, "bfloat16": 5, "float16": 25}
"""Updates in a row that may be skipped as loss or gradient is not finite; float16's scaler needs a
few to find its scale.
"""

FREE_ON_RESUME = {
    "data", "micro_batch_size", "out", "eval_every", "eval_batches", "save_every", "log_every", "sample_tokens", "probe_tokens",
    "wandb", "resume", "init_from", "stop_at", "patience", "max_minutes", "overwrite", "plan", "strategy", "recompute",
}  # fmt: skip
"""Fields that leave a step's mathematics alone; any other must be the same when a run goes on."""

SAME_BUT_FOR_ROUNDING = {"device", "threads", "compile", "attention", "deterministic"}
"""Fields that may change when a run goes on, at the price of the last bits."""


def open_folder(config: Config, dataset: Dataset) -> tuple[Path, Config, Checkpoint | None]:
    """The run folder, the configuration to go on with, and the checkpoint to go on from (None: from
    the start). Nothing is touched.

    Raises UserError where the folder holds a run and neither `resume` nor `overwrite` is set, and
    where the checkpoint is of other data or of another configuration.
    """
    folder, run = Path(config.run.out), config.run
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder} is a file, where the run folder should be: give another with --out"
        )
    found = [folder / name for name in (LATEST, BEST) if run.resume and (folder / name).exists()]
    if found:
        checkpoint = load(found[0])
        if checkpoint.dataset != dataset.fingerprint:
            raise UserError(
                f"{folder} was trained on other data than {dataset.folder} holds: prepare that again, or give another --out"
            )
        return folder, merge_on_resume(config, Config.from_dict(checkpoint.config)), checkpoint
    if (
        not run.resume
        and not run.overwrite
        and any((folder / name).exists() for name in MADE_BY_A_RUN)
    ):
        raise UserError(
            f"{folder} holds a run: --resume goes on with it, --overwrite replaces it, --out FOLDER starts another"
        )
    return folder, config, None


def merge_on_resume(given: Config, saved: Config) -> Config:
    """The saved configuration with the given fields that may change. Raises UserError naming a
    field that may not.
    """
    merged = {}
    for section in dataclasses.fields(Config):
        new, old = getattr(given, section.name), getattr(saved, section.name)
        changes = {}
        for name in (f.name for f in dataclasses.fields(new)):
            value, before = getattr(new, name), getattr(old, name)
            automatic = value == "auto" or (name == "threads" and value == 0)
            if value == before or automatic:
                continue
            if name not in FREE_ON_RESUME | SAME_BUT_FOR_ROUNDING:
                raise UserError(
                    f"{name} is {value}, but the run to resume has {before}: leave it, or start a new run with --out"
                )
            changes[name] = value
        merged[section.name] = dataclasses.replace(old, **changes)
    return Config(**merged)


def resume_notes(config: Config, resumed: Checkpoint) -> list[str]:
    """A line for each changed field that keeps a resumed run from being bit for bit the undisturbed
    one.
    """
    before, notes = Config.from_dict(resumed.config), []
    changed = [
        name
        for name in sorted(SAME_BUT_FOR_ROUNDING)
        if getattr(config.run, name) != getattr(before.run, name)
    ]
    if changed:
        notes.append(
            f"note     {', '.join(changed)} changed since the checkpoint: the same run but for rounding"
        )
    if config.optim.micro_batch_size != before.optim.micro_batch_size:
        what = (
            "other dropout masks of the same law from here on"
            if config.model.dropout
            else "the same run but for rounding"
        )
        notes.append(f"note     micro_batch_size changed since the checkpoint: {what}")
    return notes


def starting_state(
    config: Config, dataset: Dataset, resumed: Checkpoint | None, model: GPT
) -> Checkpoint:
    """The state to start from, weights put into `model`: the checkpoint's, or step 0, maybe with
    `init_from`'s weights.
    """
    if resumed:
        load_weights(model, resumed, config.run.out)
        return dataclasses.replace(resumed, config=config.to_dict(), model={})
    if config.run.init_from:
        source = find(config.run.init_from)
        other = load(source)
        if other.tokenizer != dataset.tokenizer_spec:
            raise UserError(
                f"{source} was trained with another tokenizer than {dataset.folder} has: prepare the data with that one"
            )
        load_weights(model, other, source)
    return Checkpoint(0, {}, config.to_dict(), dataset.tokenizer_spec, dataset.fingerprint)


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


def start_folder(folder: Path, config: Config, checkpoint: Checkpoint | None) -> None:
    """Make the folder ready: without a checkpoint, empty of what a run before left; with one, its
    log cut back to that step.

    Writes config.json, from which the run can be repeated.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run folder {folder} can't be made ({error.strerror}): give another with --out"
        ) from None
    for name in MADE_BY_A_RUN if checkpoint is None else ():
        if (folder / name).exists():
            (shutil.rmtree if (folder / name).is_dir() else Path.unlink)(folder / name)
    cut_log(folder / "log.jsonl", checkpoint.step if checkpoint else -1)
    once = {
        "resume": False,
        "overwrite": False,
        "stop_at": 0,
        "max_minutes": 0.0,
    }  # of this start, not of the run
    repeatable = dataclasses.replace(config, run=dataclasses.replace(config.run, **once))
    (folder / "config.json").write_text(
        json.dumps(repeatable.to_dict(), indent=2) + "\n", encoding="utf-8"
    )


def introduce(
    config: Config,
    model: GPT,
    dataset: Dataset,
    tokenizer: Tokenizer,
    resumed: Checkpoint | None,
    processes: Processes,
) -> str:
    """The lines printed before the first step: device, precision, parameters, data, tokens per step
    spelt out, epochs.
    """
    optim, run, shape = config.optim, config.run, config.model
    micro = optim.micro_batch_size or optim.batch_size // processes.count
    train, val = len(dataset.tokens["train"]), len(dataset.tokens["val"])
    tokens_per_step = optim.batch_size * shape.context_length
    epochs = optim.max_steps * optim.batch_size / n_windows(train, shape.context_length)
    parameters = sum(p.numel() for p in model.parameters())
    lines = [
        f"device   {run.device} ({device_name(run.device)}, {run.threads} threads), {run.precision}, "
        f"{run.attention} attention, compile {run.compile}",
        f"model    {parameters:,} parameters: {shape.n_layer} layers, {shape.n_head} heads, width {shape.d_model}, "
        f"{shape.positions} positions, {shape.norm}, {shape.mlp}",
        f"data     {dataset.folder}: {train:,} training and {val:,} validation tokens; "
        f"{tokenizer.vocab_size:,} ids ({tokenizer.kind})",
        f"step     micro-batch {micro} x accumulation {optim.batch_size // micro // processes.count} "
        f"x processes {processes.count} x context {shape.context_length} = {tokens_per_step:,} tokens",
        f"run      {optim.max_steps:,} steps of {optim.optimizer} = {optim.max_steps * tokens_per_step:,} tokens "
        f"= {epochs:.2f} epochs"
        + (f", going on from step {resumed.step:,}" if resumed else "")
        + f" -> {run.out}",
    ]
    if shape.dropout and run.attention == "fused" and run.device == "cpu":
        lines.append(
            "note     with dropout, fused attention on CPU holds the n^2 weights in memory, as explicit attention does"
        )
    return "\n".join([*lines, *(resume_notes(config, resumed) if resumed else [])])


def farewell(step: int, best_val_loss: float, config: Config, why: str) -> str:
    """The last lines printed: where the run stands, `why` if it ended early, and what can be done
    with it.
    """
    out = config.run.out
    if step < config.optim.max_steps:
        return f"{why}: stopped after step {step:,} of {config.optim.max_steps:,}; saved in {out}; --resume goes on"
    return (
        f"done: best validation loss {best_val_loss:.4f}; saved in {out} (log.jsonl, loss.png, samples.txt)\n"
        f"next: python sample.py {out}\n      python attention_map.py {out} --out {out}/attention.html"
    )


def not_finite(step: int, config: Config) -> str:
    """What to say when a run has lost its way."""
    return (
        f"loss or gradient is not finite at step {step:,} and those before it (seed {config.run.seed}); best.pt is as it was.\n"
        f"Lower --lr (now {config.optim.lr:g}), raise --warmup-steps (now {config.optim.warmup_steps}), "
        f"or use --precision float32 (now {config.run.precision})"
    )


def check_sizes(config: Config, dataset: Dataset) -> None:
    """Raise UserError where batches can't be cut as asked, or a split is shorter than one
    window.
    """
    optim, context = config.optim, config.model.context_length
    if optim.batch_size % (optim.micro_batch_size or 1):
        raise UserError(
            f"batch_size {optim.batch_size} does not divide into micro-batches of {optim.micro_batch_size}"
        )
    for split, least in (("train", context + 1), ("val", 2)):
        if (found := len(dataset.tokens[split])) < least:
            what = f"the {split} split has {found:,} tokens, a window needs {least:,}"
            raise UserError(f"{what}: use a longer text or a shorter --context-length")


def draw_sample(model: GPT, tokenizer: Tokenizer, n_token: int, seed: int) -> str:
    """A text of `n_token` tokens from the model as it stands, always with the same random
    numbers.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = [
        row[0]
        for row in generate(model, [first_tokens(tokenizer)], n_token, generators=[generator])
    ]
    return tokenizer.decode(ids)


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """What an empty prompt starts from: the separator, else a newline, else the first symbol."""
    if tokenizer.separator is not None:
        return [tokenizer.separator]
    try:
        return [int(token) for token in tokenizer.encode("\n")]
    except UserError:  # a character vocabulary without a newline
        return [0]


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """A seed for the dropout of one micro-batch: a function of the run's seed, the step and its
    index in the global batch.
    """
    return int(np.random.SeedSequence([seed, step, micro_batch]).generate_state(1, np.uint64)[0])


class StopSignal:
    """Ctrl-C or SIGTERM ends the run after the step in hand, with a checkpoint; a second one ends
    it at once.
    """

    def __init__(self):
        self.received = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        signal.signal(
            number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
        )
