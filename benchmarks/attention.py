"""Attention over context length: explicit, fused, and fused within a window; milliseconds and
memory, and how they grow.

    python -m benchmarks.attention

Forward and backward of one head of width 64, no dropout. Memory is what a fresh process's peak
resident memory grows by. The exponent p of time or memory ~ n^p is fitted to the upper half of the
lengths. Explicit attention at 16,384 takes 9 GB.
"""

import multiprocessing
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import RESULTS, parser, publish
from model.attention import Attend, Mask, explicit_attention
from model.fast_attention import fast_attention
from ops.log import peak_memory
from viz.figures import make_figure

KINDS: dict[str, tuple[Attend, Mask]] = {
    "explicit": (explicit_attention, Mask()),
    "fused": (fast_attention, Mask()),
    "fused, window 256": (fast_attention, Mask(window=256)),
}


def once(
    attend: Attend,
    mask: Mask,
    n_token: int,
    n_head: int = 1,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Forward and backward of one sequence's heads."""
    shape = (1, n_head, n_token, 64)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
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
    command = parser(__doc__, "attention")
    command.add_argument("--longest", type=int, default=16384)
    command.add_argument("--plot", type=Path, default=RESULTS / "attention.png")
    arguments = command.parse_args()
    lengths = [n for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if n <= arguments.longest]
    measured, rows = {}, []
    for name, (attend, mask) in KINDS.items():
        once(attend, mask, lengths[0])
        times = [seconds(attend, mask, n) for n in lengths]
        memory = [peak_bytes(attend, mask, n) for n in lengths]
        measured[name] = {"lengths": lengths, "seconds": times, "bytes": memory}
        cells = {
            f"{n:,}": f"{t * 1e3:,.0f} ms, {m / 2**20:,.0f} MiB"
            for n, t, m in zip(lengths, times, memory, strict=True)
        }
        growth = {
            "time ~": f"n^{exponent(lengths, times):.2f}",
            "memory ~": f"n^{exponent(lengths, memory):.2f}",
        }
        rows.append({"attention": name} | cells | growth)
    publish(arguments.out, {"Attention over context length": rows}, measured)
    plot(measured, arguments.plot)


def plot(measured: dict, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    figure, (axes,) = make_figure(9, 3.6, 1, 2)
    for name, values in measured.items():
        axes[0].loglog(values["lengths"], values["seconds"], marker="o", label=name)
        axes[1].loglog(values["lengths"], np.array(values["bytes"]) / 2**20, marker="o", label=name)
    axes[0].set(xlabel="context length", ylabel="seconds, forward and backward")
    axes[1].set(xlabel="context length", ylabel="MiB at once")
    axes[0].legend()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
