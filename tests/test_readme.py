"""README's commands are those that the program understands, and its links lead somewhere."""

import re
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT, environment, make_config, nonsense, train_here, write_corpus

from configs import PRESETS

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
LINES = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.split("\n")
    if re.match(r"\s*(\.venv/bin/)?python (-m data|train|sample|attention)", line)
]


def options_of(script):
    """The options that a command's --help names."""
    arguments = ["-m", "data.prepare"] if script == "data.prepare" else [script]
    if script == "train.py":
        arguments.append("shakespeare-char")
    done = subprocess.run(
        [sys.executable, *arguments, "--help"],
        cwd=ROOT,
        env=environment(COLUMNS="400"),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    return set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))


@pytest.fixture(scope="module")
def known():
    scripts = ("data.prepare", "train.py", "sample.py", "attention_map.py", "evaluate.py")
    return {script: options_of(script) for script in scripts}


@pytest.mark.parametrize("line", LINES)
def test_commands_name_options_that_exist(line, known):
    words = shlex.split(line)
    script = words[2] if words[1] == "-m" else words[1]
    wanted = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
    assert wanted <= known[script]


def test_there_are_commands():
    assert len(LINES) >= 10


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_readme_is_short():
    assert README.count("\n") <= 170


@pytest.mark.slow
def test_the_notebook_snippet_runs(tmp_path, monkeypatch):
    (snippet,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    data = write_corpus(tmp_path / "d", nonsense() + "To be, or not to be BT")
    run = tmp_path / "runs" / "shakespeare-char"
    assert train_here(make_config(data, run, n_layer=3, context_length=32)) == 0
    monkeypatch.chdir(tmp_path)
    variables = {}
    exec(snippet, variables)
    shown = [value for value in variables.values() if hasattr(value, "_repr_html_")]
    last = snippet.strip().split("\n")[-1].split("#")[0]
    assert shown or hasattr(eval(last, variables), "_repr_html_")


def test_heads_named_are_those_of_the_default_run():
    """README looks at heads of the default run by number, from 0."""
    shape = PRESETS["shakespeare-char"][1].model
    looks = [line for line in LINES if "attention_map.py runs/shakespeare-char" in line]
    layers = re.findall(r"--layer (\d+)|--ablate (\d+)\.", " ".join(looks))
    heads = re.findall(r"--head (\d+)|--ablate \d+\.(\d+)", " ".join(looks))
    assert len(layers) == len(heads) == 2
    assert all(int(a or b) < shape.n_layer for a, b in layers)
    assert all(int(a or b) < shape.n_head for a, b in heads)


def test_the_notebook_says_from_where():
    (before,) = re.findall(r"([^\n]*)\n\n```python", README)
    assert "from this folder" in before
