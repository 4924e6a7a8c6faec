"""Attention over context length on the device: explicit, fused, within a window."""

import torch

from benchmarks.attention import KINDS, once
from benchmarks.gpu.task import Task
from benchmarks.gpu.training import free, measure_peak
from benchmarks.steps import lap
from ops.device import DTYPES, best_precision, is_out_of_memory

TOO_LONG = 5.0
"""Seconds of a pass after which longer contexts are left out."""


def attention(task: Task) -> None:
    """Forward and backward, the shortest contexts first, each kind until memory or time ends."""
    dtype = DTYPES[best_precision(task.device)]
    over: set[str] = set()
    for n_token in task.scale.lengths:
        for kind in KINDS:
            if kind not in over and task.left() > 0:
                cell, goes_on = measure(task, kind, n_token, dtype)
                over |= set() if goes_on else {kind}
                task.row("Attention", **{"context": f"{n_token:,}, {kind}", **cell})
    task.note(
        f"Forward and backward, one sequence of {task.scale.n_head} heads of width 64, {dtype}; "
        "the best of three. MiB: at once, inputs and gradients included."
    )


def measure(task: Task, kind: str, n_token: int, dtype: torch.dtype) -> tuple[dict[str, str], bool]:
    """Cells of a row, and whether a longer context is worth trying."""
    attend, mask = KINDS[kind]

    def step() -> None:
        once(attend, mask, n_token, task.scale.n_head, task.device, dtype)

    try:
        lap(step, task.device)  # the first may compile
        _, peak = measure_peak(step, task.device)
        seconds = min(lap(step, task.device) for _ in range(3))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free(task.device)
        return {"ms": "out of memory"}, False
    task.figures(**{f"{kind}, {n_token}": {"seconds": seconds, "gibibytes": peak}})
    cells = {"ms": f"{seconds * 1e3:,.2f}"}
    return cells | ({} if peak is None else {"MiB": f"{peak * 1024:,.0f}"}), seconds < TOO_LONG
