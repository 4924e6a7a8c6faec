import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs import Config, RunConfig
from configs.gpt2 import PRESETS as GPT2
from model.config import ModelConfig

ROOT = Path(__file__).parents[1]


def test_defaults_are_gpt2():
    assert dataclasses.asdict(ModelConfig()) == {
        "n_layer": 12,
        "n_head": 12,
        "n_kv_head": 0,
        "d_model": 768,
        "d_ff": 0,
        "context_length": 1024,
        "positions": "learned",
        "rope_base": 10_000.0,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "mlp": "gelu",
        "qk_norm": False,
        "zero_init": False,
        "tie_embeddings": True,
        "bias": True,
        "dropout": 0.0,
        "window": 0,
        "bigrams": 0,
    }


def test_is_frozen():
    config = ModelConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 1


@pytest.mark.parametrize(
    ("d_model", "n_head", "mlp", "d_head", "d_mlp"),
    [
        (768, 12, "gelu", 64, 3072),
        (6, 2, "relu2", 3, 24),
        (12, 3, "swiglu", 4, 32),
        (768, 12, "swiglu", 64, 2048),
        (128, 4, "swiglu", 32, 344),  # 341.33 to the nearest multiple of 8
    ],
)
def test_widths(d_model, n_head, mlp, d_head, d_mlp):
    config = ModelConfig(d_model=d_model, n_head=n_head, mlp=mlp)
    assert (config.d_head, config.d_mlp) == (d_head, d_mlp)
    assert dataclasses.replace(config, d_ff=7).d_mlp == 7
    assert (config.n_key_head, dataclasses.replace(config, n_kv_head=1).n_key_head) == (n_head, 1)


@pytest.mark.parametrize("d_model", [1, 2, 3, 64, 100, 129])
def test_swiglu_is_as_large_as_gelu(d_model):
    """Three matrices of width d_mlp cost what two of 4 d_model do, up to the rounding to a multiple
    of 8, which is never 0.
    """
    d_mlp = ModelConfig(d_model=d_model, n_head=1, mlp="swiglu").d_mlp
    assert d_mlp > 0
    assert d_mlp % 8 == 0
    assert abs(d_mlp - 8 * d_model / 3) <= (4 if d_model > 1 else 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_layer": 0}, ["n_layer", "0"]),
        ({"n_head": 0}, ["n_head", "0"]),
        ({"d_model": -8}, ["d_model", "-8"]),
        ({"context_length": 0}, ["context_length", "0"]),
        ({"d_model": 10, "n_head": 3}, ["d_model", "10", "n_head", "3"]),
        ({"d_model": 6, "n_head": 2, "positions": "rotary"}, ["rotary", "d_head", "3"]),
        ({"d_model": 7, "n_head": 1, "positions": "sinusoidal"}, ["sinusoidal", "d_model", "7"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": float("nan")}, ["dropout", "nan"]),
        ({"window": -1}, ["window", "-1"]),
        ({"n_kv_head": -1}, ["n_kv_head", "-1"]),
        ({"n_kv_head": 5}, ["n_kv_head", "5", "n_head", "12"]),
        ({"n_kv_head": 24}, ["n_kv_head", "24", "n_head", "12"]),
        ({"d_ff": -4}, ["d_ff", "-4"]),
        ({"rope_base": 500_000.0}, ["rope_base", "500000", "learned", "rotary"]),
        ({"rope_base": 0.0, "positions": "rotary"}, ["rope_base", "0.0"]),
        ({"rope_base": float("nan"), "positions": "rotary"}, ["rope_base", "nan"]),
        ({"norm_eps": 0.0}, ["norm_eps", "0.0"]),
        ({"norm_eps": float("inf")}, ["norm_eps", "inf"]),
        ({"bigrams": -1}, ["bigrams", "-1"]),
        ({"positions": "relative"}, ["positions", "relative", "rotary"]),
        ({"norm": "batchnorm"}, ["norm", "batchnorm", "rmsnorm"]),
        ({"mlp": "relu"}, ["mlp", "relu", "relu2"]),
    ],
)
def test_refuses_and_says_what(options, words):
    with pytest.raises(ValueError, match="(?s)" + ".*".join(map(re.escape, words))):
        ModelConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"n_layer": 1, "n_head": 1, "d_model": 1, "context_length": 1},
        {"d_model": 7, "n_head": 1},  # an odd width hinders neither learned positions nor none
        {"d_model": 6, "n_head": 2, "positions": "sinusoidal"},
        {"d_model": 4, "n_head": 2, "positions": "rotary"},
        {"dropout": 0.999},
        {"window": 1},
        {"window": 5000},
        {"n_kv_head": 1},
        {"n_kv_head": 12},
        {"d_ff": 1},
        {"rope_base": 500_000.0, "positions": "rotary"},
    ],
)
def test_accepts_the_edges(options):
    ModelConfig(**options)


def test_imports_no_torch():
    code = "import sys, model.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_fused_is_read_as_fast():
    """The old name, on the command line or in the record of a run."""
    assert RunConfig(attention="fused").attention == "fast"
    assert RunConfig(attention="explicit").attention == "explicit"
    assert Config().replace(attention="fused").run.attention == "fast"
    recorded = Config().to_dict()
    recorded["run"]["attention"] = "fused"
    assert Config.from_dict(recorded) == Config()


def test_a_record_without_the_later_fields_means_the_same():
    """config.json and checkpoints of runs made before there were grouped queries and the rest."""
    recorded = Config().to_dict()
    for name in ("n_kv_head", "d_ff", "rope_base", "norm_eps"):
        del recorded["model"][name]
    del recorded["optim"]["eps"]
    assert Config.from_dict(recorded) == Config()


def test_the_fast_preset_moves_its_matrices_as_the_record_does():
    """modded-nanogpt's record 7 adds lr sqrt(max(rows, columns)) to an orthogonal matrix's unit: a
    root mean square of lr = 3.6e-4 a step. Muon's updates here have 0.2 lr. It reads 2.67 billion
    tokens; the preset a tenth more.
    """
    config = GPT2["gpt2-124m-fast"][1]
    assert 0.2 * config.optim.lr == pytest.approx(3.6e-4)
    tokens = config.optim.max_steps * config.optim.batch_size * config.model.context_length
    assert tokens == pytest.approx(1.1 * 5100 * 512 * 1024, rel=0.01)
    assert config.model.d_head == 128


def test_the_smallest_gpt2_follows_nanogpt():
    """config/train_gpt2.py of nanoGPT: half a million tokens a step, 600,000 steps."""
    config = GPT2["gpt2-124m"][1]
    optim = config.optim
    assert optim.batch_size * config.model.context_length == 2**19
    assert (optim.lr, optim.beta1, optim.beta2) == (6e-4, 0.9, 0.95)
    assert optim.min_lr == pytest.approx(6e-5)
    assert (optim.weight_decay, optim.grad_clip, optim.schedule) == (0.1, 1.0, "cosine")
    assert (optim.warmup_steps, optim.max_steps) == (2000, 600_000)
