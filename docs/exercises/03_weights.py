"""Exercise 3, weights: see 03_weights.md. Check with `make exercise N=3`."""

import torch  # noqa: F401
from torch import Tensor

from model.attention import Mask, softmax  # noqa: F401


def attention_weights(q_BHTK: Tensor, k_BHSK: Tensor, mask: Mask) -> Tensor:
    """weights_BHTS: softmax(Q K^T / sqrt(d_head)) under the mask."""
    raise NotImplementedError
