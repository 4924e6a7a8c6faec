"""What every benchmark prints beside its figures: the machine, versions and threads; and how it prints them."""

import platform

import numpy
import torch

from training.runtime import best_precision, device_name, matrix_rate


def describe_machine() -> str:
    """Machine, versions, thread count and matrix rates, in a line each."""
    rates = ", ".join(f"{p} {matrix_rate('cpu', p, 2048) / 1e9:,.0f}" for p in ("float32", "bfloat16"))
    lines = [
        f"machine: {device_name('cpu')}, {platform.machine()}, {torch.get_num_threads()} threads, {platform.system()}",
        f"versions: Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}",
        f"matrix product of 2048 x 2048 on CPU, GFLOP/s: {rates}; precision auto is {best_precision('cpu')}",
    ]
    if torch.cuda.is_available():
        lines.append(f"GPU: {device_name('cuda')}, bfloat16 {matrix_rate('cuda', 'bfloat16', 8192) / 1e12:,.0f} TFLOP/s")
    return "\n".join(lines)


def markdown_table(rows: list[dict]) -> str:
    """Rows of equal keys as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *[[str(row[key]) for key in head] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
