"""From a run folder to Hugging Face's files, one tensor at a time."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from configs import Config
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer_out import tokenizer_config, tokenizer_json
from errors import MachineError, UserError
from interop import gpt2, llama
from interop.folder import whole_folder
from interop.places import Format, by_source, join, shape_there
from interop.weights import write_safetensors
from model.config import ModelConfig
from ops.checkpoint import OTHER, Checkpoint, find, load, recorded_start
from ops.fitting import check_sizes


def give_out(run: str, out: Path, dtype: str = "float32") -> str:
    """Write a run to the folder `out`; a line about it. Raises UserError, with nothing written,
    where no format can express it.
    """
    path = find(run)
    checkpoint = load(path)
    config = Config.from_dict(checkpoint.config).model
    tokenizer = load_tokenizer(checkpoint.tokenizer)
    try:
        check_sizes(config, tokenizer.vocab_size, checkpoint.model)
    except ValueError as error:
        raise UserError(f"{path} doesn't fit together: {error}") from None
    form = choose_format(config, str(run))
    start = recorded_start(checkpoint, tokenizer)
    files = {
        "config.json": _config(form, config, tokenizer, start, dtype),
        "generation_config.json": _ids(tokenizer, start),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": tokenizer_config(tokenizer, config.context_length),
    }
    try:
        with whole_folder(out) as folder:
            for name, plain in files.items():
                text = json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
                (folder / name).write_text(text, encoding="utf-8")
            with open(folder / "model.safetensors", "wb") as file:
                n_weight = _write_weights(checkpoint, form, file, getattr(torch, dtype), path)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise MachineError(f"{out} can't be written ({error.strerror or error})") from None
    return (
        f"wrote {out}: {n_weight:,} weights of {path}, step {checkpoint.step:,}, in {form.NAME}; "
        f"{tokenizer.vocab_size:,} ids ({tokenizer.kind})"
    )


def choose_format(config: ModelConfig, run: str) -> Format:
    """The format that can express a model. Raises UserError, naming the options that stand in the
    way, where none can.
    """
    common = [f"--bigrams {config.bigrams}"] if config.bigrams else []
    if config.qk_norm:
        common.append("--qk-norm")
    if 0 < config.window < config.context_length:
        common.append(f"--window {config.window}")
    if common:
        raise UserError(f"{run} can't be exported: no format has its {', '.join(common)}")
    found = {form.NAME: form.obstacles(config) for form in (gpt2, llama)}
    for form in (gpt2, llama):
        if not found[form.NAME]:
            return form
    reasons = [f"{name} has no {', '.join(options)}" for name, options in found.items()]
    raise UserError(f"{run} can't be exported: {'; '.join(reasons)}")


def _ids(tokenizer: Tokenizer, start: int | None) -> dict[str, Any]:
    """The ids that generation begins and ends with; null where there are none."""
    begin = tokenizer.separator if start is None else start
    ids = {"bos_token_id": begin, "eos_token_id": tokenizer.separator}
    return {**ids, "pad_token_id": tokenizer.separator}


def _config(
    form: Format, config: ModelConfig, tokenizer: Tokenizer, start: int | None, dtype: str
) -> dict[str, Any]:
    plain = form.write_config(config, tokenizer.vocab_size)
    return {**plain, **_ids(tokenizer, start), "torch_dtype": dtype}


def _write_weights(
    checkpoint: Checkpoint,
    form: Format,
    file: BinaryIO,
    dtype: torch.dtype,
    origin: Path,
) -> int:
    """Write the weights as safetensors; how many they are."""
    config = Config.from_dict(checkpoint.config).model
    weights = checkpoint.model
    # GPT-2's format has biases everywhere: those that the run lacks are zeros.
    whole = dataclasses.replace(config, bias=True) if form is gpt2 else config
    groups = by_source(form.places(whole))
    placed = {part for group in groups.values() for part, _ in group}
    if strange := sorted(weights.keys() - placed - {"unembed.weight"}):  # that is the embedding's
        raise UserError(f"{origin} can't be exported: {form.NAME} has no place for {strange[0]}")

    def ours(name: str) -> Tensor:
        if name in weights:
            return weights[name]
        return torch.zeros(len(weights[name.removesuffix("bias") + "weight"]))

    def tensors() -> Iterator[Tensor]:
        for name, group in groups.items():
            tensor = join([ours(part) for part, _ in group], group[0][1])
            if not tensor.isfinite().all():
                raise UserError(
                    f"{origin} can't be used: {name} has NaN or infinity in it: {OTHER}"
                )
            yield tensor

    shapes = {}
    for name, group in groups.items():
        part, place = group[0]
        prefix = "" if name.startswith("lm_head.") else form.PREFIX
        shapes[prefix + name] = shape_there(tuple(ours(part).shape), place)
    write_safetensors(file, shapes, tensors(), dtype)
    return sum(torch.Size(shape).numel() for shape in shapes.values())
