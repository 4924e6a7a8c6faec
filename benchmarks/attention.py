"""Attention over context length: explicit, fused, and fused within a window; milliseconds and memory, and how they grow.

    python -m benchmarks.attention --out attention.png

Forward and backward of one layer, 4 heads of width 64, no dropout. Memory is what a fresh process's peak resident memory grows
by. The exponent p of time or memory ~ n^p is fitted to the upper half of the lengths.
"""

import argparse
import json
import multiprocessing
import statistics
import time

import numpy as np
import torch

from benchmarks.machine import describe_machine, markdown_table
from model.attention import Attend, Mask, explicit_attention, fused_attention
from training.log import peak_memory

KINDS: dict[str, tuple[Attend, Mask]] = {
    "explicit": (explicit_attention, Mask()),
    "fused": (fused_attention, Mask()),
    "fused, window 256": (fused_attention, Mask(window=256)),
}
LONGEST_EXPLICIT = 8192
"""Beyond it explicit attention needs more than 10 GB."""


def once(attend: Attend, mask: Mask, n_token: int) -> None:
    q, k, v = (torch.randn(1, 4, n_token, 64, requires_grad=True) for _ in range(3))
    attend(q, k, v, mask, 0.0).sum().backward()


def seconds(attend: Attend, mask: Mask, n_token: int) -> float:
    """Median of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        once(attend, mask, n_token)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_bytes(attend: Attend, mask: Mask, n_token: int) -> int:
    """What a fresh process's peak resident memory grows by."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown, (attend, mask, n_token))


def _grown(attend: Attend, mask: Mask, n_token: int) -> int:
    once(attend, mask, 256)
    before = peak_memory()
    once(attend, mask, n_token)
    return max(1, peak_memory() - before) << 20


def exponent(lengths: list[int], values: list[float]) -> float:
    """The p of values ~ lengths^p, over the upper half."""
    half = len(lengths) // 2
    return float(np.polyfit(np.log(lengths[half:]), np.log(values[half:]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--out", default="", help="write a plot to this file")
    arguments = parser.parse_args()
    lengths = [n for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if n <= arguments.longest]
    measured, rows = {}, []
    for name, (attend, mask) in KINDS.items():
        own = [n for n in lengths if name != "explicit" or n <= LONGEST_EXPLICIT]
        once(attend, mask, own[0])
        times = [seconds(attend, mask, n) for n in own]
        memory = [peak_bytes(attend, mask, n) for n in own]
        measured[name] = {"lengths": own, "seconds": times, "bytes": memory}
        row = {"attention": name} | {str(n): "" for n in lengths}
        row |= {str(n): f"{t * 1e3:,.0f} ms, {m / 2**20:,.0f} MiB" for n, t, m in zip(own, times, memory, strict=True)}
        row |= {"time ~": f"n^{exponent(own, times):.2f}", "memory ~": f"n^{exponent(own, memory):.2f}"}
        rows.append(row)
    print(describe_machine())
    print(markdown_table(rows))
    print(json.dumps(measured))
    if arguments.out:
        plot(measured, arguments.out)


def plot(measured: dict, out: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, values in measured.items():
        axes[0].loglog(values["lengths"], values["seconds"], marker="o", label=name)
        axes[1].loglog(values["lengths"], np.array(values["bytes"]) / 2**20, marker="o", label=name)
    axes[0].set(xlabel="context length", ylabel="seconds, forward and backward")
    axes[1].set(xlabel="context length", ylabel="MiB at once")
    axes[0].legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
