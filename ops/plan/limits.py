"""How much memory this process may hold, and how much it holds before a model is built."""

import contextlib
import functools

import torch
from torch import nn

from machine import MEMORY, STATUS, group_memory, table_bytes

FITS = 0.7
"""Share of a memory limit that an estimate may fill: the allocator's gaps have been seen to add a
third to what is counted.
"""
THREADS = 2 * (64 + 8) << 20
"""Bytes of addresses for arena and stack of two threads that training starts: autograd's and the
one that saves.
"""


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
    resident = table_bytes(STATUS, "VmRSS")
    addresses = table_bytes(STATUS, "VmSize")
    return resident or 320 << 20, addresses  # Linux's figure, where another system tells none


def memory_limit(device: str) -> int:
    """Bytes this process may hold, those it holds already included; 0 where it can't be told.

    On CUDA, what others leave of the device; else the least of the memory available, the control
    group's limit and RLIMIT_AS (`ulimit -v`). The last counts addresses, so what is mapped but not
    resident is taken off.
    """
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limits = []
    if available := table_bytes(MEMORY, "MemAvailable"):
        limits.append(available + table_bytes(STATUS, "VmRSS"))
    if of_group := group_memory():
        limits.append(of_group)
    with contextlib.suppress(ImportError, OSError):  # Windows has no such module
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
        held = table_bytes(STATUS, "VmRSS")
    return max(0, limit - held)
