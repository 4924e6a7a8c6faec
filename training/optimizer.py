"""Parameter groups, optimisers and the learning-rate schedule."""

import math

import torch
from torch import nn

from configs import OptimConfig
from training.muon import BatchedMuon


def learning_rate(step: int, optim: OptimConfig) -> float:
    """The rate of update number `step`, counted from 0.

    It rises linearly over `warmup_steps` to `lr`, then falls to `min_lr`, which the update behind
    the last would have: along half a cosine (Loshchilov and Hutter 2017, equation 5), on a line, or
    not at all.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / (optim.warmup_steps + 1)
    if optim.schedule == "constant":
        return optim.lr
    done = min(1.0, (step - optim.warmup_steps) / max(1, optim.max_steps - optim.warmup_steps))
    share = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1 - done
    return optim.min_lr + share * (optim.lr - optim.min_lr)


def parameter_groups(
    model: nn.Module,
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """The blocks' matrices; the other matrices (embeddings); vectors (norms and biases). A tied
    matrix counts once.
    """
    blocks: list[nn.Parameter] = []
    embeddings: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name.startswith("blocks."):
            blocks.append(parameter)
        else:
            embeddings.append(parameter)
    return blocks, embeddings, vectors


def make_optimizers(
    model: nn.Module, optim: OptimConfig, precision: str = "float32"
) -> list[torch.optim.Optimizer]:
    """AdamW over everything, or Muon over the blocks' matrices and AdamW over the rest; decay
    touches the blocks' matrices alone.

    Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest matrix with orthonormal
    rows or columns. Scaled to the size of AdamW's updates (Liu et al. 2025, "Muon is Scalable for
    LLM Training", section 2.2), so that one learning rate serves both.
    """
    blocks, embeddings, vectors = parameter_groups(model)
    decayed = [{"params": blocks, "weight_decay": optim.weight_decay}]
    others = [{"params": some, "weight_decay": 0.0} for some in (embeddings, vectors) if some]
    by_muon = optim.optimizer == "muon"
    groups = others if by_muon else decayed + others
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=True)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if by_muon:
        dtype = torch.float32 if precision == "float32" else torch.bfloat16
        optimizers.append(BatchedMuon(decayed, dtype, lr=optim.lr))
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Give every group of every optimiser the rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def clip_gradients(model: nn.Module, largest: float) -> torch.Tensor:
    """The norm of all gradients together, over all processes; above `largest` (0: no limit) they
    are scaled down to it.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest or float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
