"""A trained model made ready to draw tokens: the same function, its weights laid out for a few rows
at a time; and what drawing on a GPU takes that nobody need read to understand it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention import Attend, CausalSelfAttention, Mask
from model.fast_attention import attention_of_groups, fast_attention
from model.gpt import GPT

Function = Callable[[Tensor], Tensor]


def prepare_for_sampling(model: GPT, dtype: torch.dtype, slabs: bool = False) -> None:
    """Lay linear layers and norms out for drawing tokens, in place; the model can't be trained
    afterwards.

    Drawing reads every weight once a token, and memory is what it waits for. So queries, keys and
    values become one product, keys that heads share are not copied for each of them, and weights
    are kept in `dtype` (norms, embeddings and softmax stay in float32: to be run under autocast).
    With `slabs`, for float32 on a CPU, the products are shared out among the threads, see
    `SlabLinear`. In bfloat16 on a CPU a single token goes without oneDNN, see `one_by_one`. On CUDA
    attention goes without cuDNN, see `attention_kernels`, and a step may become a graph, see
    `model.static_decoding`.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, CausalSelfAttention):
            _merge_projections(module, dtype, slabs)
            module.attend_in_groups = without_copies(module)  # type: ignore[assignment, method-assign]
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear | nn.LayerNorm | nn.RMSNorm):
                delattr(module, name)
                setattr(module, name, _as_function(layer, dtype, slabs))
    laid_out: Any = model
    kind = model.embed.weight.device.type
    if dtype == torch.bfloat16 and kind == "cpu":
        laid_out.features = one_by_one(model.features)
        laid_out.unembed = one_by_one(model.unembed)
    if kind == "cuda":
        laid_out.features = without_cudnn(model.features)
        allow_capture(model, True)


def allow_capture(model: GPT, allowed: bool) -> None:
    """Say whether a step of `model` may become a CUDA graph, which reads its weights where they lie
    now.
    """
    vars(model)["may_be_captured"] = allowed


def allows_capture(model: GPT) -> bool:
    """What `allow_capture` said last; no where it said nothing."""
    return vars(model).get("may_be_captured", False)


def attention_kernels(device: torch.device) -> contextlib.AbstractContextManager:
    """The context of a step: on CUDA without cuDNN's attention, which plans anew for each number of
    keys.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kinds)


def without_cudnn(features: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function of tokens (B, T), within `attention_kernels`."""

    @functools.wraps(features)
    def call(tokens: Tensor, *rest, **options) -> Tensor:
        with attention_kernels(tokens.device):
            return features(tokens, *rest, **options)

    return call


def _merge_projections(attention: Any, dtype: torch.dtype, slabs: bool) -> None:
    """Have queries, keys and values computed by one product."""
    product = _product([attention.query, attention.key, attention.value], dtype, slabs)
    config = attention.config
    heads = config.n_head, config.n_key_head, config.n_key_head
    attention.projections = functools.partial(projections, product=product, heads=heads)
    del attention.query, attention.key, attention.value


def without_copies(attention: CausalSelfAttention) -> Attend:
    """`attend_in_groups`, of one query a row without a copy of the keys where attention is fast."""
    copying = attention.attend_in_groups

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0) -> Tensor:
        is_one = q.shape[2] == 1 and attention.attend is fast_attention
        return (attention_of_groups if is_one else copying)(q, k, v, mask, dropout)

    return call


def _product(layers: list[nn.Linear], dtype: torch.dtype, slabs: bool) -> Function:
    """What `layers` do, side by side."""
    weight = torch.cat([layer.weight.detach() for layer in layers]).to(dtype)
    bias = None
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
        if weight.device.type == "cuda":
            bias = bias.to(dtype)  # as autocast would for every token, with a kernel a layer
    if slabs:
        return SlabLinear(weight, bias, torch.get_num_threads())
    return functools.partial(F.linear, weight=weight, bias=bias)


def _as_function(layer: Any, dtype: torch.dtype, slabs: bool) -> Function:
    """The function of a linear layer or a norm, its weights given. Small as they are, a module's
    call costs as much.
    """
    if isinstance(layer, nn.Linear):
        return _product([layer], dtype, slabs)
    shape, weight, eps = layer.normalized_shape, layer.weight, layer.eps
    if isinstance(layer, nn.RMSNorm):
        return functools.partial(torch.rms_norm, normalized_shape=shape, weight=weight, eps=eps)
    return functools.partial(
        torch.layer_norm, normalized_shape=shape, weight=weight, bias=layer.bias, eps=eps
    )


def one_by_one(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function of tokens (B, T) or of their vectors (..., D), but for a single token
    computed without oneDNN.

    To set up a bfloat16 product takes oneDNN longer than the product of one row takes; PyTorch's
    own, slower from two rows on, needs half the time (on AMD's AVX-512).
    """

    @functools.wraps(function)
    def call(x: Tensor, *rest, **options) -> Tensor:
        n_token = x.numel() // x.shape[-1] if x.is_floating_point() else x.numel()
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = before and n_token > 1  # type: ignore[assignment]
        try:
            return function(x, *rest, **options)
        finally:
            torch.backends.mkldnn.enabled = before

    return call


def projections(
    x_BTD: Tensor, product: Callable[[Tensor], Tensor], heads: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    """What `CausalSelfAttention.projections` gives, of one product for queries, keys and values, of
    so many heads each.
    """
    merged = product(x_BTD).unflatten(-1, (sum(heads), -1)).transpose(1, 2)
    return merged.split(heads, dim=1)


class SlabLinear:
    """x W^T + b for few rows x on a CPU, with W cut into a slab for each thread.

    A product with one row reads all of W and uses each number once; on processors other than its
    maker's, Intel's library (MKL) reads it with a single thread. Here a batched product gives each
    thread a slab of its own: a share of the outputs, or, for one row and a matrix with fewer inputs
    than outputs, a share of the inputs, the parts summed at the end. Either way memory is read
    along the matrix's longer side.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, n_slab: int):
        self.n_out, self.n_in = weight.shape
        self.n_slab, width = n_slab, -(-self.n_out // n_slab)  # of a slab, rounded up
        padding = n_slab * width - self.n_out
        self.is_padded = padding > 0
        weight = torch.cat((weight, weight.new_zeros(padding, self.n_in)))
        bias = weight.new_zeros(self.n_out) if bias is None else bias
        bias = torch.cat((bias, bias.new_zeros(padding)))
        self.output_bias = bias.view(n_slab, 1, width)
        self.by_input = None
        if self.n_in >= self.n_out or self.n_in % n_slab:
            self.by_output = weight.view(n_slab, width, self.n_in).mT  # (n_slab, n_in, width)
        else:
            whole = weight.t().contiguous()
            self.by_output = whole.view(self.n_in, n_slab, width).transpose(0, 1)
            self.by_input = whole.view(n_slab, self.n_in // n_slab, -1)  # the same numbers
            self.input_bias = torch.stack((bias, *bias.new_zeros(n_slab - 1, len(bias))))[
                :, None
            ]  # summed, it counts once

    def __call__(self, x: Tensor) -> Tensor:
        """(..., n_in) -> (..., n_out)."""
        n_row = x.numel() // self.n_in
        if n_row == 1 and self.by_input is not None:
            parts = torch.baddbmm(self.input_bias, x.reshape(self.n_slab, 1, -1), self.by_input)
            out = (
                torch.add(*parts.unbind()) if self.n_slab == 2 else parts.sum(0)
            )  # a sum has much to set up
        else:
            rows = x.reshape(1, n_row, self.n_in).expand(self.n_slab, -1, -1)
            out = torch.baddbmm(self.output_bias, rows, self.by_output)
            out = out if n_row == 1 else out.transpose(0, 1)
        out = out.reshape(*x.shape[:-1], -1)
        return out[..., : self.n_out] if self.is_padded else out
