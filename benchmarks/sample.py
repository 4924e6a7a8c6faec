"""Tokens per second of sampling, against transformers' `generate` with its cache, and against reading every weight once a token.

    python -m benchmarks.sample                # 10.7M parameters, 500 tokens
    python -m benchmarks.sample --size 124m    # 128 tokens

GPT-2 architecture, random weights, context 1,024, greedy; the same shape in both programs. Rounds alternate; the median is shown.
Needs transformers (requirements-dev.txt).
"""

import argparse
import json
import os
import statistics
import time

import torch

from benchmarks.machine import describe_machine, markdown_table
from model.config import ModelConfig
from model.generate import generate
from model.gpt import GPT
from training.runtime import autocast, cast_for_sampling

SIZES = {
    "10.7m": (ModelConfig(n_layer=6, n_head=6, d_model=384), 65, 500),
    "124m": (ModelConfig(), 50257, 128),
}


def ours(config: ModelConfig, vocab_size: int, n_token: int, batch: int, precision: str):
    """A function that draws n_token tokens for each row of a batch."""
    model = GPT(config, vocab_size).eval()
    cast_for_sampling(model, precision)

    def draw() -> None:
        with autocast("cpu", precision):
            for _ in generate(model, [[1]] * batch, n_token, temperature=0.0):
                pass

    return draw


def theirs(config: ModelConfig, vocab_size: int, n_token: int, batch: int, precision: str):
    """The same with transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.set_verbosity_error()
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.d_model, "n_positions": config.context_length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, bos_token_id=0, eos_token_id=None, **shape)).eval()
    model.to(getattr(torch, precision))
    prompt = torch.ones(batch, 1, dtype=torch.long)

    def draw() -> None:
        options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
        model.generate(prompt, min_new_tokens=n_token, max_new_tokens=n_token, **options)

    return draw


def read_rate(n_bytes: int) -> float:
    """Bytes per second at which this machine reads a float32 array of the model's size."""
    weights = torch.ones(n_bytes // 4)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        weights.sum().item()
        best = min(best, time.perf_counter() - began)
    return n_bytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="10.7m")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=0, help="tokens to draw; default 500, or 128 at 124m")
    arguments = parser.parse_args()
    config, vocab_size, n_token = SIZES[arguments.size]
    n_token = arguments.tokens or n_token
    rows = []
    for batch in arguments.batches:
        programs = {
            f"{name} {precision}": make(config, vocab_size, n_token, batch, precision)
            for precision in ("float32", "bfloat16")
            for name, make in (("ours", ours), ("transformers", theirs))
        }
        rates: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(arguments.rounds):
            for name, draw in programs.items():
                began = time.perf_counter()
                draw()
                rates[name].append(batch * n_token / (time.perf_counter() - began))
        middle = {name: statistics.median(values) for name, values in rates.items()}
        row = {"batch": batch} | {name: f"{middle[name]:,.0f} ({min(v):,.0f}-{max(v):,.0f})" for name, v in rates.items()}
        row["ratio float32"] = f"{middle['ours float32'] / middle['transformers float32']:.2f}"
        row["best of ours / transformers float32"] = (
            f"{max(middle['ours float32'], middle['ours bfloat16']) / middle['transformers float32']:.2f}"
        )
        rows.append(row)
    n_weight = sum(p.numel() for p in GPT(config, vocab_size).parameters())
    rate = read_rate(4 * n_weight)
    print(describe_machine())
    print(f"reading {n_weight:,} float32 weights at {rate / 1e9:.1f} GB/s allows {rate / 4 / n_weight:,.0f} tokens/s at batch 1")
    print(markdown_table(rows))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
