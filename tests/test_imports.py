"""The direction of imports, read from the files themselves, and that options are parsed before
torch is loaded.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("model", "data", "configs", "training", "ops", "viz", "interop", "exercises")
COMMANDS = ("train.py", "sample.py", "attention_map.py", "evaluate.py")
DATA = (
    "tiktoken",
    "rustbpe",
    "pyarrow",
    "tokenizers",
    "compression",
    "zstandard",
    "datasets",
)
RUN = ("numpy", "torch", "tqdm", "tyro", "wandb", "matplotlib")

ALLOWED = {
    "errors.py": set(),
    "machine.py": set(),
    "model/config.py": {"model.checks"},
    "model/checks.py": set(),
    "model": {"torch", "model"},
    "data": {*DATA, "numpy", "torch", "tqdm", "tyro", "data", "errors", "machine"},
    "configs": {"model.config", "configs", "errors"},
    "training": {"numpy", "torch", "model", "data", "configs", "errors", "training"},
    "ops": {*RUN, "model", "data", "configs", "errors", "machine", "training", "ops"},
    "interop": {
        *("torch", "tyro", "safetensors", "huggingface_hub"),
        *("model", "data", "configs", "errors", "ops", "interop"),
    },
    "viz": {"numpy", "torch", "matplotlib", "model", "data", "configs", "errors", "viz"},
    "exercises": {"torch", "model", "configs", "errors", "training", "exercises"},
    "command": {*RUN, *PACKAGES, "errors", "machine"} - {"exercises"},
}
"""What may be imported beside the standard library: a name stands for itself and all that is in
it.
"""


def files():
    return [
        path
        for folder in ("", *PACKAGES)
        for path in sorted((ROOT / folder).glob("*.py" if folder == "" else "**/*.py"))
    ]


def rule(path):
    """The key of `ALLOWED` under which a file falls: its own, else its package's; any file at the
    top is a command.
    """
    name = path.relative_to(ROOT).as_posix()
    return name if name in ALLOWED else name.split("/")[0] if "/" in name else "command"


def imports(source, package=()):
    """Dotted names of all that is imported, wherever in the file; `from a import b` counts as a.b,
    which may be a module.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("import_module", "__import__")
        ):
            yield (
                node.args[0].value
                if isinstance(node.args[0], ast.Constant)
                else "a name computed at run time"
            )


def forbidden(source, allowed, package=()):
    """The imports that are neither of the standard library nor allowed."""
    names = set(imports(source, package))
    return sorted(
        name
        for name in names
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(f"{name}.".startswith(f"{good}.") for good in allowed)
    )


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path):
    package = path.relative_to(ROOT).parent.parts
    assert forbidden(path.read_text(encoding="utf-8"), ALLOWED[rule(path)], package) == []


def test_the_rules_hold_what_they_should():
    """A rule that let everything pass would pass."""
    names = ("train.py", "errors.py", "model/gpt.py", "model/config.py", "viz/maps.py")
    rules = {"command", "errors.py", "model", "model/config.py", "viz"}
    assert {rule(ROOT / name) for name in names} == rules
    for key, source in [
        ("model", "import numpy"),
        ("model", "def f():\n    from errors import UserError"),
        ("model", "import ops.log"),
        ("training", "from ops.device import autocast"),
        ("data", "from ops import log"),
        ("ops", "from viz.page import write"),
        ("ops", "from interop.giving import give_out"),
        ("interop", "import transformers"),
        ("model/config.py", "import torch"),
        ("model/config.py", "from model.gpt import GPT"),
        ("errors.py", "import numpy"),
        ("data", "from model.gpt import GPT"),
        ("data", "import importlib\nimportlib.import_module('training')"),
        ("configs", "from model.gpt import GPT"),
        ("configs", "from model import gpt"),
        ("configs", "import torch"),
        ("training", "from viz.page import write"),
        ("training", "import train"),
        ("viz", "from ops.checkpoint import load"),
        ("viz", "from sample import main"),
        ("command", "from train import main"),
        ("command", "import transformers"),
        ("command", "from exercises.check import main"),
        ("training", "from exercises import check"),
        ("exercises", "from ops.log import Log"),
    ]:
        assert forbidden(source, ALLOWED[key]), (key, source)
    assert forbidden("from ..training import log", ALLOWED["viz"], ("viz",)) == ["training.log"]
    assert forbidden("from . import log", ALLOWED["training"], ("training",)) == []
    assert (
        forbidden(
            "import os, torch.nn.functional as F\nfrom model.config import ModelConfig",
            ALLOWED["model"],
        )
        == []
    )


def test_model_package_is_empty():
    """So that `import model.config` loads nothing else."""
    assert (ROOT / "model" / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize(
    "command",
    [[name] for name in COMMANDS if (ROOT / name).exists()]
    + [["-m", "data.prepare"]] * (ROOT / "data" / "prepare.py").exists()
    + [["-m", "interop.load"], ["-m", "interop.export"], ["-m", "exercises.check"]],
    ids=" ".join,
)
def test_help_is_instant(command):
    """What is slow to import is not: torch takes a second and a half, numpy a tenth of that."""
    line = [sys.executable, "-X", "importtime", *command, "--help"]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "usage" in done.stdout.lower()
    loaded = {
        line.split("|")[-1].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "errors" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "tiktoken", "wandb"}
