"""The model as training computes it: compiled, or its blocks computed again to save memory."""

import functools
import shutil
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from configs import RunConfig
from model import flex_windows
from model.attention import Mask
from ops.device import autocast, is_out_of_memory

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of logits (B, T, V) and targets (B, T)."""


class WithLoss(nn.Module):
    """A model and its loss as one function of tokens and targets, both (B, T). A compiler that sees
    both need not write the logits out, which are the largest tensor of a step.
    """

    def __init__(self, model: nn.Module, loss: Loss):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return self.loss(self.model(tokens_BT), targets_BT)


def compile_or_not(
    model: nn.Module, run: RunConfig, *example: Tensor, flex: bool = True
) -> nn.Module:
    """The compiled module, or, in one line of warning, the eager one where compiling fails.

    A compiler's troubles show only when it is put to work, so one forward and backward pass is made
    on `example`, what the module will be called with; its gradients are dropped. With `flex`,
    windows on a GPU go to flex_attention where that compiles, else to blocks.
    """
    if run.compile == "off":
        return model
    if run.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++", "cl"))):
        print(
            "warning: compile is on, but there is no C++ compiler on the PATH: going on without it",
            file=sys.stderr,
        )
        return model
    if flex:
        prepare_windows(model, run, example[0])
    try:
        compiled = torch.compile(model)
        with autocast(run.device, run.precision):
            compiled(*example).float().mean().backward()
        return compiled
    except Exception as error:  # whatever the compiler raises; the eager model raises its own
        if is_out_of_memory(error):  # the eager model takes more; its advice names what fits
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:150]
        reason = f"({type(error).__name__}: {reason})"
        if flex_windows.forget():
            print(f"warning: flex_attention failed, windows in blocks {reason}", file=sys.stderr)
            torch._dynamo.reset()
            return compile_or_not(model, run, *example, flex=False)
        print(f"warning: compiling failed, going on without it {reason}", file=sys.stderr)
        return model
    finally:
        model.zero_grad(set_to_none=True)


def prepare_windows(model: nn.Module, run: RunConfig, tokens_BT: Tensor) -> None:
    """Make a compiled step over such tokens take its windows to flex_attention, where it can."""
    shape = next((part.config for part in model.modules() if hasattr(part, "config")), None)
    if shape is None or run.attention != "fast":
        return
    mask = Mask(window=shape.window)
    n_token = tokens_BT.shape[1]
    kind = tokens_BT.device.type
    if not flex_windows.why_not(mask, n_token, kind, shape.d_head, shape.dropout, compiled=True):
        flex_windows.prepare(mask, n_token, tokens_BT.device)


def recompute_blocks(model: nn.Module) -> None:
    """Activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"):
    each block keeps its input alone and is computed again in the backward pass.
    """
    for block in model.blocks:
        block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
