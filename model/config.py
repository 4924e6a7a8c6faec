"""The shape of a model. Imports no torch, so that a command line can be parsed in an instant.

The vocabulary is not part of it: the tokenizer says how large that is, and `GPT` takes it beside a
ModelConfig.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args


@dataclass(frozen=True)
class ModelConfig:
    """Architecture. The defaults are those of GPT-2 (Radford et al. 2019) at its smallest size."""

    n_layer: int = 12
    """Blocks, each an attention and an MLP."""
    n_head: int = 12
    """Attention heads in a block; they share d_model evenly."""
    d_model: int = 768
    """Width of the residual stream."""
    context_length: int = 1024
    """Tokens the model sees at once."""
    positions: Literal["learned", "sinusoidal", "rotary", "none"] = "learned"
    """How a token's place is told: a learned table, sines and cosines, rotated queries and keys, or
    not at all.
    """
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation before each attention and MLP and at the end."""
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
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if choices and value not in choices:
                raise ValueError(
                    f"{field.name} is {value!r}; it must be one of {', '.join(choices)}"
                )
        for least, names in (
            (1, ("n_layer", "n_head", "d_model", "context_length")),
            (0, ("window", "bigrams")),
        ):
            for name in names:
                if getattr(self, name) < least:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}; it must be at least {least}"
                    )
        if self.d_model % self.n_head:
            raise ValueError(
                f"d_model {self.d_model} does not divide into n_head {self.n_head} equal heads"
            )
        if self.positions == "rotary" and self.d_head % 2:
            raise ValueError(
                f"rotary positions turn pairs, but d_head = d_model / n_head = {self.d_head} is odd"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"sinusoidal positions come in pairs, but d_model {self.d_model} is odd"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")

    @property
    def d_head(self) -> int:
        """Width of one head's queries, keys and values."""
        return self.d_model // self.n_head

    @property
    def d_ff(self) -> int:
        """Width of the MLP: 4 d_model, or 8/3 d_model for SwiGLU, whose three matrices then cost
        what two do (Shazeer 2020).
        """
        return 8 * max(1, round(self.d_model / 3)) if self.mlp == "swiglu" else 4 * self.d_model
