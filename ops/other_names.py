"""Options as other trainers call them, and what they are called here. Imports no torch."""

import dataclasses
import itertools
from pathlib import Path

from errors import UserError

TRAINING = {
    # nanoGPT's train.py
    "out_dir": "--out",
    "eval_interval": "--eval-every",
    "log_interval": "--log-every",
    "eval_iters": "--eval-batches",
    "always_save_checkpoint": "--save-every",
    "eval_only": "--init-from RUN --max-steps 0",
    "wandb_log": "--wandb",
    "wandb_project": "--wandb (the project is glassgpt)",
    "wandb_run_name": "--out (a run is named after its folder)",
    "dataset": "--data",
    "gradient_accumulation_steps": "--micro-batch-size (--batch-size is that of a whole update)",
    "block_size": "--context-length",
    "n_embd": "--d-model",
    "learning_rate": "--lr",
    "max_iters": "--max-steps",
    "decay_lr": "--schedule",
    "warmup_iters": "--warmup-steps",
    "lr_decay_iters": "--max-steps (to which the rate falls)",
    "backend": "to leave it out (NCCL on GPUs, Gloo on CPUs)",
    "dtype": "--precision",
    # transformers' Trainer and configurations, and others
    "output_dir": "--out",
    "data_dir": "--data",
    "save_interval": "--save-every",
    "save_steps": "--save-every",
    "eval_steps": "--eval-every",
    "logging_steps": "--log-every",
    "seq_len": "--context-length",
    "max_seq_len": "--context-length",
    "max_seq_length": "--context-length",
    "hidden_size": "--d-model",
    "intermediate_size": "--d-ff",
    "n_inner": "--d-ff",
    "ffn_dim": "--d-ff",
    "num_key_value_heads": "--n-kv-head",
    "n_kv_heads": "--n-kv-head",
    "rope_theta": "--rope-base",
    "layer_norm_epsilon": "--norm-eps",
    "layer_norm_eps": "--norm-eps",
    "rms_norm_eps": "--norm-eps",
    "adam_epsilon": "--eps",
    "embed_dim": "--d-model",
    "num_layers": "--n-layer",
    "num_hidden_layers": "--n-layer",
    "num_heads": "--n-head",
    "num_attention_heads": "--n-head",
    "epochs": "--max-steps (the opening lines say how many epochs that is)",
    "num_train_epochs": "--max-steps (the opening lines say how many epochs that is)",
    "num_steps": "--max-steps",
    "train_steps": "--max-steps",
    "num_warmup_steps": "--warmup-steps",
    "lr_scheduler": "--schedule",
    "lr_scheduler_type": "--schedule",
    "per_device_train_batch_size": "--micro-batch-size",
    "accumulation_steps": "--micro-batch-size",
    "max_grad_norm": "--grad-clip",
    "clip_grad": "--grad-clip",
    "adam_beta1": "--beta1",
    "adam_beta2": "--beta2",
    "fp16": "--precision float16",
    "bf16": "--precision bfloat16",
    "amp": "--precision",
    "gradient_checkpointing": "--recompute",
    "resume_from": "--resume",
    "resume_from_checkpoint": "--resume",
    "checkpoint": "--init-from",
    "tie_weights": "--tie-embeddings",
    "flash": "--attention fast",
}
"""Another name of an option of train.py -> the option."""

SAMPLING = {
    "start": "--prompt",
    "out_dir": "the run folder alone, as the first word",
    "init_from": "the run folder alone, as the first word",
    "dtype": "--precision",
    "length": "--max-new-tokens",
    "max_length": "--max-new-tokens",
    "max_tokens": "--max-new-tokens",
    "num_return_sequences": "--num-samples",
    "checkpoint": "the checkpoint file alone, as the first word",
}
"""The same for sample.py."""
TRUTH = {"true": True, "1": True, "false": False, "0": False}
"""Truth values as Python and others write them, in small letters."""


def refuse_other_names(arguments: list[str], names: dict[str, str]) -> None:
    """Raise UserError, with the name here, for options that another trainer calls otherwise."""
    found = {}
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name in names:
            found[flag] = names[name]
    if found:
        meant = ", ".join(dict.fromkeys(found.values()))
        raise UserError(f"there is no option {', '.join(found)}: did you mean {meant}?")


def refuse_other_values(arguments: list[str], sections: list[type]) -> None:
    """Raise UserError for values as nanoGPT's users write them: `--bias=False`, `--compile=False`
    and `--init_from=resume`. `sections` are the dataclasses whose fields are the options.
    """
    flags = {f.name for section in sections for f in dataclasses.fields(section) if f.type is bool}
    for argument, after in itertools.pairwise([*arguments, ""]):
        flag, _, value = argument.partition("=")
        if not flag.startswith("--"):
            continue
        name = flag.removeprefix("--").replace("-", "_")
        value = value or after
        truth = TRUTH.get(value.lower())
        if name in flags and truth is not None:
            meant = f"--{'' if truth else 'no-'}{name.replace('_', '-')}"
            raise UserError(f"{flag} takes no value, {value!r} is given: did you mean {meant}?")
        if name == "compile" and truth is not None:
            meant = "on" if truth else "off"
            raise UserError(f"{flag} is {value!r}: did you mean --compile {meant}?")
        if name == "init_from" and value in ("resume", "scratch") and not Path(value).exists():
            meant = "--resume" if value == "resume" else "to leave it out"
            raise UserError(f"there is no run {value!r} to start from: did you mean {meant}?")
