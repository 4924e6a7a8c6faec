"""The plan before a run: parameters and bytes against the real model's, and the advice when memory
has run out.
"""

import contextlib
import dataclasses
import itertools
import json
import subprocess
import sys
import time
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from configs import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from configs.gpt2 import PRESETS as GPT2
from errors import UserError
from model.fast_attention import ATTENTION
from model.gpt import GPT
from ops.command_line import preparing_command
from ops.compiling import recompute_blocks
from ops.device import autocast, resolve
from ops.plan import (
    describe,
    limits,
    make_plan,
    memory_warning,
    out_of_memory_advice,
    report,
    time_steps,
    timing,
    training_bytes,
    warn_at_start,
)
from ops.plan.counting import LiveBytes, _step_bytes
from ops.plan.report import _room_lines
from ops.speed import flops_per_token

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def small(**changes):
    """A small configuration; options go to the section that has a field of that name."""
    config = Config(
        ModelConfig(n_layer=2, n_head=2, d_model=16, context_length=32),
        DataConfig("data/prepared/none-char"),
        OptimConfig(batch_size=12, micro_batch_size=0, max_steps=1000),
        RunConfig(
            device="cpu", precision="float32", threads=1, eval_every=0, save_every=0, out="none"
        ),
    )
    return config.replace(**changes)


def counted(**changes):
    """`training_bytes` of a small configuration, resolved."""
    return training_bytes(resolve(small(**{"micro_batch_size": 3, "batch_size": 3} | changes)), 50)


def test_parameters_of_gpt2():
    """Worked by hand: 12 layers of width 768 over 50,257 ids and 1,024 positions, output tied to
    input.
    """
    config = GPT2["gpt2-124m"][1].replace(device="cpu")
    assert make_plan(config, 50_257).parameters == {
        "embeddings": 50_257 * 768,
        "positions": 1024 * 768,
        "attention": 12 * 4 * (768 * 768 + 768),
        "MLP": 12 * (2 * 768 * 3072 + 3072 + 768),
        "norms": 25 * 2 * 768,
        "unembedding": 0,
    }


@pytest.mark.parametrize(
    ("name", "million"),
    [("gpt2-124m", 124), ("gpt2-350m", 355), ("gpt2-774m", 774), ("gpt2-1.5b", 1558)],
)
def test_presets_are_of_gpt2s_sizes(name, million):
    config = GPT2[name][1]
    with torch.device("meta"):
        model = GPT(config.model, 50_257)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == million
    assert config.optim.batch_size * config.model.context_length == 2**19
    assert config.optim.batch_size % config.optim.micro_batch_size == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "tie_embeddings": False,
            "bias": False,
            "positions": "rotary",
            "qk_norm": True,
            "norm": "rmsnorm",
            "mlp": "swiglu",
        },
        {"n_layer": 5, "positions": "sinusoidal", "mlp": "relu2", "bigrams": 7},
    ],
)
def test_parts_sum_to_the_model(options):
    config = small(**options)
    plan = make_plan(config, 50)
    model = GPT(config.model, 50)
    assert sum(plan.parameters.values()) == sum(p.numel() for p in model.parameters())
    assert plan.parameters["norms"] == sum(
        p.numel() for name, p in model.named_parameters() if "norm" in name
    )
    assert plan.parameters["embeddings"] == (50 + config.model.bigrams) * config.model.d_model
    assert bool(plan.parameters["unembedding"]) != config.model.tie_embeddings
    assert plan.flops_per_token == flops_per_token(model)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["fast", "explicit"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_are_what_autograd_saves(precision, attention, recompute, dropout):
    """Between the passes there are the tensors saved for backward, and beside them at most the
    stream that goes to the output matrix, tokens and positions; under autocast bfloat16 biases;
    with checkpointing, whose own hooks keep the blocks' inputs, those and its copies of the random
    state (5,056 bytes a block).
    """
    config = small(
        precision=precision, attention=attention, recompute=recompute, dropout=dropout, n_layer=5
    )
    model = GPT(config.model, 50, ATTENTION[attention])
    if recompute:
        recompute_blocks(model)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(50, (3, 32))
    with (
        autocast("cpu", precision),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        features = model.features(tokens)
    real = sum(
        tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in weights
    )
    kept = counted(
        precision=precision, attention=attention, recompute=recompute, dropout=dropout, n_layer=5
    )[1]
    planned = kept["activations"] + kept["weights as autocast copies them"]
    beside = features.numel() * 4 + tokens.numel() * 8 + 40 * 8
    if precision == "bfloat16":
        beside += 2 * sum(
            p.numel() for name, p in model.named_parameters() if p.ndim == 1 and "norm" not in name
        )
    if recompute:
        beside += 5 * (features.numel() * 4 + 5056)
    assert real <= planned <= real + beside


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "explicit", "dropout": 0.1},
        {"recompute": True, "batch_size": 6},
        {"n_layer": 1},
        {
            "optimizer": "muon",
            "mlp": "swiglu",
            "tie_embeddings": False,
            "positions": "rotary",
            "qk_norm": True,
            "window": 8,
        },
    ],
)
def test_bytes_are_those_of_a_real_step_at_full_depth(options, precision, monkeypatch):
    """Two and three blocks on fake tensors, extrapolated, against all blocks on real ones, at every
    moment, to the byte.
    """
    config = resolve(
        small(
            **{"n_layer": 6, "micro_batch_size": 3, "batch_size": 3, "precision": precision}
            | options
        )
    )
    planned, kept = training_bytes(config, 50)
    monkeypatch.setattr("torch._subclasses.fake_tensor.FakeTensorMode", contextlib.nullcontext)
    real = _step_bytes(config, 50, config.model.n_layer)
    assert [+parts for parts in planned] == [+real[moment] for moment in range(4)]
    assert +kept == +real["kept"]
    model = GPT(config.model, 50)
    assert kept["weights"] == 4 * sum(p.numel() for p in model.parameters())


def test_explicit_attention_holds_n_squared():
    """At twice the context explicit attention keeps four times as much beyond fast, which keeps
    twice as much, dropout aside.
    """

    def kept(attention, context_length, dropout=0.0):
        return counted(attention=attention, context_length=context_length, dropout=dropout)[1][
            "activations"
        ]

    def beyond(n):
        return kept("explicit", n) - kept("fast", n)

    assert (
        beyond(64) >= 2 * 3 * 2 * 4 * 64**2
    )  # layers, sequences, heads, bytes: the weights at least
    assert beyond(128) == pytest.approx(4 * beyond(64), rel=0.02)
    assert kept("fast", 128) == pytest.approx(2 * kept("fast", 64), rel=0.01)
    squares = kept("fast", 128, 0.1) - 2 * kept("fast", 64, 0.1)  # what is linear cancels
    assert squares >= 2 * 3 * 2 * 4 * (128**2 - 2 * 64**2)


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("muon", 1)])
def test_optimizer_and_checkpoint_copy(optimizer, copies):
    """AdamW has two moments a weight, Muon one a matrix of the blocks. A copy to be written counts
    where training goes on.
    """
    config = small(optimizer=optimizer, n_layer=8, d_model=32, micro_batch_size=1)
    plan, saving = make_plan(config, 10), make_plan(config.replace(save_every=100), 10)
    matrices = 4 * 8 * (4 * 32 * 32 + 8 * 32 * 32)
    rest = 4 * sum(plan.parameters.values()) - matrices
    state = copies * matrices + 2 * rest
    n_tensor = 8 * 16 + 4
    assert (
        state <= training_bytes(plan.config, 10)[1]["optimizer"] <= state + 4 * n_tensor
    )  # AdamW counts its steps, in float32
    written = saving.memory["checkpoint being written"]
    assert state + matrices + rest <= written <= state + matrices + rest + 4 * n_tensor
    assert saving.peak > plan.peak


def test_accumulated_gradients_are_there_throughout():
    moments, _ = counted(batch_size=6, n_layer=5)
    assert moments[0]["gradients"] == moments[0]["weights"]
    assert counted(n_layer=5)[0][0]["gradients"] < moments[0]["gradients"]


def test_batch_must_divide():
    with pytest.raises(UserError, match=r"12.*2 processes x micro_batch_size 4"):
        make_plan(small(micro_batch_size=4), 50, processes=2)


def with_limit(monkeypatch, limit):
    monkeypatch.setattr(limits, "memory_limit", lambda device: limit)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. "
            "DefaultCPUAllocator: can't allocate memory: you tried ..."
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError("std::bad_alloc"),
        OSError(12, "Cannot allocate memory"),
    ],
)
@pytest.mark.parametrize("size", [6, 4, 1])
def test_advice_names_the_largest_divisor_that_fits(error, size, monkeypatch):
    config = small()
    with_limit(
        monkeypatch,
        int(make_plan(config.replace(micro_batch_size=size), 50).peak / limits.FITS) + 2,
    )
    assert out_of_memory_advice(error, config, 50) == (
        f"out of memory at micro_batch_size 12; --micro-batch-size {size} should fit "
        f"and keeps batch_size 12 ({12 // size} accumulation steps)"
    )


def test_advice_counts_one_process_share(monkeypatch):
    with_limit(monkeypatch, 0)
    advice = out_of_memory_advice(MemoryError(), small(), 50, processes=2)
    assert advice.startswith("out of memory at micro_batch_size 6; --micro-batch-size 3 should fit")
    assert "batch_size 12 (2 accumulation steps)" in advice


def test_advice_beyond_the_micro_batch(monkeypatch):
    config = small(micro_batch_size=1, n_layer=12, context_length=128, attention="explicit")
    plain, thrifty = (
        make_plan(config.replace(recompute=again), 50).peak for again in (False, True)
    )
    assert thrifty < plain
    with_limit(monkeypatch, int((plain + thrifty) / 2 / limits.FITS))
    assert "--recompute --micro-batch-size 1 should fit" in out_of_memory_advice(
        MemoryError(), config, 50
    )
    with_limit(monkeypatch, 1)
    assert "smaller model" in out_of_memory_advice(MemoryError(), config, 50)


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), RuntimeError("shapes differ"), OSError(28, "full")]
)
def test_other_errors_get_no_advice(error):
    assert out_of_memory_advice(error, small(), 50) is None


def test_advice_frees_what_the_failed_call_held():
    def fails(size):
        held = torch.zeros(size)
        alive.append(weakref.ref(held))
        raise MemoryError

    alive = []
    try:
        fails(10)
    except MemoryError as error:
        assert alive[0]() is not None
        out_of_memory_advice(error, small(), 50)
        assert alive[0]() is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's tables")
def test_a_real_failure_under_a_limit():
    """`ulimit -v` leaves 600 MiB: the allocation of a whole batch fails for real, and what is
    advised fits in what is left.
    """
    code = """
import re, resource, sys
sys.path.insert(0, "tests")
import torch
from model.gpt import GPT
from machine import STATUS, table_bytes
from ops.plan import limits, out_of_memory_advice
from test_plan import small
from training.loss import cross_entropy
torch.set_num_threads(1)
config = small(n_layer=4, d_model=128, context_length=256, batch_size=128)
def step(rows):
    tokens = torch.zeros(rows, 256, dtype=torch.long)
    cross_entropy(GPT(config.model, 50)(tokens), tokens).backward()
limits.baseline()
step(1)
addresses = table_bytes(STATUS, "VmSize") + (600 << 20)
resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
try:
    step(128)
except (RuntimeError, MemoryError) as error:
    advice = out_of_memory_advice(error, config, 50)
print(advice)
size = int(re.search(r"--micro-batch-size (\\d+)", advice).group(1))
assert size < 128 and 128 % size == 0
step(size)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.startswith("out of memory at micro_batch_size 128; --micro-batch-size ")


def test_warning_when_memory_is_short(monkeypatch):
    plan = make_plan(small(), 50)
    assert memory_warning(plan) is None
    assert memory_warning(dataclasses.replace(plan, limit=0)) is None  # nobody knows
    short = dataclasses.replace(plan, limit=plan.peak - 1)
    assert f"{plan.peak / 2**20:,.0f} MiB" in memory_warning(short)
    on_gpu = short.config.replace(device="cuda")
    assert memory_warning(dataclasses.replace(short, config=on_gpu)) is None


@pytest.mark.parametrize(("limit", "warns"), [(1, True), (1 << 50, False), (0, False)])
def test_warning_at_the_start(limit, warns, monkeypatch, capsys):
    with_limit(monkeypatch, limit)
    warn_at_start(resolve(small()), 50)
    assert capsys.readouterr().err.startswith("warning: the run will hold about") == warns


def test_report(monkeypatch, tmp_path):
    """The sums of its own lines, the assumed vocabulary, and a time."""
    monkeypatch.chdir(tmp_path)
    config = small(data="data/prepared/novels-gpt2", stop_at=7, batch_size=6, micro_batch_size=3)
    text = report(config)
    assert (
        "step        micro-batch 3 x accumulation 2 x processes 1 x context 32 = 192 tokens" in text
    )
    assert "run         7 steps of adamw = 1,344 tokens\n" in text
    assert "50,257 ids assumed" in text
    assert text.endswith(preparing_command("data/prepared/novels-gpt2"))
    assert f"{50_257 * 16:,}  embeddings" in text
    assert "tokens/s" in text
    assert "utilisation" in text
    with_limit(monkeypatch, 1)
    assert "time        not measured: the run takes more memory than there is" in report(config)


@pytest.fixture
def no_dials(monkeypatch):
    """Activations under other options, which take seconds to count, are left out of the plan."""
    monkeypatch.setattr(sys.modules["ops.plan.report"], "_activation_lines", lambda plan: [])


def test_a_plan_that_does_not_fit_names_what_would_and_is_timed(monkeypatch, no_dials):
    """By the largest micro-batch that fits: four sequences of twelve."""
    config = small(micro_batch_size=12)
    peaks = {n: make_plan(config.replace(micro_batch_size=n), 50_257).peak for n in (4, 6, 12)}
    limit = peaks[12] / 0.84
    monkeypatch.setattr(limits, "FITS", (peaks[4] + peaks[6]) / 2 / limit)
    with_limit(monkeypatch, int(limit))
    text = report(config.replace(data="none-gpt2"))
    safe = f"{limits.FITS:.0%} are safe"
    assert f"room        84% of what is to be had, {safe}: an allocator's gaps can add" in text
    assert "--micro-batch-size 4 should fit and keeps batch_size 12 (3 accumulation steps)" in text
    assert "(timed with 4 sequences at once)" in text
    assert f"{peaks[12] / 2**20:,.0f} MiB in each process at its worst moment" in text
    assert "more memory than there is" not in text


def test_room_in_words(no_dials):
    plan = make_plan(small(), 50)
    assert "room  " not in describe(plan)
    over = describe(dataclasses.replace(plan, limit=plan.peak - 1), None, "--this")
    assert "room        more memory than there is\n            --this\n" in over
    assert "time        not measured: the run takes more memory than there is" in over
    none = describe(dataclasses.replace(plan, limit=1))
    assert "even one sequence with --recompute would not fit: choose a smaller model" in none


@pytest.mark.parametrize(
    ("device", "micro_batch_size", "times", "told"),
    [
        ("cuda:0", 3, 2.1, True),
        ("cuda", 3, 1.9, False),
        ("cuda", 12, 9, False),
        ("cpu", 3, 9, False),
    ],
)
def test_room_for_more_on_a_gpu(device, micro_batch_size, times, told):
    """Where accumulation goes on, and the peak is less than half of what is safe."""
    plan = make_plan(small(micro_batch_size=micro_batch_size), 50)
    limit = int(times * plan.peak / limits.FITS)
    on_gpu = dataclasses.replace(plan, config=plan.config.replace(device=device), limit=limit)
    assert any("--micro-batch-size 0" in line for line in _room_lines(on_gpu, "")) == told


def test_what_takes_too_long_is_reckoned(no_dials):
    """1,000 steps of 12 sequences of 32 tokens, at half of ten thousand FLOP/s."""
    plan = make_plan(small(), 50)
    seconds = 1000 * 12 * 32 * plan.flops_per_token / 5e3
    assert f"over 10 s; {seconds / 86_400:,.0f} days to finish" in describe(plan, {"rate": 1e4})
    fast = describe(plan, {"rate": 1e12})
    assert "over 10 s; 0:00:0" in fast
    assert "at half of the 1e+03 GFLOP/s" in fast


def test_report_reads_the_prepared_data(tmp_path):
    from data.tokenizer import CharTokenizer

    splits = {}
    for split, n_token in (("train", 3200), ("val", 320)):
        (tmp_path / f"{split}.bin").write_bytes(bytes(2 * n_token))
        splits[split] = {"tokens": n_token, "bytes": n_token, "documents": 1, "sha256": ""}
    info = {
        "format": 1,
        "tokenizer": CharTokenizer("abc").spec(),
        "dtype": "uint16",
        "splits": splits,
    }
    (tmp_path / "dataset.json").write_text(json.dumps(info))
    text = report(small(data=str(tmp_path), stop_at=33))
    assert "with 3 ids" in text
    assert "= 4.00 epochs" in text  # 33 steps of 12 windows; an epoch has 99
    assert "assumed" not in text


def test_time_is_that_of_all_micro_batches(monkeypatch):
    """By a clock on which forward, backward and update take a second each: 16 micro-batches of 4
    are 16 x 2 s and an update.
    """
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    times = time_steps(make_plan(small(batch_size=64, micro_batch_size=4, eval_batches=3), 50))
    assert times["rows"] == 4
    assert times["step"] == 16 * 2 + 1
    assert times["evaluation"] == 2 * 3 * 64 / 4  # both splits
    assert times["rate"] == pytest.approx(
        3 * 2 * 128**3
    )  # three products a second: no wider ones are tried


def test_what_takes_too_long_is_not_timed(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS_A_PASS", 1e-9)
    plan = make_plan(small(), 50)
    assert time_steps(plan).keys() == {"rate"}
    assert "not measured: one sequence" in describe(plan, time_steps(plan))


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"precision": "float32", "context_length": 512}, False),
        ({"precision": "float32", "context_length": 512, "dropout": 0.1}, True),
        ({"precision": "float32", "context_length": 512, "dropout": 0.1, "window": 8}, False),
        ({"precision": "bfloat16", "context_length": 512}, True),
        ({"precision": "bfloat16", "context_length": 513}, False),
    ],
)
def test_it_says_where_fast_attention_holds_the_weights(options, holds):
    """And so it is: 2 bytes a weight at least, of 2 layers, 2 heads and 3 rows, are kept for the
    backward pass, or not.
    """
    assert (
        "fast attention holds the n^2 weights" in describe(make_plan(small(**options), 50))
    ) == holds
    assert (
        counted(**options)[1]["activations"] > 2 * 2 * 2 * 3 * options["context_length"] ** 2
    ) == holds


def test_the_largest_preset_is_planned_without_its_weights():
    code = """
import resource, sys
from configs.gpt2 import PRESETS
from ops.plan import limits, report
limits.memory_limit = lambda device: 8 << 30
config = PRESETS["gpt2-1.5b"][1].replace(device="cpu", precision="bfloat16")
text = report(config)
assert "1,557,611,200" in text and "not measured" in text, text
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak >> (20 if sys.platform == "darwin" else 10))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 1024  # MiB; its weights alone are six times that


def test_live_bytes_follows_storages():
    """Views add nothing; what is freed is taken off; the peak stays."""
    with LiveBytes() as memory:
        memory.enter("a", 0)
        x = torch.zeros(100)
        view = x[10:]
        memory.part = "b"
        y = x + 1
        assert memory.live == Counter(a=400, b=400)
        del x
        assert memory.live["a"] == 400  # the view holds it
        del view, y
        assert memory.live.total() == 0
    assert memory.peaks[0] == Counter(a=400, b=400)
