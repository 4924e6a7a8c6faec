"""Whatever the system tells, and in whatever form, there is an answer."""

import math
import os
import subprocess
import sys

import pytest
from helpers import ROOT

import machine


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes the files that the system would have: path -> text. What isn't written isn't there."""
    groups = tmp_path / "cgroup"
    monkeypatch.setattr(machine, "CONTROL_GROUPS", groups)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "STATUS", tmp_path / "status")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write.groups = lambda files: write(**{f"cgroup/{name}": text for name, text in files.items()})
    return write


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Name:\tpython\nVmHWM:\t  1234 kB\nVmRSS: 5 kB\n", 1234 << 10),
        ("VmHWM: 1234", 1234 << 10),
        ("Name:\tpython\n", 0),
        ("VmHWM:\n", 0),
        ("VmHWM: many kB\n", 0),
        ("VmHWM: -5 kB\n", 0),
        ("VmHWM", 0),
        ("", 0),
        ("\0\xff", 0),
    ],
)
def test_a_table_of_the_system(system, text, expected):
    system(status=text)
    assert machine.table_bytes(machine.STATUS, "VmHWM") == expected


def test_a_file_that_cannot_be_read(tmp_path):
    assert machine.read_text(tmp_path / "missing") == ""
    assert machine.read_text(tmp_path) == ""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe 12")
    assert machine.read_text(tmp_path / "bytes").endswith(" 12")


def test_peak_memory_without_the_table(system):
    """Asked of the kernel in another way, it is of the size of a Python process."""
    assert 1 << 20 < machine.peak_memory() < 1 << 40
    system(status="VmHWM: 1234 kB\n")
    assert machine.peak_memory() == 1234 << 10


OWN_2 = "0::/a/b\n"
OWN_1 = "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (OWN_2, {}, 0),
        (OWN_2, {"memory.max": "max\n", "a/memory.max": "max\n"}, 0),
        (OWN_2, {"a/b/memory.max": "700\n", "a/memory.max": "500\n", "memory.max": "max\n"}, 500),
        (OWN_2, {"a/b/memory.max": "300\n", "a/memory.max": "500\n"}, 300),
        # In a container the root of the mount is the group itself.
        (OWN_2, {"memory.max": "900\n"}, 900),
        ("0::/../../c\n", {"c/memory.max": "77\n"}, 77),
        (OWN_1, {"memory/a/b/memory.limit_in_bytes": "400\n"}, 400),
        (OWN_1, {"memory/memory.limit_in_bytes": "900\n"}, 900),
        (OWN_1, {"memory/memory.limit_in_bytes": "-1\n"}, 0),
        ("", {"memory.max": "50\n"}, 50),
        ("nonsense\n:::\n\n", {"memory.max": "50\n"}, 50),
    ],
)
def test_memory_of_a_control_group(system, own, files, expected):
    system(own=own)
    system.groups(files)
    assert machine.group_memory() == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (OWN_2, {}, math.inf),
        (OWN_2, {"cpu.max": "max 100000\n"}, math.inf),
        (OWN_2, {"cpu.max": "150000 100000\n"}, 1.5),
        (OWN_2, {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        (OWN_1, {"cpu/a/cpu.cfs_quota_us": "300000\n"}, 3.0),
        (OWN_1, {"cpu/a/cpu.cfs_quota_us": "-1\n"}, math.inf),
        (OWN_2, {"cpu.max": "\n"}, math.inf),
        (OWN_2, {"cpu.max": "0 0\n"}, math.inf),
        (OWN_2, {"cpu.max": "a b c\n"}, math.inf),
    ],
)
def test_cpus_of_a_control_group(system, own, files, expected):
    system(own=own)
    system.groups(files)
    assert machine.group_cpus() == expected


@pytest.mark.parametrize(("quota", "expected"), [("150000", 2), ("20000", 1), ("9900000", 8)])
def test_cpus_that_may_be_used(system, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    system.groups({"cpu.max": f"{quota} 100000"})
    assert machine.usable_cpus() == expected


def test_cpus_where_nothing_is_told(system, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.usable_cpus() == 1


def test_it_needs_the_standard_library_alone():
    code = "import sys, machine; machine.usable_cpus(); print('numpy' in sys.modules)"
    line = [sys.executable, "-S", "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
