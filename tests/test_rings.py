"""The house: what a learner reads stays small and apart, and no module imports in a circle."""

import re
import subprocess
import sys

import pytest
from test_imports import COMMANDS, PACKAGES, ROOT, imports

RING_1 = (
    "model/config.py",
    "model/positions.py",
    "model/attention.py",
    "model/cache.py",
    "model/gpt.py",
    "data/batches.py",
    "training/loss.py",
    "training/optimizer.py",
    "training/state.py",
    "training/trainer.py",
    "train.py",
    "model/sampling.py",
    "model/generate.py",
    "sample.py",
)
"""In the order of reading."""


def test_readme_lists_ring_1_in_order():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## Three rings") :]
    section = section[: section.index("\n## ", 5)]
    listed = [name for name, target in re.findall(r"\[([\w/.]+)\]\(([\w/.]+)\)", section)]
    assert tuple(name for name in listed if name in RING_1) == RING_1


def test_ring_1_can_be_read_in_one_sitting():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in RING_1]
    assert sum(text.count("\n") for text in texts) <= 1370
    assert sum(map(len, texts)) <= 58_000
    assert max(len(line) for text in texts for line in text.split("\n")) <= 100


@pytest.mark.parametrize("name", [name for name in RING_1 if "/" in name])
def test_ring_1_knows_nothing_of_ring_3(name):
    """Nor of pictures. The two commands wire the rings together."""
    found = set(imports((ROOT / name).read_text(encoding="utf-8")))
    assert not {module for module in found if module.split(".")[0] in ("ops", "viz")}


def test_functions_stay_small():
    """Ruff's measures: cyclomatic complexity (C901) up to 10, statements (PLR0915) up to 50."""
    names = [str(ROOT / name) for name in RING_1]
    rules = ["--select", "C901,PLR0915", "--config", "lint.mccabe.max-complexity=10"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", *rules, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def modules():
    """Name -> path of every module of the project."""
    paths = [ROOT / name for name in (*COMMANDS, "errors.py", "machine.py")]
    paths += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = {}
    for path in paths:
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def graph(sources):
    """Module -> the modules it imports, wherever in the file. `sources`: name -> text."""
    found = {}
    for name, text in sources.items():
        # `from a.b import c` is of the module a.b.c, if there is one, else of a.b.
        named = set(imports(text))
        wanted = {dotted if dotted in sources else dotted.rpartition(".")[0] for dotted in named}
        found[name] = {other for other in wanted if other in sources and other != name}
    return found


def circle(edges):
    """The modules that remain when those that import nothing left are taken away, again and again:
    none where there is no circle.
    """
    left = {name: set(others) for name, others in edges.items()}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    return sorted(left)


def test_no_imports_in_a_circle():
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules().items()}
    assert len(sources) > 40
    assert circle(graph(sources)) == []


def test_a_circle_is_found():
    sources = {"a": "import b", "b": "def f():\n    from c import x", "c": "import a", "d": ""}
    assert circle(graph(sources)) == ["a", "b", "c"]
    assert circle(graph(sources | {"c": "import d"})) == []
