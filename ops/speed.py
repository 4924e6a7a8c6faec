"""How fast this machine multiplies matrices, and how many multiplications a model asks for."""

import time

import torch
from torch import nn

from ops.device import DTYPES

LONG_PRODUCT = 5e-4
"""Seconds of a product that is large enough to tell the hardware's rate."""


def matrix_rate(device: str, precision: str, size: int = 0) -> float:
    """FLOPs per second of a product of two square matrices here and now: the best of a few.

    Without a `size` widths are doubled until a product takes `LONG_PRODUCT`. So a fast GPU is kept
    busy, and a precision that the hardware only emulates is done with in moments.
    """
    width = size or 128
    while True:
        a = torch.randn(width, width, device=device, dtype=DTYPES[precision])
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            for _ in range(3):
                product = a @ a
            product[0, 0].item()  # waits for a GPU
            best = min(best, (time.perf_counter() - began) / 3)
        if size or best > LONG_PRODUCT or width == 8192:
            return 2 * width**3 / best
        width *= 2


def flops_per_token(model: nn.Module) -> float:
    """6 N + 12 n_layer d_model T: forward and backward through the N weights that multiply, and
    attention's two products.

    Chowdhery et al. 2022, "PaLM", appendix B; a table that is only looked up (embeddings that
    aren't tied, bigrams, learned positions) doesn't count into N.
    """
    config = model.config
    looked_up = 0 if config.tie_embeddings else model.embed.weight.numel()
    looked_up += config.context_length * config.d_model if config.positions == "learned" else 0
    looked_up += config.bigrams * config.d_model
    n_weight = sum(p.numel() for p in model.parameters()) - looked_up
    return 6 * n_weight + 12 * config.n_layer * config.d_model * config.context_length
