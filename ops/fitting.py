"""Whether weights fit a model, said in the fields of its configuration."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from errors import UserError
from model.config import ModelConfig
from model.gpt import GPT
from ops.distributed import scatter_optimizer

TABLE = "positions.table.weight"
"""The learned positions: a row each."""
MEANING = ("positions", "rope_base", "norm", "norm_eps", "mlp", "window")
"""Fields that may differ between models whose weights have the same shapes."""


def differing_fields(
    theirs: ModelConfig, ours: ModelConfig, vocab_sizes: tuple[int, int]
) -> dict[str, tuple[Any, Any]]:
    """Field -> its value for weights made as `theirs`, and for a model as `ours`, where these
    differ so that the weights can't be used in the model. `vocab_sizes`: those of both.
    """
    names = ["n_layer", "n_head", "d_model", "qk_norm", "bias", "bigrams"]
    if theirs.tie_embeddings < ours.tie_embeddings:  # two matrices for one; the other way is fine
        names.append("tie_embeddings")
    if "learned" in (theirs.positions, ours.positions):
        names += ["positions", "context_length"]
    if "swiglu" in (theirs.mlp, ours.mlp):
        names.append("mlp")
    if theirs.norm != ours.norm and (theirs.bias or ours.bias):
        names.append("norm")
    found = {name: (getattr(theirs, name), getattr(ours, name)) for name in names}
    if theirs.n_kv_head or ours.n_kv_head:
        found["n_kv_head"] = (theirs.n_key_head, ours.n_key_head)
    if theirs.d_ff or ours.d_ff:
        found["d_ff"] = (theirs.d_mlp, ours.d_mlp)
    found["vocab_size"] = vocab_sizes
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


def fields_text(differing: dict[str, tuple[Any, Any]]) -> str:
    """The differing fields in words, and the options that make the model as the weights are."""
    words = [
        f"{name} is {theirs} there and {ours} here" for name, (theirs, ours) in differing.items()
    ]
    options = []
    for name, (theirs, _) in differing.items():
        flag = name.replace("_", "-")
        if isinstance(theirs, bool):
            options.append(f"--{flag}" if theirs else f"--no-{flag}")
        elif name != "vocab_size":
            options.append(f"--{flag} {theirs}")
    remedy = f"; train with {' '.join(options)}" if options else ""
    return ", ".join(words) + remedy


def check_sizes(config: ModelConfig, vocab_size: int, weights: dict[str, Tensor]) -> None:
    """Raise ValueError, in words, unless a model of this configuration has just these weights.

    Nothing is allocated, however large the sizes named: they are first held against the weights
    that are there, then the rest against a model of one block without memory.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    numbers = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    wanted = {"embed.weight": (vocab_size, config.d_model)}
    if config.positions == "learned":
        wanted[TABLE] = (config.context_length, config.d_model)
    if config.bigrams:
        wanted["bigrams.weight"] = (config.bigrams, config.d_model)
    if len(numbers) != config.n_layer:
        raise ValueError(f"n_layer is {config.n_layer:,}, there are weights of {len(numbers)}")
    _compare(shapes, wanted)
    with torch.device("meta"):
        shallow = GPT(dataclasses.replace(config, n_layer=1), vocab_size).state_dict()
    whole = {}
    for name, tensor in shallow.items():
        is_repeated = name.startswith("blocks.0.")
        for layer in range(config.n_layer if is_repeated else 1):
            whole[name.replace("blocks.0.", f"blocks.{layer}.")] = tuple(tensor.shape)
    _compare(shapes, whole)
    if others := sorted(shapes.keys() - whole.keys()):
        raise ValueError(f"there is no place for {others[0][:60]!r}")


def _compare(shapes: dict[str, tuple], wanted: dict[str, tuple]) -> None:
    for name, shape in wanted.items():
        if name not in shapes:
            raise ValueError(f"{name} is missing")
        if shapes[name] != shape:
            there = " x ".join(f"{size:,}" for size in shapes[name]) or "a number"
            here = " x ".join(f"{size:,}" for size in shape)
            raise ValueError(f"{name} is {there} there, {here} by the configuration")


def cut_positions(
    weights: dict[str, Tensor], theirs: ModelConfig, ours: ModelConfig
) -> tuple[dict[str, Tensor], ModelConfig, list[str]]:
    """For a model of a shorter context with learned positions: the weights with the first of the
    positions alone, the configuration they then have, and a line about it. Else all as it is.
    """
    both = theirs.positions == ours.positions == "learned" and TABLE in weights
    if not both or ours.context_length >= theirs.context_length:
        return weights, theirs, []
    cut = {**weights, TABLE: weights[TABLE][: ours.context_length]}
    note = (
        f"note     of {theirs.context_length:,} learned positions the first "
        f"{ours.context_length:,} are taken, as the context is shorter here"
    )
    return cut, dataclasses.replace(theirs, context_length=ours.context_length), [note]


def other_meaning(theirs: ModelConfig, ours: ModelConfig, origin: Any) -> list[str]:
    """A line where weights of `theirs` fit a model as `ours`, but mean something else in it."""
    found = [
        f"{name} is {getattr(theirs, name)} there and {getattr(ours, name)} here"
        for name in MEANING
        if getattr(theirs, name) != getattr(ours, name)
    ]
    if not found:
        return []
    return [f"note     the weights of {origin} fit, but {', '.join(found)}"]


def restore_moments(
    optimizers: list[torch.optim.Optimizer], moments: list[dict[str, Any]], origin: Any
) -> None:
    """Give each optimiser its state from a checkpoint. Raises UserError where that is another's."""
    try:
        for optimizer, state in zip(optimizers, moments, strict=True):
            optimizer.load_state_dict(scatter_optimizer(optimizer, state))
            for parameter, values in optimizer.state.items():
                for value in values.values():
                    if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                        raise ValueError(f"{tuple(value.shape)} for {tuple(parameter.shape)}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise UserError(
            f"the optimizer's moments in {origin} don't fit this run: start a new one with "
            "--init-from, which takes the weights alone"
        ) from None
