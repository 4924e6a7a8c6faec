"""How much memory this process may hold, and how much it holds before a model is built."""

import contextlib
import functools
from pathlib import Path

import torch
from torch import nn

FITS = 0.7
"""Share of a memory limit that an estimate may fill: the allocator's gaps have been seen to add a
third to what is counted.
"""
THREADS = 2 * (64 + 8) << 20
"""Bytes of addresses for arena and stack of two threads that training starts: autograd's and the
one that saves.
"""
CONTROL_GROUP = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux writes the control group's limit: version 2, version 1."""


@functools.cache
def baseline() -> tuple[int, int]:
    """Bytes of memory and of addresses that this process holds with the libraries that training
    loads. Measured once, when first asked, which should be before a model is built.
    """
    layer = nn.Linear(8, 8)
    for dtype in (torch.float32, torch.bfloat16):  # kernels' code is read when first used
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            layer(torch.randn(8, 8)).float().sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    resident = _kibibytes("/proc/self/status", "VmRSS")
    addresses = _kibibytes("/proc/self/status", "VmSize")
    return resident or 320 << 20, addresses  # Linux's figure, where another system tells none


def _kibibytes(path: str, name: str) -> int:
    """A line `name: 123 kB` of one of Linux's tables, in bytes; 0 where there is none."""
    if not Path(path).exists():
        return 0
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def memory_limit(device: str) -> int:
    """Bytes this process may hold, those it holds already included; 0 where it can't be told.

    On CUDA, what others leave of the device; else the least of the memory available, the control
    group's limit and RLIMIT_AS (`ulimit -v`). The last counts addresses, so what is mapped but not
    resident is taken off.
    """
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = []
    if available := _kibibytes("/proc/meminfo", "MemAvailable"):
        limits.append(available + _kibibytes("/proc/self/status", "VmRSS"))
    for path in CONTROL_GROUP:
        text = path.read_text().strip() if path.exists() else ""
        if text.isdigit():  # version 2 says "max" where there is no limit
            limits.append(int(text))
    with contextlib.suppress(ImportError):  # Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            held, addresses = baseline()
            limits.append(max(1, limit - (addresses - held) - THREADS))
    return min(limits, default=0)


def free_memory(device: str) -> int | None:
    """Bytes that this process may still take on `device`; None where it can't be told."""
    limit = memory_limit(device)
    if not limit:
        return None
    if device.startswith("cuda"):
        held = torch.cuda.memory_allocated(device)
    else:
        held = _kibibytes("/proc/self/status", "VmRSS")
    return max(0, limit - held)
