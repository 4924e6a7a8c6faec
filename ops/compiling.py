"""The model as training computes it: compiled, or its blocks computed again to save memory."""

import functools
import shutil
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from configs import RunConfig
from ops.device import autocast, is_out_of_memory
from training.head_loss import model_loss
from training.loss import cross_entropy

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits (B, T, V) and targets (B, T)."""


class WithLoss(nn.Module):
    """A model and its loss as one function of tokens and targets, both (B, T). A compiler that sees
    both need not write the logits out, which are the largest tensor of a step; and an accelerator
    never holds all of them, where the loss is cross-entropy (`training.head_loss`).
    """

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        if self.loss is cross_entropy:
            return model_loss(self.model, tokens_BT, targets_BT)
        return self.loss(self.model(tokens_BT), targets_BT)


def compile_or_not(model: nn.Module, run: RunConfig, *example: Tensor) -> nn.Module:
    """The compiled module, or, in one line of warning, the eager one where compiling fails.

    A compiler's troubles show only when it is put to work, so one forward and backward pass is made
    on `example`, what the module will be called with; its gradients are dropped.
    """
    if run.compile == "off":
        return model
    if run.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
        print(
            "warning: compile is on, but there is no C++ compiler on the PATH: going on without it",
            file=sys.stderr,
        )
        return model
    try:
        compiled = torch.compile(model)
        with autocast(run.device, run.precision):
            compiled(*example).float().mean().backward()
        return compiled
    except Exception as error:  # whatever the compiler raises; the eager model raises its own
        if is_out_of_memory(error):  # the eager model takes more; its advice names what fits
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
        print(
            f"warning: compiling failed, going on without it ({type(error).__name__}: {reason})",
            file=sys.stderr,
        )
        return model
    finally:
        model.zero_grad(set_to_none=True)


def recompute_blocks(model: nn.Module) -> None:
    """Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"):
    each block keeps its input alone and is computed again in the backward pass.
    """
    for block in model.blocks:
        block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
