"""What is chosen for a machine, made up by pretending to have it; and that compiling and
recomputing change no result.
"""

import dataclasses
import itertools
import os
import platform
import subprocess
import sys

import pytest
import torch
from helpers import (
    ROOT,
    command,
    losses,
    make_config,
    make_model,
    nonsense,
    restored,
    same_value,
    train_here,
    write_corpus,
)

from configs import RunConfig
from errors import UserError
from model.attention import explicit_attention
from model.fast_attention import fast_attention
from model.gpt import GPT
from ops import compiling, speed
from ops.compiling import compile_or_not, recompute_blocks
from ops.device import autocast, default_threads, resolve, set_up
from ops.messages import compile_note, precision_text
from ops.speed import flops_per_token, makers_rate, matrix_rate, seconds_left
from training.optimizer import clip_gradients

pytestmark = pytest.mark.slow


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a machine: CUDA devices of some capability, MPS or not, and what the processor
    can do.
    """

    def pretend(cuda=0, capability=(9, 0), mps=False, cpu=(), maker="AMD EPYC"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        able = {"avx2": True, "cpu_name": maker, **dict.fromkeys(cpu, True)}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)

    return pretend


def resolved(**fields):
    return resolve(
        make_config(
            "d", "r", **({"device": "auto", "precision": "auto", "compile": "auto"} | fields)
        )
    ).run


# --- auto ---


@pytest.mark.parametrize(
    ("hardware", "device", "precision"),
    [
        ({"cuda": 1, "capability": (9, 0)}, "cuda", "bfloat16"),
        ({"cuda": 1, "capability": (8, 0)}, "cuda", "bfloat16"),
        ({"cuda": 2, "capability": (7, 5)}, "cuda", "float16"),
        ({"cuda": 1, "capability": (7, 0)}, "cuda", "float16"),
        ({"cuda": 1, "mps": True}, "cuda", "bfloat16"),
        ({"mps": True, "cpu": ["bf16"]}, "mps", "float32"),
        ({"cpu": ["avx512_bf16"]}, "cpu", "bfloat16"),
        ({"cpu": ["amx_bf16"]}, "cpu", "bfloat16"),
        ({"cpu": ["avx512_bf16"], "maker": "Intel Xeon"}, "cpu", "float32"),
        ({"cpu": ["avx512_bf16", "amx_bf16"], "maker": "Intel Xeon"}, "cpu", "bfloat16"),
        ({"cpu": ["bf16"]}, "cpu", "bfloat16"),
        ({"cpu": ["avx512_f"]}, "cpu", "float32"),
        ({}, "cpu", "float32"),
    ],
)
def test_auto(machine, hardware, device, precision):
    machine(**hardware)
    run = resolved()
    assert (run.device, run.precision) == (device, precision)


def test_precision_follows_the_device_asked_for(machine):
    machine(cuda=1, capability=(7, 5), mps=True, cpu=["amx_bf16"])
    found = {
        device: resolved(device=device).precision for device in ("cpu", "mps", "cuda", "cuda:0")
    }
    assert found == {"cpu": "bfloat16", "mps": "float32", "cuda": "float16", "cuda:0": "float16"}


def test_what_is_set_is_kept(machine):
    machine(cuda=4, cpu=["amx_bf16"])
    run = resolved(device="cpu", precision="float32", compile="on", threads=3)
    assert (run.device, run.precision, run.compile, run.threads) == ("cpu", "float32", "on", 3)
    assert resolve(make_config("d", "r", threads=0)).run.threads == torch.get_num_threads()
    again = resolve(make_config("d", "r", device="auto"))
    assert resolve(again) == again


@pytest.mark.parametrize(
    ("variables", "cpus", "expected"),
    [
        ({}, 64, 6),  # torch's own choice
        ({}, 2, 2),  # a container's quota
        ({"OMP_NUM_THREADS": "1"}, 64, 6),  # the user's, whom torch has heard already
        # torchrun's 1, which it sets where the user has set nothing
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 8, 8),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4"}, 9, 2),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4"}, 3, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "?"}, 3, 3),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 8, 6),
    ],
)
def test_threads_of_this_machine(monkeypatch, variables, cpus, expected):
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr("ops.device.usable_cpus", lambda: cpus)
    assert default_threads() == expected


@pytest.mark.parametrize(
    ("device", "seconds", "compiled"),
    [("cuda", 200.0, "on"), ("cuda", 199.0, "off"), ("cpu", 10**6, "off"), ("mps", 10**6, "off")],
)
def test_compile_auto(machine, device, seconds, compiled):
    machine(cuda=1, mps=True)
    config = make_config("d", "r", device=device, precision="float32", compile="auto")
    assert resolve(config, seconds).run.compile == compiled
    line = compile_note(config, seconds if device == "cuda" else 0.0)
    assert (line is not None) == (device == "cuda")
    assert line is None or line.startswith(f"note     compile {compiled}: ")
    told = config.replace(compile="on")
    assert resolve(told, 0.0).run.compile == "on"
    assert compile_note(told, 0.0) is None


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({}, 1),
        ({"device": "cuda:0"}, 1),
        ({"precision": "float32"}, 2),
        ({"stop_at": 40}, 0.3),
        ({"max_minutes": 0.001}, None),
        ({"device": "cpu"}, 0),
        ({"stop_at": 5}, 0),
    ],
)
def test_seconds_left(machine, monkeypatch, fields, share):
    """Of 110 steps from step 10: 100 steps x 8 rows x 8 tokens, at three tenths of the maker's rate
    in each of two processes.
    """
    machine(cuda=1)
    config = make_config(
        "d", "r", **{"device": "cuda", "precision": "bfloat16", "max_steps": 110, **fields}
    )
    flops = flops_per_token(GPT(config.model, 11))
    tokens = 100 * config.optim.batch_size * config.model.context_length
    for name, rate in (("NVIDIA L4", 121e12), ("a GPU", 60e12)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None, name=name: name)
        monkeypatch.setattr(speed, "EAGER_SHARE", 1e-10)
        expected = 0.06 if share is None else share * tokens * flops / (1e-10 * rate * 2)
        assert seconds_left(config, 11, first=10, n_process=2) == pytest.approx(expected)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_float16_is_refused_off_cuda(machine, device):
    machine(cuda=1, mps=True)
    with pytest.raises(UserError, match=f"float16, which is for CUDA; on {device}"):
        resolved(device=device, precision="float16")
    assert resolved(device="cuda", precision="float16").precision == "float16"


@pytest.mark.parametrize(
    ("device", "cuda"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2), ("mps", 0)]
)
def test_a_device_that_is_not_there(machine, device, cuda):
    machine(cuda=cuda)
    with pytest.raises(
        UserError, match=f"device is {device}, but .* --device auto or cpu"
    ) as caught:
        resolved(device=device)
    assert len(str(caught.value).splitlines()) == 1


# --- set up ---


def test_set_up_is_deterministic_on_cpu():
    run = RunConfig(device="cpu", threads=1, seed=5)
    with restored():
        set_up(run)
        assert torch.are_deterministic_algorithms_enabled()
        first = torch.rand(3)
        assert torch.get_num_threads() == 1
        set_up(dataclasses.replace(run, threads=2))
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.rand(3), first)
        set_up(dataclasses.replace(run, seed=6))
        assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_on_cuda_when_asked(monkeypatch, deterministic):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with restored():
        set_up(RunConfig(device="cuda", threads=1, deterministic=deterministic))
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.get_float32_matmul_precision() == ("highest" if deterministic else "high")
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) is deterministic
        set_up(RunConfig(device="cpu", threads=1))
        assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_autocast(precision):
    layer = torch.nn.Linear(2, 2)
    with autocast("cpu", precision):
        assert layer(torch.ones(1, 2)).dtype == getattr(torch, precision)


# --- the parts ---


def gradients(model, seed=4):
    model.train()
    torch.manual_seed(seed)
    loss = model(torch.arange(16).view(2, 8) % 11).float().logsumexp(-1).mean()
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: parameter.grad for name, parameter in model.named_parameters()},
    }


@pytest.mark.parametrize("attend", [explicit_attention, fast_attention])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recomputing_gives_the_same_gradients(attend, dropout, precision):
    found, calls = [], []
    for recompute in (False, True):
        model = make_model(attend=attend, seed=3, dropout=dropout)
        if recompute:
            recompute_blocks(model)
        for block in model.blocks:
            block.mlp.register_forward_pre_hook(
                lambda *_, recompute=recompute: calls.append(recompute)
            )
        with autocast("cpu", precision):
            found.append(gradients(model))
    assert same_value(*found)
    assert (calls.count(False), calls.count(True)) == (
        2,
        4,
    )  # each block once more, in the backward pass


def test_clipping_by_hand():
    """Norm of (3, 4) and 12 over two parameters: 13. Clipped to 6.5 they are halved (up to the 1e-6
    that torch adds).
    """
    holder = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    )
    for largest, factor in ((6.5, 0.5), (13.5, 1.0), (0.0, 1.0)):
        holder[0].grad, holder[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
        assert float(clip_gradients(holder, largest)) == pytest.approx(13.0, rel=1e-6)
        assert holder[0].grad.tolist() == pytest.approx([3 * factor, 4 * factor], rel=1e-6)
        assert holder[1].grad.item() == pytest.approx(12 * factor, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "n_weight"),
    [
        # per layer 4 attention matrices of 16 x 16 and two of 16 x 64: 3,072; two layers 6,144
        (
            {"bias": False, "norm": "rmsnorm", "positions": "rotary"},
            6144 + 5 * 16 + 11 * 16,
        ),  # tied: the table multiplies too
        (
            {"bias": False, "norm": "rmsnorm", "positions": "rotary", "tie_embeddings": False},
            6144 + 5 * 16 + 11 * 16,
        ),
        ({"bias": False, "norm": "rmsnorm", "positions": "learned"}, 6144 + 5 * 16 + 11 * 16),
        ({"bias": False, "norm": "rmsnorm", "bigrams": 7}, 6144 + 5 * 16 + 11 * 16),
        # biases: 4 x 16 + 64 + 16 a layer, and LayerNorm's own
        ({}, 6144 + 2 * 144 + 5 * 32 + 11 * 16),
    ],
)
def test_flops_per_token_by_hand(options, n_weight):
    assert flops_per_token(make_model(seed=3, **options)) == 6 * n_weight + 12 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("size", "laps", "width"),
    [(8, [1], 8), (300, [2], 300), (0, [2], 128), (0, [1, 2], 256), (0, [1, 1, 2], 512)],
)
def test_matrix_rate_is_a_rate(monkeypatch, size, laps, width):
    """Counted in the clock's own time: three products of 2 n^3 in a lap, of the width at which a
    lap first takes 2 ms.
    """
    now = itertools.accumulate(
        lap / 1000 for lap in laps for _ in range(8)
    )  # two looks a lap, four laps a width
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now))
    assert matrix_rate("cpu", "float32", size) == pytest.approx(
        2 * width**3 / (laps[-1] / 1000 / 3)
    )


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA RTX A4000", None),
        ("AMD EPYC 9B14", None),
    ],
)
def test_the_makers_rate(name, teraflops):
    assert makers_rate(name) == (teraflops and teraflops * 1e12)


# --- memory ---

FAULTS = """
import resource, torch
from configs import RunConfig
from ops.device import set_up
set_up(RunConfig(device="cpu", precision="float32", threads=1))
for round in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << 20) for _ in range(16)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="this machine's C library isn't glibc"
)
@pytest.mark.parametrize(
    "environment", [{}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}, {"MALLOC_TRIM_THRESHOLD_": "0"}]
)
def test_freed_memory_is_used_again(environment):
    """16 tensors of 4 MiB, 1,024 pages each, made a fourth time: their pages are there, unless the
    environment rules it out.
    """
    script = [sys.executable, "-c", FAULTS]
    found = subprocess.run(
        script, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (int(found.stdout) > 15_000) == bool(environment)


# --- compiling ---


def compile_on(**fields):
    return RunConfig(device="cpu", compile="on", precision="float32", **fields)


def test_compile_off():
    model = make_model(seed=3)
    assert (
        compile_or_not(
            model, dataclasses.replace(compile_on(), compile="off"), torch.zeros(1, 8).long()
        )
        is model
    )


def one_warning(model, run, capsys):
    assert compile_or_not(model, run, torch.zeros(1, 8).long()) is model
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("warning: ")
    assert error.count("\n") == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    return error


def test_compile_without_a_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in one_warning(make_model(seed=3), compile_on(), capsys)


@pytest.mark.parametrize("when", ["compile", "forward", "backward"])
def test_compile_that_fails(monkeypatch, capsys, when):
    """Whatever fails, and whenever: at once, in the first forward pass or in the first backward
    pass.
    """

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise RuntimeError("first line\nsecond line")

    def fake(model):
        def forward(tokens):
            if when == "forward":
                raise RuntimeError("first line\nsecond line")
            return Broken.apply(model(tokens))

        if when == "compile":
            raise RuntimeError("first line\nsecond line")
        return forward

    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/true")
    monkeypatch.setattr(torch, "compile", fake)
    message = one_warning(make_model(seed=3), compile_on(), capsys)
    assert "first line" in message
    assert "second line" not in message


def test_compile_that_runs_out_of_memory_is_no_failure_of_the_compiler(monkeypatch):
    """Going on without it would take more memory yet."""

    def fake(model):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/true")
    monkeypatch.setattr(torch, "compile", fake)
    with pytest.raises(torch.OutOfMemoryError):
        compile_or_not(make_model(), compile_on(), torch.zeros(1, 8).long())


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (RunConfig(device="cuda:1", precision="float32"), "float32 (products in TF32"),
        (RunConfig(device="cuda", precision="float32", deterministic=True), "float32"),
        (RunConfig(device="cuda", precision="bfloat16"), "bfloat16"),
        (RunConfig(device="cpu", precision="float32"), "float32"),
    ],
)
def test_the_precision_told(run, expected):
    assert precision_text(run).partition(";")[0] == expected


def test_compile_that_works_leaves_no_gradients(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/true")
    seen = []

    def fake(model):
        return lambda tokens: seen.append(tuple(tokens.shape)) or model(tokens)

    monkeypatch.setattr(torch, "compile", fake)
    model = make_model(seed=3)
    assert compile_or_not(model, compile_on(), torch.zeros(3, 8).long()) is not model
    assert seen == [(3, 8)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_goes_on_without_a_compiler(tmp_path):
    """The real thing: CXX unset, nothing on the PATH. One line says so, and the run is the eager
    one.
    """
    data = write_corpus(tmp_path / "d", nonsense())
    assert train_here(make_config(data, tmp_path / "off")) == 0
    (tmp_path / "empty").mkdir()
    bare = {"PATH": str(tmp_path / "empty"), "CXX": None, "CC": None}
    options = ["--compile", "on", "--out", tmp_path / "on"]
    _, error = command("train.py", tmp_path / "off" / "config.json", *options, env=bare)
    (line,) = (line for line in error.split("\n") if line.strip() and "step/s" not in line)
    assert "no C++ compiler" in line
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
