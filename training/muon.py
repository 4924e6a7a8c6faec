"""Muon (Jordan et al. 2024), with matrices of one shape orthogonalised together."""

import math
from typing import Any

import torch
from torch import Tensor


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

    PyTorch's own goes through them one at a time and always in bfloat16. Several processes may put
    a function in the place of `orthogonalize` that shares the matrices out among them.
    `found_inf`, where it is set, is the flag of PyTorch's fused optimizers: above 0, on the device,
    a step changes nothing.
    """

    orthogonalize = staticmethod(orthogonalize)
    found_inf: Tensor | None = None

    def __init__(self, params: list[dict[str, Any]], dtype: torch.dtype, **options: Any):
        super().__init__(params, adjust_lr_fn="match_rms_adamw", **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        wrong = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
                    if "momentum_buffer" not in self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            for shape, parameters in by_shape.items():
                gradients = [p.grad for p in parameters if p.grad is not None]
                momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                if wrong is not None:  # the momenta move towards themselves: not at all
                    pairs = zip(momenta, gradients, strict=True)
                    gradients = [torch.where(wrong, *pair) for pair in pairs]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov
                updates = self.orthogonalize(
                    torch.stack(ahead).to(self.dtype),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                kept = 1 - group["lr"] * group["weight_decay"]
                if wrong is not None:
                    kept = torch.where(wrong, 1.0, kept)
                    updates.masked_fill_(wrong, 0.0)
                torch._foreach_mul_(parameters, kept)
                scale = -0.2 * math.sqrt(max(shape)) * group["lr"]  # the size of AdamW's updates
                torch._foreach_add_(parameters, list(updates.to(parameters[0].dtype)), alpha=scale)
