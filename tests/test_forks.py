"""The patches of docs/forks fit the code as it is: applied to a copy, their tests pass there, and
the fork trains, goes on, samples and is looked at.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, environment

FORKS = {
    "alibi": (["--positions", "alibi"], ["tests/test_alibi.py", "tests/test_positions.py"]),
    "norm": (["--norm", "dyt"], ["tests/test_dyt.py"]),
    "optimizer": (["--optimizer", "lion"], ["tests/test_lion.py", "tests/test_optimizer.py"]),
    "tokenizer": ([], ["tests/test_pairs.py"]),
    "gate": (["--gate"], ["tests/test_gate.py"]),
}
"""Patch -> (its option of train.py, its own tests and, where cheap, neighbours')."""
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "prepared", "cache", "__pycache__", "pictures")
DRIVE = """
import importlib, json, sys
import pytest

option, tests, tokenizer = json.loads(sys.argv[1])
assert pytest.main(["-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *tests]) == 0

def run(name, *arguments):
    sys.argv = [name, *map(str, arguments)]
    assert not importlib.import_module(name).main(), name

run("data.prepare", "CONTRIBUTING.md", "--out", "d", "--tokenizer", tokenizer)
shape = ["--n-layer", 1, "--n-head", 2, "--d-model", 16, "--context-length", 16]
quick = ["--batch-size", 4, "--max-steps", 6, "--eval-batches", 1, "--log-every", 1]
asked = ["shakespeare-char", "--data", "d", "--out", "r", *shape, *quick, *option]
run("train", *asked, "--stop-at", 3)
run("train", *asked, "--resume")
run("sample", "r", "--prompt", "the ", "--max-new-tokens", 20)
run("attention_map", "r", "--text", "then and there", "--out", "p.html")

import torch
from model.attention import explicit_attention
from model.cache import KVCache
from ops.checkpoint import open_run

model, _, _ = open_run("r")
tokens = torch.arange(12)[None]
with torch.no_grad():
    whole = model(tokens)
    cache = KVCache(1, 12)
    parts = [model(tokens[:, t : t + 1], cache=cache) for t in range(12)]
    for block in model.blocks:
        block.attention.attend = explicit_attention
    explicit = model(tokens)
others = torch.cat(parts, dim=1), explicit
print("FOUND", json.dumps([(other - whole).abs().max().item() for other in others]))
"""


def patch_of(name):
    return (ROOT / "docs" / "forks" / f"{name}.patch").read_text(encoding="utf-8")


def test_there_is_a_test_for_each():
    patches = {path.stem for path in (ROOT / "docs" / "forks").glob("*.patch")}
    assert patches == set(FORKS)
    page = (ROOT / "docs" / "fork.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(forks/(\w+)\.patch\)", page)) == patches


@pytest.mark.parametrize("name", FORKS)
def test_a_patch_is_short(name):
    changed = re.findall(r"^[+-](?!\+\+ |-- )", patch_of(name), re.MULTILINE)
    assert 0 < len(changed) < 40


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("git"), reason="git is not there to apply the patches")
@pytest.mark.parametrize("name", FORKS)
def test_the_fork_works(name, tmp_path):
    """Cached, explicit and fast attention agree in it to 1e-5; both runs of training are one."""
    copy = tmp_path / "fork"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    subprocess.run(
        ["git", "apply", "-"],
        cwd=copy,
        input=patch_of(name),
        text=True,
        encoding="utf-8",
        check=True,
    )
    option, tests = FORKS[name]
    tokenizer = "pairs" if name == "tokenizer" else "char"
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, json.dumps([option, tests, tokenizer])],
        cwd=copy,
        env=environment(PYTHONPATH=str(copy)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert max(json.loads(done.stdout.split("FOUND")[1])) < 1e-5
    log = [json.loads(line) for line in (copy / "r" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in log if line["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (copy / "p.html").exists()
    said = "doesn't know" in done.stderr or "can't run a tokenizer of kind pairs" in done.stderr
    assert said == (
        name != "optimizer"
    )  # of what it can't compute, the page shows what it was told
