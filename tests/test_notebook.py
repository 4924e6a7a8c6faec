"""The notebook of the tour: its form, and that its cells run, in their order, from where a reader
may have opened it.
"""

import re
import sys

import pytest
from helpers import ROOT, command
from notebook_cells import code_cells, read_notebook, run_cell

DOCS = ROOT / "docs"
PATH = DOCS / "tour.ipynb"
FIELDS = {
    "code": {"cell_type", "execution_count", "id", "metadata", "outputs", "source"},
    "markdown": {"cell_type", "id", "metadata", "source"},
}
"""What nbformat 4.5 wants of a cell, and nothing else."""


@pytest.fixture(scope="module")
def notebook():
    return read_notebook(PATH)


def run_all(n_step, **settings):
    """What the notebook prints, run in a process of its own in docs/, with nothing on its path."""
    script = "tests/notebook_cells.py"
    environment = {"PYTHONPATH": None}
    out, _ = command(script, PATH, f"N_STEP={n_step}", cwd=DOCS, env=environment, **settings)
    return out


def test_it_is_a_notebook_of_format_4(notebook):
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell.keys() == FIELDS[cell["cell_type"]]
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_no_output_is_committed(notebook):
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 20
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}


def test_its_links_lead_somewhere(notebook):
    prose = "".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    local = [target for target in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in target]
    assert local
    assert [target for target in local if not (DOCS / target).exists()] == []


@pytest.mark.parametrize("folder", [ROOT, DOCS], ids=["root", "docs"])
def test_the_first_cell_finds_the_repository(folder, notebook, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [])
    namespace = {}
    run_cell(code_cells(notebook)[0][0], "first", namespace)
    assert namespace["ROOT"] == ROOT
    assert sys.path == [str(ROOT)]


def test_elsewhere_it_says_what_to_do(tmp_path, notebook, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="%cd to your copy"):
        run_cell(code_cells(notebook)[0][0], "first", {})


@pytest.mark.slow
def test_all_cells_run_and_the_page_is_shown():
    """From docs/, with fewer steps; what the cells assert holds, and they leave no file behind."""
    before = sorted(DOCS.iterdir())
    out = run_all(n_step=12)
    assert sorted(DOCS.iterdir()) == before
    assert "the same text: True" in out
    pages = re.findall(r"shown: PageMaps, (\d+) characters of HTML", out)
    assert len(pages) == 1
    assert int(pages[0]) > 100_000


@pytest.mark.drill
def test_the_whole_notebook_learns_to_write():
    out = run_all(n_step=500, timeout=1800)
    (read, unread) = map(float, re.findall(r"has read (\S+), .* has not (\S+) nats", out)[0])
    assert read < unread < 1.8
    (before, after) = map(float, re.findall(r"weight of a query is (\S+) in", out))
    assert before < 0.5 * after
