"""Attention: the equation, the mask, and the layer of many heads.

Scaled dot-product attention (Vaswani et al. 2017, "Attention Is All You Need", equation 1):

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

A query asks, keys answer, and the softmax of their scores says how much of each value is taken.
For n tokens of width d a layer costs O(n d^2) in the four projections and O(n^2 d) in scores and
weighted sum. `explicit_attention` holds the n^2 weights in memory. Its twin with the same contract,
`model.fast_attention.fast_attention`, mostly does not.

Tensors carry their shape in the name: B batch, T queries, S keys, H heads, G heads of keys and
values (mostly H), K head width, D model width. A size of 1 in B or H broadcasts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.positions import rotate, widen


def softmax(scores: Tensor) -> Tensor:
    """exp(x_i) / sum_j exp(x_j) over the last dimension, in float32 or better.

    Subtracting the row's maximum changes nothing in the quotient, and keeps every exponential
    between 0 and 1. A row that is -inf throughout (a query that may look at nothing) gives zeros,
    with zero gradients.
    """
    scores = widen(scores)
    maximum = scores.detach().amax(dim=-1, keepdim=True)
    exponentials = torch.exp(scores - maximum.masked_fill(maximum == -math.inf, 0.0))
    total = exponentials.sum(dim=-1, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1.0)


@dataclass(frozen=True)
class Mask:
    """Which keys a query may look at: a description, from which each attention takes what it needs.

    Row b holds `lengths[b]` keys (all S of them where `lengths` is None). What lies to the right of
    them is padding, and nothing looks there. Its queries are the last T of those keys, aligned at
    the lower right, so that a cached decoder with T < S is right. A row shorter than T starts at
    position 0, and its last queries are padding.
    """

    causal: bool = True
    """A query at position p sees keys at positions s <= p alone."""
    window: int = 0
    """A query sees keys at a distance |p - s| < window; 0: at any distance."""
    lengths: tuple[int, ...] | None = None
    """Keys in each of the B rows; any sequence or tensor of integers becomes a tuple."""

    def __post_init__(self):
        if self.lengths is not None:
            object.__setattr__(self, "lengths", tuple(int(length) for length in self.lengths))

    def may_look(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Whether causality and window let a query look at a key; the two shapes broadcast."""
        distance = query_position - key_position
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return allowed & (distance.abs() < self.window) if self.window else allowed

    def allowed(self, n_query: int, n_key: int, device: torch.device | None = None) -> Tensor:
        """Boolean of shape (B or 1, 1, T, S), True where query t may look at key s."""
        query = torch.arange(n_query, device=device)[:, None]
        key_position = torch.arange(n_key, device=device)
        if self.lengths is None:  # no tensor made of numbers: a GPU would wait for the copy
            return self.may_look(query + max(0, n_key - n_query), key_position)[None, None]
        lengths = torch.tensor(self.lengths, device=device)[:, None, None, None]
        query_position = (lengths - n_query).clamp(min=0) + query
        return self.may_look(query_position, key_position) & (key_position < lengths)


def attention_scores(q_BHTK: Tensor, k_BHSK: Tensor, mask: Mask) -> Tensor:
    """scores_BHTS: Q K^T / sqrt(d_head), and -inf where the mask forbids a look.

    Computed in float32 or better under any autocast. The product of two vectors of independent
    entries of variance 1 has variance d_head. The division brings it back to 1, lest the softmax
    saturate and its gradient vanish (Vaswani et al. 2017, section 3.2.1).
    """
    with torch.autocast(q_BHTK.device.type, enabled=False):
        scores_BHTS = widen(q_BHTK) @ widen(k_BHSK).mT / math.sqrt(q_BHTK.shape[-1])
    n_query, n_key = scores_BHTS.shape[-2:]
    allowed = mask.allowed(n_query, n_key, device=scores_BHTS.device)
    return scores_BHTS.masked_fill(~allowed, -math.inf)


def attention_weights(q_BHTK: Tensor, k_BHSK: Tensor, mask: Mask) -> Tensor:
    """weights_BHTS: softmax(Q K^T / sqrt(d_head)).

    Each row is a distribution over what the query may look at, or zeros if that is nothing.
    """
    return softmax(attention_scores(q_BHTK, k_BHSK, mask))


def explicit_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float = 0.0
) -> Tensor:
    """The equation, line by line: out_BHTK, the weighted sum of the values.

    `dropout` is the share of weights dropped.
    """
    weights_BHTS = attention_weights(q_BHTK, k_BHSK, mask)
    return F.dropout(weights_BHTS, dropout).to(v_BHSK.dtype) @ v_BHSK


Attend = Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor]
"""A way to compute attention: (q_BHTK, k_BHSK, v_BHSK, mask, dropout) -> out_BHTK."""
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A layer's cache: takes the new keys and values, gives back all of them."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the positions, for `rotate`."""


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Queries, keys and values are learned projections of the same tokens. The width is shared among
    the heads, so that all of them together cost what one of full width would. Each is free to look
    somewhere else.
    """

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.config = config
        self.attend = attend
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        d_keys = config.n_key_head * config.d_head
        self.key = nn.Linear(config.d_model, d_keys, bias=config.bias)
        self.value = nn.Linear(config.d_model, d_keys, bias=config.bias)
        self.project = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.d_head, eps=config.norm_eps)
            self.key_norm = nn.RMSNorm(config.d_head, eps=config.norm_eps)

    def projections(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """q_BHTK, k_BGTK and v_BGTK."""
        projected = (project(x_BTD) for project in (self.query, self.key, self.value))
        return tuple(y.unflatten(-1, (-1, self.config.d_head)).transpose(1, 2) for y in projected)

    def attend_in_groups(
        self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask, dropout: float
    ) -> Tensor:
        """out_BHTK, where a head of keys and values serves a group of heads of queries."""
        n_query = self.config.n_head // self.config.n_key_head
        k_BHSK, v_BHSK = (x.repeat_interleave(n_query, 1) for x in (k_BGSK, v_BGSK))
        return self.attend(q_BHTK, k_BHSK, v_BHSK, mask, dropout)

    def forward(
        self,
        x_BTD: Tensor,
        mask: Mask,
        rotation: Rotation | None = None,
        remember: Remember | None = None,
    ) -> Tensor:
        """out_BTD. `rotation` turns queries and keys by their positions. `remember` adds keys and
        values to a cache.
        """
        q_BHTK, k_BGTK, v_BGTK = self.projections(x_BTD)
        if self.config.qk_norm:
            q_BHTK = self.query_norm(widen(q_BHTK))
            k_BGTK = self.key_norm(widen(k_BGTK))
        if rotation is not None:
            q_BHTK = rotate(q_BHTK, *rotation)
            k_BGTK = rotate(k_BGTK, *rotation)
        q_BHTK = q_BHTK.to(v_BGTK.dtype)  # under autocast norms and rotations leave float32
        kept = k_BGTK.to(v_BGTK.dtype), v_BGTK
        if remember is not None:
            kept = remember(*kept)
        attend = self.attend_in_groups if self.config.n_kv_head else self.attend
        dropout = self.config.dropout if self.training else 0.0
        out_BHTK = attend(q_BHTK, *kept, mask, dropout)
        out_BTD = out_BHTK.transpose(1, 2).reshape(x_BTD.shape)
        return F.dropout(self.project(out_BTD), dropout)
