"""Exercise 5, positions: see 05_positions.md. Check with `make exercise N=5`."""

import torch  # noqa: F401
from torch import Tensor


def rotary(x_BHTK: Tensor, positions: Tensor) -> Tensor:
    """Turn pair (x_i, x_(i + K/2)) by positions / 10000^(2 i / K)."""
    raise NotImplementedError
