"""The model as training computes it: compiled, or its blocks computed again to save memory."""

import functools
import shutil
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from configs import RunConfig
from ops.device import autocast, is_out_of_memory


def compile_or_not(model: nn.Module, run: RunConfig, example: torch.Tensor) -> nn.Module:
    """The compiled model, or, in one line of warning, the eager one where compiling fails.

    A compiler's troubles show only when it is put to work, so one forward and backward pass is made
    on `example`, tokens of the run's own shape; its gradients are dropped.
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
            compiled(example).float().mean().backward()
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
