"""The shape of a model. Imports no torch, so that a command line can be parsed in an instant.

The vocabulary is not part of it: the tokenizer says how large that is, and `GPT` takes it beside a
ModelConfig.
"""

from dataclasses import dataclass
from typing import Literal

from model.checks import check_shape


@dataclass(frozen=True)
class ModelConfig:
    """Architecture. The defaults are those of GPT-2 (Radford et al. 2019) at its smallest size."""

    n_layer: int = 12
    """Blocks, each an attention and an MLP."""
    n_head: int = 12
    """Attention heads in a block; they share d_model evenly."""
    n_kv_head: int = 0
    """Heads of keys and values, each for as many heads of queries (Ainslie et al. 2023, "GQA"); 0:
    n_head.
    """
    d_model: int = 768
    """Width of the residual stream."""
    d_ff: int = 0
    """Width of the MLP; 0: 4 d_model, or 8/3 d_model for swiglu."""
    context_length: int = 1024
    """Tokens the model sees at once."""
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    """How a token's place is told: a learned table, sines and cosines, rotated queries and keys, or
    not at all.
    """
    rope_base: float = 10_000.0
    """Rotary wavelengths run from 2 pi to 2 pi times this (rope_theta elsewhere)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each attention and MLP and at the end."""
    norm_eps: float = 1e-5
    """What norms add to the variance or mean square."""
    mlp: Literal["gelu", "gelu_exact", "relu2", "swiglu"] = "gelu"
    """Non-linearity of the MLP; gelu is GPT-2's tanh form, and swiglu has a third matrix and is
    narrower for it.
    """
    qk_norm: bool = False
    """Normalise each head's queries and keys (RMSNorm) before the scores."""
    zero_init: bool = False
    """Start the projections that write to the residual stream at zero: each block is the identity
    at first.
    """
    tie_embeddings: bool = True
    """Read tokens and predict tokens with one matrix."""
    bias: bool = True
    """Biases in linear layers and LayerNorm."""
    dropout: float = 0.0
    """Share of embeddings, attention weights and residual updates dropped in training."""
    window: int = 0
    """Positions each query may look back on, itself included; 0: all of them."""
    bigrams: int = 0
    """Vectors, shared out among pairs (token before, token), that are added to the embeddings; 0:
    none.
    """

    def __post_init__(self):
        """Raise ValueError where the numbers do not fit together."""
        check_shape(self)

    @property
    def d_head(self) -> int:
        """Width of one head's queries, keys and values."""
        return self.d_model // self.n_head

    @property
    def n_key_head(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def d_mlp(self) -> int:
        """Width of the MLP: unless given 4 d_model, or 8/3 d_model for SwiGLU, whose three matrices
        then cost what two do (Shazeer 2020).
        """
        usual = 8 * max(1, round(self.d_model / 3)) if self.mlp == "swiglu" else 4 * self.d_model
        return self.d_ff or usual
