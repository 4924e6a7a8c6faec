"""Attention: the equation, a fused twin that trains fast, and the block that uses either.

Scaled dot-product attention (Vaswani et al. 2017, "Attention Is All You Need", equation 1):

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

A query asks, keys answer, and the softmax of their scores says how much of each value is taken. For
n tokens of width d a layer costs O(n d^2) in the four projections and O(n^2 d) in scores and
weighted sum. `explicit_attention` holds the n^2 weights in memory; `fused_attention` goes through
them tile by tile (Dao et al. 2022, "FlashAttention") and, as a rule, holds O(n).

Tensors carry their shape in the name: B batch, T queries, S keys, H heads, K head width, D model
width; B or H of 1 broadcasts.
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

    Subtracting the row's maximum changes nothing in the quotient and keeps every exponential in (0,
    1]. A row that is -inf throughout (a query that may look at nothing) gives zeros, with zero
    gradients.
    """
    scores = widen(scores)
    maximum = scores.detach().amax(dim=-1, keepdim=True)
    exponentials = torch.exp(scores - maximum.masked_fill(maximum == -math.inf, 0.0))
    total = exponentials.sum(dim=-1, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1.0)


@dataclass(frozen=True)
class Mask:
    """Which keys a query may look at: a description, from which each attention takes what it needs.

    Row b holds `lengths[b]` keys (all S of them where `lengths` is None); what lies to the right of
    them is padding, and nothing looks there. Its queries are the last T of those keys, aligned at
    the lower right, so that a cached decoder with T < S is right; a row shorter than T starts at
    position 0, and its last queries are padding.
    """

    causal: bool = True
    """A query at position p sees keys at positions s <= p alone."""
    window: int = 0
    """A query sees keys at a distance |p - s| < window; 0: at any distance."""
    lengths: Tensor | None = None
    """Keys in each row, integers of shape (B,)."""

    def near(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """Whether causality and window let a query look at a key; the two shapes broadcast."""
        distance = query_position - key_position
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        return allowed & (distance.abs() < self.window) if self.window else allowed

    def allowed(self, n_query: int, n_key: int, device: torch.device | None = None) -> Tensor:
        """Boolean of shape (B or 1, 1, T, S), True where query t may look at key s."""
        lengths = (
            torch.tensor([n_key], device=device)
            if self.lengths is None
            else self.lengths.to(device)
        )
        lengths = lengths[:, None, None, None]
        query_position = (lengths - n_query).clamp(min=0) + torch.arange(n_query, device=device)[
            :, None
        ]
        key_position = torch.arange(n_key, device=device)
        return self.near(query_position, key_position) & (key_position < lengths)


def attention_scores(q_BHTK: Tensor, k_BHSK: Tensor, mask: Mask) -> Tensor:
    """Q K^T / sqrt(d_head), and -inf where the mask forbids a look: scores_BHTS in float32 or
    better, under any autocast.

    The product of two vectors of independent unit-variance entries has variance d_head; the
    division brings it back to 1, lest the softmax saturate and its gradient vanish (Vaswani et al.
    2017, section 3.2.1).
    """
    with torch.autocast(q_BHTK.device.type, enabled=False):
        scores_BHTS = widen(q_BHTK) @ widen(k_BHSK).mT / math.sqrt(q_BHTK.shape[-1])
    allowed = mask.allowed(*scores_BHTS.shape[-2:], device=scores_BHTS.device)
    return scores_BHTS.masked_fill(~allowed, -math.inf)


def attention_weights(q_BHTK: Tensor, k_BHSK: Tensor, mask: Mask) -> Tensor:
    """softmax(Q K^T / sqrt(d_head)): weights_BHTS, each row a distribution over what it may look at
    (zeros if nothing).
    """
    return softmax(attention_scores(q_BHTK, k_BHSK, mask))


def explicit_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float = 0.0
) -> Tensor:
    """The equation, line by line: out_BHTK, the weighted sum of the values. `dropout` is the share
    of weights dropped.
    """
    weights_BHTS = attention_weights(q_BHTK, k_BHSK, mask)
    return F.dropout(weights_BHTS, dropout).to(v_BHSK.dtype) @ v_BHSK


SHORT = 512
"""Keys up to which `fused_attention` holds the weights on a CPU in bfloat16: few as they are, that
is faster.
"""


def fused_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float = 0.0
) -> Tensor:
    """The same by PyTorch's fused kernel: out_BHTK. On a CPU it holds the weights with dropout, and
    SHORT ones in bfloat16.
    """
    n_query, n_key = q_BHTK.shape[-2], k_BHSK.shape[-2]
    is_short = (
        1 < n_query <= n_key <= SHORT
        and mask.lengths is None
        and q_BHTK.shape[:2] == k_BHSK.shape[:2]
    )
    if is_short and q_BHTK.device.type == "cpu" and q_BHTK.dtype == torch.bfloat16:
        return _short_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout)
    window = mask.window if mask.window < n_key else 0
    if (
        mask.lengths is None and window and n_query == n_key and 4 * window <= n_key
    ):  # longer ones are no cheaper in blocks
        return _windowed_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout)
    is_whole = mask.lengths is None and not window
    sees_all = is_whole and (not mask.causal or n_query == 1)  # a single query is the last one
    is_causal = (
        is_whole and not sees_all and n_query == n_key
    )  # the kernel's is_causal aligns at the upper left
    allowed = None if sees_all or is_causal else mask.allowed(n_query, n_key, device=q_BHTK.device)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=allowed, dropout_p=dropout, is_causal=is_causal
    )


def _short_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float
) -> Tensor:
    """softmax(Q K^T / sqrt(d_head) + M) V with M 0 or -inf: the equation once more, scores and
    weights rounded to bfloat16.

    On CPUs PyTorch's fused kernel multiplies its tiles in bfloat16 no faster than in float32; this
    takes 0.3 to 0.6 of its time.
    """
    with torch.autocast(q_BHTK.device.type, enabled=False):
        allowed = mask.allowed(q_BHTK.shape[-2], k_BHSK.shape[-2])[0]
        forbidden = q_BHTK.new_zeros(allowed.shape).masked_fill(~allowed, -math.inf)
        queries, keys, values = (x.flatten(0, 1) for x in (q_BHTK, k_BHSK, v_BHSK))
        scores = torch.baddbmm(forbidden, queries, keys.mT, alpha=1 / math.sqrt(q_BHTK.shape[-1]))
        return (F.dropout(F.softmax(scores, dim=-1), dropout) @ values).unflatten(
            0, q_BHTK.shape[:2]
        )


def _windowed_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float
) -> Tensor:
    """Attention within a window, in time linear in T: queries are cut into blocks, and a block
    meets only its neighbours' keys.

    A block is as long as the window, so its queries reach no farther than the block before it and,
    when not causal, behind it.
    """
    (n_batch, n_head, n_token, d_head), size = q_BHTK.shape, mask.window
    n_block, n_behind = math.ceil(n_token / size), 0 if mask.causal else 1

    def blocks(x: Tensor, before: int, behind: int) -> Tensor:
        """(B, H, T, K) -> (B H, n_block, (before + 1 + behind) size, K): each block with its
        neighbours, zeros past the ends.
        """
        padded = F.pad(x, (0, 0, before * size, (n_block + behind) * size - n_token))
        return padded.unfold(2, (before + 1 + behind) * size, size).mT.reshape(
            n_batch * n_head, n_block, -1, d_head
        )

    start = size * torch.arange(n_block, device=q_BHTK.device)[:, None, None]
    query_position = start + torch.arange(size, device=q_BHTK.device)[:, None]
    key_position = start - size + torch.arange((2 + n_behind) * size, device=q_BHTK.device)
    allowed = (
        mask.near(query_position, key_position) & (key_position >= 0) & (key_position < n_token)
    )[None]
    keys, values = blocks(k_BHSK, 1, n_behind), blocks(v_BHSK, 1, n_behind)
    out = F.scaled_dot_product_attention(
        blocks(q_BHTK, 0, 0), keys, values, attn_mask=allowed, dropout_p=dropout
    )
    return out.reshape(n_batch, n_head, -1, d_head)[:, :, :n_token]


class KVCache:
    """Keys and values of the tokens already read, one pair of (B, H, capacity, K) tensors a layer,
    and a length per row.

    Each row writes at its own position, so rows of unequal length need no padding on the left.
    """

    def __init__(self, n_row: int, capacity: int):
        self.lengths, self.capacity = [0] * n_row, capacity
        self.last = [0] * n_row  # each row's last token, where the model has to know it
        self.layers: list[tuple[Tensor, Tensor]] = []

    def write(self, layer: int, k_BHTK: Tensor, v_BHTK: Tensor) -> tuple[Tensor, Tensor]:
        """Put T new positions behind each row's own and return the (B, H, S, K) keys and values up
        to the longest row's end.

        The lengths move on once all layers have written (`GPT` does it). What lies behind a row's
        end is unspecified but finite.
        """
        n_row, n_head, n_new, d_head = k_BHTK.shape
        if layer == len(self.layers):
            empty = k_BHTK.new_zeros(n_row, n_head, self.capacity, d_head)
            self.layers.append((empty, empty.clone()))
        first, longest = min(self.lengths), max(self.lengths)
        if longest + n_new > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens a row: {n_new} more do not fit behind {longest}"
            )
        for store, new in zip(self.layers[layer], (k_BHTK, v_BHTK), strict=True):
            if first == longest:
                store.narrow(2, first, n_new).copy_(new)
            else:
                start = torch.tensor(self.lengths, device=new.device)[:, None]
                rows = torch.arange(n_row, device=new.device)[:, None]
                store[rows, :, start + torch.arange(n_new, device=new.device)] = new.transpose(1, 2)
        keys, values = self.layers[layer]
        return keys.narrow(2, 0, longest + n_new), values.narrow(2, 0, longest + n_new)

    def replace(self, rows: list[int], other: "KVCache") -> None:
        """Put the rows of `other`, in order, in the place of the rows named."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for store, new in zip(mine, theirs, strict=True):
                store[rows] = new
        for row, length, last in zip(rows, other.lengths, other.last, strict=True):
            self.lengths[row], self.last[row] = length, last


Attend = Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor]
Remember = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Rotation = tuple[Tensor, Tensor]


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Queries, keys and values are learned projections of the same tokens. The width is shared among
    the heads, so that all of them together cost what one of full width would; each is free to look
    somewhere else.
    """

    def __init__(self, config: ModelConfig, attend: Attend):
        super().__init__()
        self.query = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.key = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.value = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.project = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                nn.RMSNorm(config.d_head, eps=1e-5),
                nn.RMSNorm(config.d_head, eps=1e-5),
            )
        self.config, self.attend = config, attend

    def projections(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (B, H, T, K) each."""
        projected = (project(x_BTD) for project in (self.query, self.key, self.value))
        return tuple(y.unflatten(-1, (self.config.n_head, -1)).transpose(1, 2) for y in projected)

    def forward(
        self,
        x_BTD: Tensor,
        mask: Mask,
        rotation: Rotation | None = None,
        remember: Remember | None = None,
    ) -> Tensor:
        """out_BTD. `rotation` turns queries and keys by their positions; `remember` adds keys and
        values to a cache.
        """
        q_BHTK, k_BHTK, v_BHTK = self.projections(x_BTD)
        if self.config.qk_norm:
            q_BHTK, k_BHTK = self.query_norm(widen(q_BHTK)), self.key_norm(widen(k_BHTK))
        if rotation is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, *rotation), rotate(k_BHTK, *rotation)
        q_BHTK, k_BHTK = (
            q_BHTK.to(v_BHTK.dtype),
            k_BHTK.to(v_BHTK.dtype),
        )  # norms and rotations may leave float32 under autocast
        k_BHSK, v_BHSK = remember(k_BHTK, v_BHTK) if remember else (k_BHTK, v_BHTK)
        dropout = self.config.dropout if self.training else 0.0
        out_BHTK = self.attend(q_BHTK, k_BHSK, v_BHSK, mask, dropout)
        return F.dropout(self.project(out_BHTK.transpose(1, 2).reshape(x_BTD.shape)), dropout)
