"""Where a token stands. Attention alone is blind to order: permute its inputs and its outputs are
permuted alike.

Four ways to tell: a learned table, sines and cosines, rotation, or nothing (a causal mask still
leaks some order).
"""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig


def widen(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it is that already: for what autocast must not round (norms,
    rotations, scores, softmax).
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _angles(positions: Tensor, width: int, base: float = 10_000.0) -> Tensor:
    """pos / base^(2 i / width) for i = 0 ... width/2 - 1: shape (..., width / 2), float32."""
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    return positions[..., None].float() * torch.exp(-math.log(base) * exponents)


def sinusoid(positions: Tensor, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(same): shape (..., d_model).

    Vaswani et al. 2017, section 3.5.
    """
    angles = _angles(positions, d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair (x_i, x_(i + K/2)) of each head by an angle that grows with the position (Su et al.
    2021, "RoFormer").

    Turning query and key alike leaves in their product the difference of their positions alone.
    Pairs are taken half a head apart, as in Hugging Face's Llama. x: (B, H or G, T, K), `cos` and
    `sin`: (B or 1, 1, T, K/2). Computed in float32; the result has the dtype of x.
    """
    left, right = widen(x).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Positions(nn.Module):
    """No positions; the base of the three other kinds. `positions` are integers of shape (B or 1,
    T).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    def add(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings with what the positions add to them."""
        return x_BTD

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines for `rotate`, or None."""
        return None


class LearnedPositions(Positions):
    """A vector per position, learned like any other (Gehring et al. 2017; GPT-2)."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.table = nn.Embedding(config.context_length, config.d_model)

    def add(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        return x_BTD + self.table(positions)


class SinusoidalPositions(Positions):
    """Fixed sines and cosines (Vaswani et al. 2017, section 3.5), scaled to the embeddings'
    standard deviation of 0.02.

    The paper scales the embeddings up instead (section 3.4); where they are tied, every token would
    at first predict itself.
    """

    def add(self, x_BTD: Tensor, positions: Tensor) -> Tensor:
        return x_BTD + 0.02 * math.sqrt(2) * sinusoid(positions, self.config.d_model).to(
            x_BTD.dtype
        )


class RotaryPositions(Positions):
    """Nothing is added; every layer turns its queries and keys."""

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = _angles(positions, self.config.d_head, self.config.rope_base)[:, None]
        return angles.cos(), angles.sin()


KINDS = {
    "none": Positions,
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "rotary": RotaryPositions,
}
