"""Exercise 4, heads: see 04_heads.md. Check with `make exercise N=4`."""

import torch  # noqa: F401
from torch import Tensor

from model.attention import CausalSelfAttention, Mask, explicit_attention  # noqa: F401


def multi_head(x_BTD: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    """out_BTD: project, cut into heads, attend, join, project."""
    raise NotImplementedError
