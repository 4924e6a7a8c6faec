"""Exercise 9, cache: see 09_cache.md. Check with `make exercise N=9`."""

from collections.abc import Callable
from typing import Any

import torch  # noqa: F401
from torch import Tensor

from model.attention import CausalSelfAttention, Mask, attention_weights  # noqa: F401
from model.positions import rotate  # noqa: F401


def step(
    x_BTD: Tensor, layer: CausalSelfAttention, rotation_of: Callable, past: Any
) -> tuple[Tensor, Any]:
    """out_BTD of the new tokens, and what the next step needs of them and of `past`."""
    raise NotImplementedError
