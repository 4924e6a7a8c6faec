"""Going on with a run: what may change, what must not, and what is said about it."""

import dataclasses

from configs import Config
from data.dataset import Dataset
from data.vocabulary import preparing_again
from errors import UserError
from model.gpt import GPT
from ops.checkpoint import Checkpoint, find, load, load_weights

FREE_ON_RESUME = {
    *("data", "out", "resume", "overwrite", "plan", "init_from"),
    *("eval_every", "eval_batches", "save_every", "log_every", "sample_tokens", "probe_tokens"),
    *("stop_at", "max_minutes", "patience", "wandb"),
    *("micro_batch_size", "strategy", "recompute"),
}
"""Fields that leave a step's mathematics alone; any other must be the same when a run goes on."""


SAME_BUT_FOR_ROUNDING = {"device", "threads", "compile", "attention", "deterministic"}
"""Fields that may change when a run goes on, at the price of the last bits."""


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
                    f"{name} is {value}, but the run to resume has {before}: "
                    "leave it, or start a new run with --out"
                )
            changes[name] = value
        merged[section.name] = dataclasses.replace(old, **changes)
    return Config(**merged)


def resume_notes(config: Config, checkpoint: Checkpoint) -> list[str]:
    """A line for each changed field that keeps a resumed run from being bit for bit the undisturbed
    one.
    """
    before, notes = Config.from_dict(checkpoint.config), []
    changed = [
        name
        for name in sorted(SAME_BUT_FOR_ROUNDING)
        if getattr(config.run, name) != getattr(before.run, name)
    ]
    what = "the same run but for rounding"
    if changed:
        notes.append(f"note     {', '.join(changed)} changed since the checkpoint: {what}")
    if config.optim.micro_batch_size != before.optim.micro_batch_size:
        if config.model.dropout:
            what = "other dropout masks of the same law from here on"
        notes.append(f"note     micro_batch_size changed since the checkpoint: {what}")
    return notes


def initial_weights(
    model: GPT, config: Config, dataset: Dataset, checkpoint: Checkpoint | None
) -> None:
    """Put weights into `model`: those of the checkpoint to go on from, else those of --init-from,
    else none. Raises UserError where they are of another tokenizer or shape.
    """
    if checkpoint:
        load_weights(model, checkpoint, config.run.out)
    elif config.run.init_from:
        source = find(config.run.init_from)
        other = load(source)
        if other.tokenizer != dataset.tokenizer_spec:
            command, folder = preparing_again(dataset, config.run.init_from)
            raise UserError(
                f"{source} was trained with another vocabulary than {dataset.folder} has. Prepare "
                f"the text with that one, and train with --data {folder}:\n  {command}"
            )
        load_weights(model, other, source)
