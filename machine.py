"""What the system tells of this machine and of the share of it that this process may use. Imports
the standard library alone.

A system that tells less, or tells it in another form, must not end a run: each question here has an
answer for "can't be told".
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""Where Linux keeps the limits of control groups, those of containers among them."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""The control groups of this process, a line each: number:controllers:path."""
STATUS, MEMORY = Path("/proc/self/status"), Path("/proc/meminfo")


def read_text(path: Path) -> str:
    """A small file's text; "" where it isn't there or can't be read."""
    with contextlib.suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def table_bytes(path: Path, name: str) -> int:
    """A line `name: 123 kB` of one of Linux's tables, in bytes; 0 where there is none."""
    for line in read_text(path).splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if key == name and words and words[0].isdecimal():
            return int(words[0]) << 10
    return 0


def group_files(controller: str, version_1: str, version_2: str) -> Iterator[str]:
    """The texts of a limit's file in this process's control group and in those above it, all of
    which hold. The files' names differ between the two versions of control groups.

    In a container the group's own path may be another than the one written down, so the mount's
    root is always asked too.
    """
    own = {"": "/", controller: "/"}
    for line in read_text(OWN_GROUPS).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for each in controllers.split(","):
            own[each] = path
    for root, name, path in (
        (CONTROL_GROUPS, version_2, own[""]),
        (CONTROL_GROUPS / controller, version_1, own[controller]),
    ):
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield read_text(root.joinpath(*parts[:depth], name)).strip()


def group_memory() -> int:
    """The least memory limit of this process's control groups, in bytes; 0 without one."""
    texts = group_files("memory", "memory.limit_in_bytes", "memory.max")
    return min((int(text) for text in texts if text.isdecimal()), default=0)


def group_cpus() -> float:
    """The least CPU quota of this process's control groups, in CPUs; infinity without one."""
    quotas = []
    for text in group_files("cpu", "cpu.cfs_quota_us", "cpu.max"):
        words = text.split()
        if len(words) == 1:  # version 1 keeps the period in a file of its own, nearly always 0.1 s
            words.append("100000")
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min((quota for quota in quotas if quota > 0), default=math.inf)


def usable_cpus() -> int:
    """CPUs that this process may use: those it is allowed on, within its container's quota."""
    count = os.cpu_count() or 1
    with contextlib.suppress(AttributeError, OSError):  # Linux alone tells
        count = len(os.sched_getaffinity(0))
    quota = group_cpus()
    return count if quota == math.inf else max(1, min(count, math.ceil(quota)))


def peak_memory() -> int:
    """The most memory this process has held resident so far, in bytes; 0 where it can't be told."""
    if peak := table_bytes(STATUS, "VmHWM"):  # getrusage would count the parent's memory in
        return peak
    with contextlib.suppress(ImportError, OSError):  # Windows has no such module
        import resource

        unit = 1 if os.uname().sysname == "Darwin" else 1024  # macOS counts bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0
