"""The faults of `make mutants` can be planted, and the page about them tells what they are."""

import dataclasses
import re

import pytest
from mutants import ROOT, TABLE, Fault, catch, copy_repository, load

FAULTS = load()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    """Its line stands there exactly once, and with the fault the file still compiles."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    compile(fault.planted(text), fault.file, "exec")
    assert fault.old != fault.new
    assert f"def {fault.where.split('.')[-1]}(" in text
    for name in fault.tests:
        assert (ROOT / "tests" / f"test_{name}.py").exists()


def test_there_are_enough_and_no_two_alike():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({(fault.file, fault.old, fault.new) for fault in FAULTS}) == len(FAULTS)


def test_the_page_tells_each_fault_and_a_test_that_exists():
    rows = re.findall(r"^\| (.+) \| `.+`: `.+` \| `(\w+\.py)::(\w+)` \|$", TABLE.read_text(), re.M)
    assert [name for name, _, _ in rows] == [fault.name for fault in FAULTS]
    for _, file, test in rows:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "a = 1\na = 1\n"])
def test_a_stale_fault_is_refused(text):
    with pytest.raises(ValueError, match=r"stands [02] times in f"):
        Fault("x", "f", "g", "a = 1", "a = 2", []).planted(text)


@pytest.mark.slow
def test_one_fault_is_caught_and_one_that_is_none_is_not(tmp_path):
    (fault,) = [fault for fault in FAULTS if fault.name == "the targets are shifted twice"]
    folder = copy_repository(tmp_path / "copy")
    assert catch(fault, folder).startswith("tests/test_batches.py::test_")
    none = dataclasses.replace(fault, new=fault.old + "  # as it was")
    assert catch(none, folder) == ""
