"""Parameter groups, optimisers and the learning-rate schedule."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from configs import OptimConfig


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
    blocks, embeddings, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        else:
            (blocks if name.startswith("blocks.") else embeddings).append(parameter)
    return blocks, embeddings, vectors


def orthogonalize(
    matrices: Tensor, coefficients: tuple[float, float, float], n_step: int, eps: float
) -> Tensor:
    """Near each matrix of a stack (N, rows, columns), the one with the same singular vectors and
    singular values near 1.

    A quintic Newton-Schulz iteration (Jordan et al. 2024), in the dtype given; the values end
    between about 0.7 and 1.2.
    """
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(n_step):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon, with all matrices of one shape orthogonalised in one go, in the dtype
    given.

    PyTorch's own goes through them one at a time and always in bfloat16.
    """

    def __init__(self, params: list[dict[str, Any]], dtype: torch.dtype, **options: Any):
        super().__init__(params, adjust_lr_fn="match_rms_adamw", **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
                    self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            for shape, parameters in by_shape.items():
                gradients = [parameter.grad for parameter in parameters]
                momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov
                updates = orthogonalize(
                    torch.stack(ahead).to(self.dtype),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = -0.2 * math.sqrt(max(shape)) * group["lr"]  # the size of AdamW's updates
                torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype)), alpha=scale)


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
    plain = [{"params": embeddings, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}]
    decayed = [{"params": blocks, "weight_decay": optim.weight_decay}]
    adamw_groups = [
        group
        for group in (plain if optim.optimizer == "muon" else decayed + plain)
        if group["params"]
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(adamw_groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)
    ]
    if optim.optimizer == "muon":
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
