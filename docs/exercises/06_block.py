"""Exercise 6, block: see 06_block.md. Check with `make exercise N=6`."""

from torch import Tensor

from model.attention import Mask
from model.gpt import Block


def block(x_BTD: Tensor, layers: Block, mask: Mask) -> Tensor:
    """The stream after attention and MLP have added to it."""
    raise NotImplementedError
