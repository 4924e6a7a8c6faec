"""How fast this machine multiplies matrices, and how many multiplications a model asks for."""

import re
import time

import torch
from torch import nn

from configs import Config
from model.gpt import GPT
from ops.device import DTYPES, device_name, resolve_device

LONG_PRODUCT = 5e-4
"""Seconds of a product that is large enough to tell the hardware's rate."""

EAGER_SHARE = 0.3
"""Of the maker's rate, what a model's eager step reaches about; nanoGPT's at 124M does so."""
UNKNOWN_RATE = 60e12
"""FLOP/s of a GPU that `makers_rate` doesn't know: an older or smaller one."""
MAKERS_RATES = {
    r"B200": 2250e12,  # HGX B200 datasheet: 36 PFLOPS of eight with sparsity
    r"(GH200|H200|H100)(?!.*(PCIe|NVL|HBM2e))": 989.4e12,  # GH200, H200 and H100 datasheets, SXM
    r"H[12]00 NVL": 835.5e12,  # H100 NVL and H200 NVL datasheets
    r"H100 (PCIe|.*HBM2e)": 756e12,  # H100 datasheet, PCIe
    r"A100": 312e12,  # A100 datasheet
    r"A30": 165e12,  # A30 datasheet
    r"A40": 149.7e12,  # A40 datasheet
    r"RTX A6000": 154.8e12,  # RTX A6000 datasheet, half of the sparse rate
    r"A10": 125e12,  # A10 datasheet
    r"A10G": 70e12,  # A10G datasheet: 140 TFLOPS with sparsity
    r"L40S": 362e12,  # L40S datasheet: 733 TFLOPS with sparsity
    r"L40": 181e12,  # L40 datasheet
    r"L4": 121e12,  # L4 datasheet: 242 TFLOPS with sparsity
    r"RTX 4090": 165.2e12,  # Ada architecture whitepaper, with float32 accumulation
    r"RTX 3090": 71e12,  # GA102 architecture whitepaper, with float32 accumulation
    r"V100-SXM[23]": 125e12,  # V100 datasheet, NVLink; float16
    r"V100-PCIE": 112e12,  # V100 datasheet, PCIe; float16
    r"T4": 65e12,  # T4 datasheet; float16
}
"""A pattern of what the hardware calls itself -> FLOP/s of dense products in bfloat16, or float16
where there is none, with float32 accumulation, as NVIDIA's documents have it.
"""


def makers_rate(device_name: str) -> float | None:
    """The maker's FLOP/s of dense products in bfloat16 or float16 for a GPU that calls itself so;
    None where it isn't known, and for a part of one (MIG), a laptop's and a variant.
    """
    if re.search(r"\b(MIG|Laptop|Max-Q|Ti|SUPER|D)\b", device_name):
        return None
    for pattern, rate in MAKERS_RATES.items():
        if re.search(rf"\b({pattern})(?![A-Za-z0-9])", device_name):
            return rate
    return None


def seconds_left(config: Config, vocab_size: int, first: int, n_process: int = 1) -> float:
    """About what the steps behind `first` take on a GPU without a compiler: their FLOPs at
    `EAGER_SHARE` of the maker's rate, `max_minutes` at most. 0 on another device. Raises UserError
    where the device isn't there.
    """
    run, optim = config.run, config.optim
    device = resolve_device(run.device)
    if not device.startswith("cuda"):
        return 0.0
    rate = makers_rate(device_name(device)) or UNKNOWN_RATE
    if run.precision == "float32":
        rate /= 2  # of TF32
    with torch.device("meta"):
        model = GPT(config.model, vocab_size)
    n_step = min(run.stop_at or optim.max_steps, optim.max_steps) - first
    n_token = max(0, n_step) * optim.batch_size * config.model.context_length
    seconds = n_token * flops_per_token(model) / (EAGER_SHARE * rate * n_process)
    return min(seconds, 60 * run.max_minutes or seconds)


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
