"""Going on with a run: what may change, what must not, and what is said about it."""

import dataclasses
import shlex
from pathlib import Path

from configs import Config, RunConfig
from data.dataset import Dataset
from data.vocabulary import preparing_again
from errors import UserError
from model.gpt import GPT
from ops.checkpoint import LATEST, Checkpoint, find, load, load_weights
from ops.device import best_device, has_device
from training.optimizer import learning_rate

FREE_ON_RESUME = {
    *("data", "out", "resume", "overwrite", "plan", "init_from"),
    *("eval_every", "eval_batches", "save_every", "log_every", "sample_tokens", "probe_tokens"),
    *("stop_at", "max_minutes", "patience", "wandb"),
    *("micro_batch_size", "strategy", "recompute"),
}
"""Fields that leave a step's mathematics alone; any other must be the same when a run goes on."""


SAME_BUT_FOR_ROUNDING = {
    *("device", "precision", "threads", "compile", "attention", "deterministic"),
}
"""Fields that may change when a run goes on, at the price of the last bits (of more of them where
it is the precision).
"""


def merge_on_resume(given: Config, saved: Config, step: int | None = None) -> Config:
    """The saved configuration with the given fields that may change, for a run that has made `step`
    updates (None: unknown). Raises UserError naming a field that may not.
    """
    merged = {}
    for section in dataclasses.fields(Config):
        new, old = getattr(given, section.name), getattr(saved, section.name)
        changes = {}
        for name in (f.name for f in dataclasses.fields(new)):
            value, before = getattr(new, name), getattr(old, name)
            if value in (before, "auto"):
                continue
            if name == "max_steps":
                check_new_end(given, saved, step)
            elif name not in FREE_ON_RESUME | SAME_BUT_FOR_ROUNDING:
                raise UserError(
                    f"{name} is {value}, but the run to resume has {before}: "
                    "leave it, or start a new run with --out"
                )
            changes[name] = value
        merged[section.name] = dataclasses.replace(old, **changes)
    if step is not None and step > merged["optim"].max_steps:
        raise UserError(
            f"max_steps is {merged['optim'].max_steps:,}, but the run to resume has made {step:,} "
            "steps: give at least as many"
        )
    merged["run"] = _where_it_goes_on(given.run, merged["run"], saved.run)
    return Config(**merged)


def check_new_end(given: Config, saved: Config, step: int | None) -> None:
    """Raise UserError, with a way to go on, unless a run with the `max_steps` given would have made
    the first `step` updates as this one did: with a constant rate, or while it still warms up.
    """
    old, max_steps = saved.optim, given.optim.max_steps
    new = dataclasses.replace(old, max_steps=max_steps)
    if step is not None and all(
        learning_rate(s, new) == learning_rate(s, old) for s in range(min(step, max_steps))
    ):
        return
    found = f"max_steps is {max_steps:,}, but the run to resume has {old.max_steps:,}"
    if max_steps < old.max_steps:
        raise UserError(
            f"{found}: --stop-at {max_steps} ends it there and leaves its schedule alone"
        )
    more = max_steps - (old.max_steps if step is None else step)
    raise UserError(
        f"{found}, to which its {old.schedule} schedule falls. To train its weights further, with "
        f"a warm-up and a decay of their own: {further_command(given, saved, more)}"
    )


def further_command(given: Config, saved: Config, steps: int) -> str:
    """The command that trains a run's latest weights for `steps` more, as a run of its own."""
    run = Path(given.run.out)
    source = run / LATEST if (run / LATEST).exists() else run
    words = ["python", "train.py", run, "--init-from", source, "--out", f"{run}-more"]
    if given.data != saved.data:
        words += ["--data", given.data.data]
    return shlex.join(map(str, [*words, "--max-steps", steps]))


def _where_it_goes_on(given: RunConfig, merged: RunConfig, saved: RunConfig) -> RunConfig:
    """The run section for this machine. `auto` keeps what the run has had, as long as there is such
    a device; on another kind of device, precision and compiling are chosen anew. So are threads, by
    0, on every machine.
    """
    device = merged.device
    if given.device == "auto" and not has_device(device):
        device = best_device()
    changes = {"device": device, "threads": given.threads}
    if device.partition(":")[0] != saved.device.partition(":")[0]:
        changes |= {"precision": given.precision, "compile": given.compile}
    return dataclasses.replace(merged, **changes)


def resume_notes(config: Config, checkpoint: Checkpoint) -> list[str]:
    """A line for each changed field that keeps a resumed run from being bit for bit the undisturbed
    one.
    """
    before, notes = Config.from_dict(checkpoint.config), []
    if config.optim.max_steps != before.optim.max_steps:
        ends = f"{before.optim.max_steps:,} to {config.optim.max_steps:,}"
        notes.append(f"note     max_steps changed since the checkpoint from {ends}")
    changed = {
        name: f"{name} {getattr(before.run, name)}, now {getattr(config.run, name)}"
        for name in sorted(SAME_BUT_FOR_ROUNDING)
        if getattr(config.run, name) != getattr(before.run, name)
    }
    what = "the same run but for rounding"
    if changed:
        notes.append(
            f"note     {', '.join(changed)} changed since the checkpoint: {what} "
            f"({'; '.join(changed.values())})"
        )
    if config.optim.micro_batch_size != before.optim.micro_batch_size:
        if config.model.dropout:
            what = "other dropout masks of the same law from here on"
        notes.append(f"note     micro_batch_size changed since the checkpoint: {what}")
    return notes


def initial_weights(
    model: GPT, config: Config, dataset: Dataset, checkpoint: Checkpoint | None
) -> list[str]:
    """Put weights into `model`: those of the checkpoint to go on from, else those of --init-from,
    else none. Returns a line for what is not as it was there. Raises UserError where they are of
    another tokenizer or shape.
    """
    if checkpoint:
        return load_weights(model, checkpoint, config.run.out)
    if config.run.init_from:
        source = find(config.run.init_from)
        other = load(source)
        if other.tokenizer != dataset.tokenizer_spec:
            command, folder = preparing_again(dataset, config.run.init_from)
            raise UserError(
                f"{source} was trained with another vocabulary than {dataset.folder} has. Prepare "
                f"the text with that one, and train with --data {folder}:\n  {command}"
            )
        return load_weights(model, other, source)
    return []
