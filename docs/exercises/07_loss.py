"""Exercise 7, loss: see 07_loss.md. Check with `make exercise N=7`."""

from collections.abc import Callable

import torch  # noqa: F401
from torch import Tensor


def loss(model: Callable[[Tensor], Tensor], text_BL: Tensor) -> Tensor:
    """The mean of -ln p over the predictions of a text."""
    raise NotImplementedError
