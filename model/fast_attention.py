"""The same attention, faster: PyTorch's fused kernel, and the cases in which another way wins.

`fast_attention` keeps the contract of `model.attention.explicit_attention`. It takes one of three
ways, which `way` names, and in a compiled step on a GPU a fourth for windows, `flex_windows`:

    kernel  F.scaled_dot_product_attention, which goes through the n^2 weights tile by tile and
            holds O(n) of them (Dao et al. 2022, "FlashAttention")
    blocks  for a window: queries in blocks, each of which meets its neighbours' keys alone
    short   on a CPU in bfloat16, up to SHORT keys: whole matrix products, which hold the weights
            and round scores and weights to bfloat16
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Attend, Mask, explicit_attention
from model.flex_windows import flex_attention

SHORT = 512
"""Keys up to which whole products beat the kernel on a CPU in bfloat16: they take 0.3 to 0.6 of its
time, as the kernel multiplies its tiles in bfloat16 no faster than in float32 there.
"""
GPU_BLOCKS = 512
"""Keys from which blocks beat the kernel with a Boolean mask on a GPU. Windows of a quarter of the
text spare each query half of its n keys, and copying keys and values to their blocks costs as much
as about 250 (docs/gpu.md).
"""


def way(
    mask: Mask, n_query: int, n_key: int, device: str, dtype: torch.dtype
) -> Literal["kernel", "blocks", "short"]:
    """Which of the three ways `fast_attention` takes for these queries and keys. Padding, and a few
    queries behind many cached keys, are left to the kernel.
    """
    if mask.lengths is not None:
        return "kernel"
    if device == "cpu" and dtype == torch.bfloat16 and 1 < n_query <= n_key <= SHORT:
        return "short"
    least = 4 * mask.window if device == "cpu" else max(4 * mask.window, GPU_BLOCKS)
    if mask.window and n_query == n_key >= least:  # shorter: no cheaper in blocks
        return "blocks"
    return "kernel"


def holds_weights(
    attention: str, mask: Mask, n_token: int, device: str, dtype: torch.dtype, dropout: float
) -> bool:
    """Whether attention over `n_token` tokens holds all n^2 weights of a head in memory at once.

    `attention` is a key of ATTENTION. Explicit attention does. So do whole products, and on a CPU
    the kernel with dropout, which has no tiles then. Blocks hold n times the window at most.
    """
    if attention == "explicit":
        return True
    taken = way(mask, n_token, n_token, device, dtype)
    return taken == "short" or (taken == "kernel" and device == "cpu" and dropout > 0)


def fast_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float = 0.0
) -> Tensor:
    """softmax(Q K^T / sqrt(d_head)) V: out_BHTK, by the fastest way that the case allows.

    Values and gradients are those of `explicit_attention` up to rounding. The short way, taken on a
    CPU in bfloat16, rounds scores and weights to bfloat16; everywhere else they are float32.
    """
    n_query, n_key = q_BHTK.shape[-2], k_BHSK.shape[-2]
    taken = way(mask, n_query, n_key, q_BHTK.device.type, q_BHTK.dtype)
    if q_BHTK.shape[:2] != k_BHSK.shape[:2]:  # heads that share keys: the kernel broadcasts
        taken = "kernel"
    elif mask.window and n_query == n_key:
        out = flex_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout)
        if out is not None:
            return out
    if taken == "short":
        return _short_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout)
    if taken == "blocks":
        return _windowed_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout)
    return _kernel_attention(q_BHTK, k_BHSK, v_BHSK, mask, dropout)


def _kernel_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float
) -> Tensor:
    """PyTorch's kernel, told of the mask in the cheapest words: nothing, `is_causal`, or a Boolean.

    Its `is_causal` aligns the mask at the upper left, so it will do for as many queries as keys
    alone. A single query is the last one, and causality forbids it nothing.
    """
    n_query, n_key = q_BHTK.shape[-2], k_BHSK.shape[-2]
    is_causal, allowed = False, None
    if mask.lengths is not None or 0 < mask.window < n_key:
        allowed = mask.allowed(n_query, n_key, device=q_BHTK.device)
    elif mask.causal and n_query > 1:
        is_causal = n_query == n_key
        if not is_causal:
            allowed = mask.allowed(n_query, n_key, device=q_BHTK.device)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=allowed, dropout_p=dropout, is_causal=is_causal
    )


def attention_of_groups(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, mask: Mask, dropout: float = 0.0
) -> Tensor:
    """out_BHTK of one query a head (T = 1), where G heads of keys and values serve a group of heads
    of queries each: the queries of a group meet its keys as if they stood one behind the other.

    To repeat the keys for each head, as the equation does, would copy all that are kept, for every
    token drawn.
    """
    n_key = k_BGSK.shape[2]
    allowed = None
    if mask.lengths is not None or 0 < mask.window < n_key:
        allowed = mask.allowed(1, n_key, device=q_BHTK.device)
    queries = q_BHTK[:, :, 0].unflatten(1, (k_BGSK.shape[1], -1))
    out = F.scaled_dot_product_attention(
        queries, k_BGSK, v_BGSK, attn_mask=allowed, dropout_p=dropout
    )
    return out.flatten(1, 2)[:, :, None]


def _short_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float
) -> Tensor:
    """softmax(Q K^T / sqrt(d_head) + M) V, where M is 0 or -inf: whole products in bfloat16."""
    n_query, n_key = q_BHTK.shape[-2], k_BHSK.shape[-2]
    with torch.autocast(q_BHTK.device.type, enabled=False):
        allowed = mask.allowed(n_query, n_key)[0]
        forbidden = q_BHTK.new_zeros(allowed.shape).masked_fill(~allowed, -math.inf)
        queries, keys, values = (x.flatten(0, 1) for x in (q_BHTK, k_BHSK, v_BHSK))
        scale = 1 / math.sqrt(q_BHTK.shape[-1])
        scores = torch.baddbmm(forbidden, queries, keys.mT, alpha=scale)
        weights = F.dropout(F.softmax(scores, dim=-1), dropout)
        return (weights @ values).unflatten(0, q_BHTK.shape[:2])


def _windowed_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask, dropout: float
) -> Tensor:
    """Attention within a window, in time linear in T: each block of queries meets its neighbours.

    A block is as long as the window, so its queries reach no farther than the block before it and,
    when not causal, the one behind it.
    """
    n_batch, n_head, n_token, d_head = q_BHTK.shape
    size = mask.window
    n_block = math.ceil(n_token / size)
    n_behind = 0 if mask.causal else 1

    def blocks(x: Tensor, before: int, behind: int) -> Tensor:
        """(B, H, T, K) -> (B H, n_block, (before + 1 + behind) size, K): each block with its
        neighbours, zeros past the ends.
        """
        padded = F.pad(x, (0, 0, before * size, (n_block + behind) * size - n_token))
        cut = padded.unfold(2, (before + 1 + behind) * size, size).mT
        return cut.reshape(n_batch * n_head, n_block, -1, d_head)

    device = q_BHTK.device
    start = size * torch.arange(n_block, device=device)[:, None, None]
    query_position = start + torch.arange(size, device=device)[:, None]
    key_position = start - size + torch.arange((2 + n_behind) * size, device=device)
    exists = (key_position >= 0) & (key_position < n_token)
    allowed = (mask.may_look(query_position, key_position) & exists)[None]
    out = F.scaled_dot_product_attention(
        blocks(q_BHTK, 0, 0),
        blocks(k_BHSK, 1, n_behind),
        blocks(v_BHSK, 1, n_behind),
        attn_mask=allowed,
        dropout_p=dropout,
    )
    return out.reshape(n_batch, n_head, -1, d_head)[:, :, :n_token]


ATTENTION: dict[str, Attend] = {"fast": fast_attention, "explicit": explicit_attention}
"""The choices of `--attention`."""
