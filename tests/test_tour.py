"""The tour quotes the code as it is, its examples run, its pictures are those of its command."""

import doctest
import re

import pytest
from helpers import ROOT

from docs import pictures

TOUR = ROOT / "docs" / "tour.md"
TEXT = TOUR.read_text(encoding="utf-8")
QUOTES = re.findall(r"^```python (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "quoted"), QUOTES, ids=lambda part: part.strip()[:30])
def test_what_is_quoted_stands_in_the_file(name, quoted):
    assert f"\n{quoted}" in (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "quoted"), QUOTES, ids=lambda part: part.strip()[:30])
def test_what_is_quoted_is_linked(name, quoted):
    """The file is named, with a link, in the section that quotes it."""
    (section,) = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if quoted in part]
    assert f"](../{name})" in section[: section.index(quoted)]


def test_equations_are_quoted():
    """Every section but the last two shows its code."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    without = [part.split("\n")[0] for part in sections if "```python" not in part]
    assert without == [
        "1. Text becomes numbers",
        "5. Why the square root",
        "14. What it costs",
        "17. What maps tell, and what they don't",
        "Where to go on",
    ]


@pytest.mark.slow
def test_examples_are_true():
    result = doctest.testfile(str(TOUR), module_relative=False)
    assert result.attempted > 70
    assert result.failed == 0


def test_pictures_are_those_of_the_command():
    shown = set(re.findall(r"\(pictures/(\w+)\.svg\)", TEXT))
    assert shown == set(pictures.PICTURES)


@pytest.mark.slow
def test_pictures_show_what_is_computed(tmp_path, monkeypatch):
    """Drawn anew they have as many lines, boxes and letters as those in docs/."""
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "drawn")
    pictures.main([])
    for name in pictures.PICTURES:
        drawn, kept = (
            (folder / f"{name}.svg").read_text(encoding="utf-8").count("<use")
            for folder in (tmp_path / "drawn", ROOT / "docs" / "pictures")
        )
        assert drawn == kept > 0


def test_sums_done_by_hand_in_the_text():
    """What the tour says of the default model."""
    shape = pictures.DEFAULT.model
    assert (shape.d_model, shape.context_length, shape.n_layer) == (192, 128, 4)
    pairs, projections, mlp = pictures.products(shape.context_length, shape.d_model).values()
    assert 9 * pairs == projections + mlp
    assert shape.n_layer * shape.context_length * 2 * shape.d_model * 4 == 768 * 1024
