"""Windows in a compiled step on a GPU: one kernel that passes by what no query may look at.

PyTorch's flex_attention (Dong et al. 2024, "FlexAttention") compiles the mask into a kernel of
FlashAttention's form and skips the blocks of 128 x 128 scores that lie outside it. The kernels
behind F.scaled_dot_product_attention know no window: they would read a Boolean mask, which keeps
them from flash attention, and go through all n^2 scores.

Which blocks there are is worked out before the step is compiled, once for a mask and a length
(`prepare`). Elsewhere, and in an eager step, windows stay with `model.fast_attention`'s blocks.
"""

from typing import Any

import torch
from torch import Tensor

from model.attention import Mask

DEVICES = {"cuda"}
"""Kinds of device whose compiler makes a backward pass of it."""
LEAST_HEAD = 16
"""Least width of a head that the kernel takes, one tile of a tensor core."""

_prepared: dict[tuple[Mask, int, torch.device], Any] = {}


def why_not(
    mask: Mask, n_token: int, device: str, d_head: int, dropout: float, compiled: bool
) -> str | None:
    """Why a step over `n_token` tokens can't take its window to flex_attention, in a few words;
    None where it can. `device` is a kind, as "cuda"; `dropout` is of attention's weights.
    """
    if not 0 < mask.window < n_token or mask.lengths is not None:
        return "there is no window"
    if device not in DEVICES:
        return "it is for CUDA"
    if not compiled:
        return "it needs a compiled step, --compile on"
    if dropout > 0:
        return "it has no dropout"
    if d_head < LEAST_HEAD:
        return f"it needs heads of {LEAST_HEAD} or wider"
    return None


def prepare(mask: Mask, n_token: int, device: torch.device) -> None:
    """Work out which blocks of scores hold a key that a query may look at, for `n_token` queries
    and keys on `device`; steps compiled from now on use it.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def may_look(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.may_look(query, key)

    size = (n_token, n_token)
    _prepared[mask, n_token, device] = create_block_mask(may_look, None, None, *size, device=device)


def forget() -> bool:
    """Let what was prepared go, so that windows are taken in blocks; whether there was any."""
    found = bool(_prepared)
    _prepared.clear()
    return found


def flex_attention(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Mask, dropout: float
) -> Tensor | None:
    """out_BHTK where a compiler is at work and `prepare` has been called for this mask, length and
    device; else None.
    """
    place = (mask, q_BHTK.shape[-2], q_BHTK.device)
    if dropout > 0 or not torch.compiler.is_compiling() or place not in _prepared:
        return None
    from torch.nn.attention.flex_attention import flex_attention as kernel

    return kernel(q_BHTK, k_BHTK, v_BHTK, block_mask=_prepared[place])
