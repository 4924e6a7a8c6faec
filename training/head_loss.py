"""The loss on an accelerator: head and cross-entropy in one function that never holds all logits.

The logits of a micro-batch are a step's largest tensor: for 16 x 1,024 tokens over 50,257 ids they
take 1.5 GiB in bfloat16, and cross-entropy holds two more of 3 GiB in float32. Here the rows (one
for each token) are taken in chunks, and a chunk's gradient is computed at once, while its logits
are there, as Liger's kernels do (Hsu et al. 2024, "Liger Kernel"). So the head costs the three
matrix products it costs anyway; computing the logits again in the backward pass would be a fourth.
What is kept for the backward pass is the gradient of the features and that of the weight.

The head's product runs over a multiple of 64 ids, as tensor cores want aligned rows: 50,257 become
50,304. The rows added to the weight live in this function alone. They are cut off before the
softmax, so no probability falls to them.

torch's own `F.linear_cross_entropy` is built alike, but keeps the weight's gradient in the dtype of
its inputs, rounding once a chunk, pads nothing, and is closed to the compiler, which would not fuse
softmax and gradient into one pass over the logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.gpt import GPT
from training.loss import cross_entropy

ALIGNMENT = 64
"""The product's ids are a multiple of this."""
CHUNK_BYTES = 1 << 30
"""Bytes that a chunk's logits may take in float32. Each chunk costs a pass over the gradient of the
weight; chunks of thousands of rows make that a per cent of a step.
"""
FLOAT16_ROWS = 1024
"""Rows of a chunk in float16 at most: a sum of more products might leave its range, which ends at
65,504, and no loss scale would bring it back, as that comes afterwards.
"""


def padded_size(vocab_size: int) -> int:
    """The ids that the product runs over."""
    return -(-vocab_size // ALIGNMENT) * ALIGNMENT


def chunk_rows(n_row: int, vocab_size: int, dtype: torch.dtype) -> int:
    """The rows of a chunk: as few chunks as `CHUNK_BYTES` allows, of nearly the same size, which is
    a multiple of 128 where there is more than one.
    """
    limit = max(128, CHUNK_BYTES // (4 * padded_size(vocab_size)) // 128 * 128)
    if dtype == torch.float16:
        limit = min(limit, FLOAT16_ROWS)
    n_chunk = -(-n_row // limit)
    return n_row if n_chunk <= 1 else -(-n_row // n_chunk // 128) * 128


def pad_weight(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, with rows of zeros up to `padded_size`; itself where it is so."""
    n_missing = padded_size(len(weight_VD)) - len(weight_VD)
    if n_missing == 0:
        return weight_VD.to(dtype)
    padded = weight_VD.new_zeros(len(weight_VD) + n_missing, weight_VD.shape[1], dtype=dtype)
    padded[: len(weight_VD)] = weight_VD
    return padded


def log_probabilities(logits: Tensor, vocab_size: int) -> Tensor:
    """log softmax over the ids that exist, in float32 (float64 stays); `logits` are padded ones."""
    real = logits[:, :vocab_size]
    return F.log_softmax(real if real.dtype == torch.float64 else real.float(), dim=-1)


class _HeadLoss(torch.autograd.Function):
    """The sum of -log p of the targets over rows of features: (N, D), (V, D), (N,) -> ()."""

    @staticmethod
    def forward(
        ctx: Any,
        features_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        n_row: int,
        dtype: torch.dtype,
    ) -> Tensor:
        vocab_size = len(weight_VD)
        padded = pad_weight(weight_VD, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=padded.device)
        weight_gradient = torch.zeros(padded.shape, dtype=wide, device=padded.device)
        feature_gradients = []
        chunks = zip(features_ND.split(n_row), targets_N.split(n_row), strict=True)
        for features, targets in chunks:
            x = features.to(dtype)
            logits = x @ padded.mT
            log_p = log_probabilities(logits, vocab_size)
            loss = loss - log_p.gather(1, targets[:, None]).sum()
            # The gradient takes the place of the logits: softmax less 1 at the target, zeros in the
            # padding. The 1/N of a mean comes in the backward pass, as float16 has no room for it.
            logits[:, :vocab_size] = subtract_targets(log_p, targets)
            del log_p
            logits[:, vocab_size:] = 0.0
            feature_gradients.append(logits @ padded)
            weight_gradient += logits.mT @ x
            del logits
        ctx.save_for_backward(torch.cat(feature_gradients), weight_gradient[:vocab_size])
        ctx.dtypes = features_ND.dtype, weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_features, of_weight = ctx.saved_tensors
        feature_dtype, weight_dtype = ctx.dtypes
        return (
            of_features.to(feature_dtype) * gradient.to(feature_dtype),
            (of_weight * gradient).to(weight_dtype),
            None,
            None,
            None,
        )


def subtract_targets(log_p: Tensor, targets: Tensor) -> Tensor:
    """softmax - one_hot(targets): in place where nobody compiles; a compiler fuses the other form
    into its pass over the logits, where an indexed write would break that in three.
    """
    if torch.compiler.is_compiling():
        is_target = torch.arange(log_p.shape[1], device=log_p.device) == targets[:, None]
        return log_p.exp() - is_target.to(log_p.dtype)
    p = log_p.exp_()
    p[torch.arange(len(p), device=p.device), targets] -= 1.0
    return p


def head_loss(
    features_BTD: Tensor,
    weight_VD: Tensor,
    targets_BT: Tensor,
    reduction: str = "mean",
    n_row: int = 0,
) -> Tensor:
    """`cross_entropy(F.linear(features, weight), targets, reduction)`, in nats, in chunks of
    `n_row` rows (0: as `chunk_rows` says), in autocast's dtype where that is on. It can be
    differentiated once.
    """
    kind = features_BTD.device.type
    dtype = features_BTD.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    features, targets = features_BTD.flatten(0, -2), targets_BT.flatten()
    n_row = n_row or chunk_rows(len(targets), len(weight_VD), dtype)
    if torch.is_grad_enabled():
        total = _HeadLoss.apply(features, weight_VD, targets, n_row, dtype)
    else:
        padded = pad_weight(weight_VD, dtype)
        parts = []
        for x, ids in zip(features.split(n_row), targets.split(n_row), strict=True):
            log_p = log_probabilities(x.to(dtype) @ padded.mT, len(weight_VD))
            parts.append(-log_p.gather(1, ids[:, None]).sum())
        total = torch.stack(parts).sum()
    return total / len(targets) if reduction == "mean" else total


def in_chunks(device: str | torch.device) -> bool:
    """Whether the loss on this device is `head_loss`: on an accelerator."""
    return torch.device(device).type != "cpu"


def model_loss(
    model: GPT, tokens_BT: Tensor, targets_BT: Tensor, reduction: str = "mean"
) -> Tensor:
    """The loss of a model by the way that suits its device; on a CPU plain cross-entropy."""
    if not in_chunks(next(model.parameters()).device):
        return cross_entropy(model(tokens_BT), targets_BT, reduction)
    features_BTD = model.features(tokens_BT)
    # Read behind `features`, which gathers what FSDP2 has cut up.
    return head_loss(features_BTD, model.unembed.weight, targets_BT, reduction)
