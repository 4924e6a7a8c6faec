"""Whether the numbers of a model's shape fit together. Imports the standard library alone."""

from dataclasses import fields
from typing import Any, get_args

LEAST = {
    **dict.fromkeys(("n_layer", "n_head", "d_model", "context_length"), 1),
    **dict.fromkeys(("n_kv_head", "d_ff", "window", "bigrams"), 0),
}
"""Field -> the smallest number it may be."""


def check_shape(config: Any) -> None:
    """Raise ValueError, in words, where the fields of a ModelConfig do not fit together."""
    for field in fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)
        if choices and value not in choices:
            raise ValueError(f"{field.name} is {value!r}; it must be one of {', '.join(choices)}")
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {least}")
    for name in ("rope_base", "norm_eps"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be above 0 and finite")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout is {config.dropout}; it must be at least 0 and below 1")
    _check_heads(config)
    _check_positions(config)


def _check_heads(config: Any) -> None:
    if config.d_model % config.n_head:
        raise ValueError(
            f"d_model {config.d_model} does not divide into n_head {config.n_head} equal heads"
        )
    if config.n_head % config.n_key_head:
        raise ValueError(
            f"n_kv_head {config.n_kv_head} does not divide n_head {config.n_head} into equal groups"
        )


def _check_positions(config: Any) -> None:
    if config.positions == "rotary" and config.d_head % 2:
        raise ValueError(
            f"rotary positions turn pairs, but d_head = d_model / n_head = {config.d_head} is odd"
        )
    if config.positions == "sinusoidal" and config.d_model % 2:
        raise ValueError(f"sinusoidal positions come in pairs, but d_model {config.d_model} is odd")
    usual = type(config).rope_base
    if config.positions != "rotary" and config.rope_base != usual:
        raise ValueError(
            f"rope_base is {config.rope_base:g}, but positions are {config.positions}: "
            f"it belongs to rotary ones; leave it at {usual:g}"
        )
