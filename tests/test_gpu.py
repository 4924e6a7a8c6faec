"""What a card must do as the CPU does in float64: attention by every path, the model in every
precision, runs, resuming, sampling.

Each test runs on the CPU too, where that says something, so that it can't rot; `pytest -m gpu` runs
those that need a card.
"""

import math

import pytest
import torch
from helpers import (
    MODERN,
    assert_same_state,
    losses,
    make_config,
    make_model,
    nonsense,
    read_records,
    train_here,
    write_corpus,
)

from model.attention import Mask, explicit_attention
from model.fast_attention import fast_attention
from model.generate import generate
from model.sampling import Sampling
from ops import checkpoint
from ops.device import DTYPES, autocast
from training.loss import cross_entropy

CARD = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    ],
)
DEVICES = pytest.mark.parametrize("where", ["cpu", CARD])
CARD_ALONE = pytest.mark.parametrize("where", [CARD])


@pytest.fixture(autouse=True)
def exact_products():
    """float32 products in float32, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


# --- attention: every path that a mask may take, against the equation in float64 on the CPU ---

CASES = {
    "causal": (Mask(), 48, 48),
    "not causal": (Mask(causal=False), 48, 48),
    "window, in blocks": (Mask(window=6), 48, 48),
    "window, in blocks, a short last one": (Mask(window=7), 45, 45),
    "window, too wide for blocks": (Mask(window=40), 48, 48),
    "long": (Mask(), 530, 530),
    "long window": (Mask(window=130), 530, 530),
    "one query behind a cache": (Mask(), 1, 48),
    "one query, a window": (Mask(window=6), 1, 48),
    "some queries behind a cache": (Mask(), 5, 48),
    "padded": (Mask(lengths=(48, 17)), 48, 48),
    "padded, one query": (Mask(lengths=(48, 17)), 1, 48),
    "padded, a window": (Mask(window=6, lengths=(48, 17)), 48, 48),
}


def tensors(n_query, n_key, dtype):
    """q, k, v and the gradient of out: (2, 2, n, 16), in float64 numbers that `dtype` can hold."""
    sizes = (n_query, n_key, n_key, n_query)
    return [torch.randn(2, 2, n, 16).to(dtype).double() for n in sizes]


def out_and_gradients(attend, inputs, mask, device, dtype):
    """out and the gradients of q, k, v, in float64 on the CPU; padding's queries don't count."""
    *qkv, direction = (x.to(device, dtype) for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    n_query = direction.shape[-2]
    counts = torch.ones(2, 1, n_query, 1, dtype=dtype, device=device)
    for row, length in enumerate(mask.lengths or ()):
        counts[row, :, length:] = 0  # of n_query new tokens the row's own end at its length
    out = attend(*qkv, mask, 0.0) * counts
    found = torch.autograd.grad(out, qkv, direction)
    return [x.detach().cpu().double() for x in (out, *found)]


@DEVICES
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attend", [fast_attention, explicit_attention])
def test_attention_is_the_equation(where, precision, attend):
    """Out and gradients within a few units of the format's rounding: the softmax's weights are
    rounded once, out once, and a gradient is a sum of products of rounded factors. 8 eps covers
    those; float32's sums of 530 terms get sqrt(530) of it.
    """
    if where == "cpu" and precision == "float16":
        pytest.skip("float16 is for CUDA")
    dtype = DTYPES[precision]
    factor = 8 * (math.sqrt(530) if precision == "float32" else 1)
    for case, (mask, n_query, n_key) in CASES.items():
        inputs = tensors(n_query, n_key, dtype)
        right = out_and_gradients(explicit_attention, inputs, mask, "cpu", torch.float64)
        found = out_and_gradients(attend, inputs, mask, where, dtype)
        for name, a, b in zip(("out", "q", "k", "v"), found, right, strict=True):
            bound = factor * torch.finfo(dtype).eps * b.abs().max().clamp(min=1)
            assert (a - b).abs().max() <= bound, f"{case}: {name}"


# --- the model ---

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Of the gradient, as a share of its norm: some ten of the format's eps, for two layers."""


@DEVICES
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("options", [{}, MODERN | {"bigrams": 31}, {"window": 2}])
def test_loss_and_gradient(where, precision, options):
    """Loss and gradient under autocast, against float64 on the CPU; float16's loss is scaled, as
    the scaler does.
    """
    if where == "cpu" and precision == "float16":
        pytest.skip("float16 is for CUDA")
    model = make_model(seed=5, d_model=32, **options)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(11, (3, 9))
    model.double()
    right_loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    right_loss.backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters()])
    model = make_model(seed=5, d_model=32, **options)
    model.load_state_dict(weights)
    model.to(where)
    scale = 1024.0 if precision == "float16" else 1.0
    with autocast(where, precision):
        loss = cross_entropy(model(tokens[:, :-1].to(where)), tokens[:, 1:].to(where))
    (scale * loss).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()]).cpu().double() / scale
    assert loss.item() == pytest.approx(right_loss.item(), rel=TOLERANCE[precision])
    assert (found - right).norm() < TOLERANCE[precision] * right.norm()


@DEVICES
@pytest.mark.parametrize("options", [{}, {"window": 3, "bigrams": 31}])
def test_sampling_in_float64_is_the_cpus(where, tiny, options):
    """Rows of unequal length, past the context's edge, with the cache and without."""
    prompts = [[1], [2, 3, 4], [5, 6]]
    model = tiny(**options)
    right = list(generate(model, prompts, 14, Sampling(temperature=0.0), use_cache=False))
    model.to(where)
    for use_cache in (True, False):
        drawn = generate(model, prompts, 14, Sampling(temperature=0.0), use_cache=use_cache)
        assert list(drawn) == right


# --- runs ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", nonsense())


def run(corpus, out, where, **fields):
    fields = {"precision": "float32", "micro_batch_size": 2} | fields
    assert train_here(make_config(corpus, out, device=where, **fields)) == 0
    return losses(out)


def evaluations(folder):
    return [r["val_loss"] for r in read_records(folder) if r["kind"] == "eval"]


@pytest.mark.slow
@DEVICES
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_the_cpus(where, corpus, tmp_path, optimizer):
    """Eight float32 steps with dropout off: rounding alone may tell them apart."""
    there = run(corpus, tmp_path / "there", where, optimizer=optimizer, deterministic=True)
    here = run(corpus, tmp_path / "here", "cpu", optimizer=optimizer)
    assert there == pytest.approx(here, rel=1e-4)
    assert evaluations(tmp_path / "there") == pytest.approx(
        evaluations(tmp_path / "here"), rel=1e-4
    )


@pytest.mark.slow
@DEVICES
def test_a_deterministic_run_goes_on_bit_for_bit(where, corpus, tmp_path):
    """In one go, and stopped in the middle and resumed; dropout is on."""
    fields = {"precision": "bfloat16", "dropout": 0.1, "deterministic": True}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(corpus, whole, where, **fields)
    run(corpus, parts, where, stop_at=4, **fields)
    run(corpus, parts, where, resume=True, **fields)
    assert_same_state(whole, parts)
    assert losses(whole) == losses(parts)


@pytest.mark.slow
@DEVICES
def test_a_checkpoint_goes_on_on_the_cpu(where, corpus, tmp_path):
    """Weights, moments and step move; what follows is the undisturbed run but for rounding."""
    moved = tmp_path / "moved"
    run(corpus, moved, where, stop_at=4)
    found = run(corpus, moved, "cpu", resume=True)
    right = run(corpus, tmp_path / "whole", "cpu")
    assert found == pytest.approx(right, rel=1e-4)
    assert checkpoint.load(moved / "checkpoint.pt").step == 8


@CARD_ALONE
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_with_its_scaler(where, corpus, tmp_path, optimizer):
    """The scale is found, kept in the checkpoint, and no step is lost on the way."""
    fields = {"precision": "float16", "optimizer": optimizer}
    found = run(corpus, tmp_path / "half", where, stop_at=4, **fields)
    found = run(corpus, tmp_path / "half", where, resume=True, **fields)
    right = run(corpus, tmp_path / "full", "cpu", optimizer=optimizer)
    assert len(found) == 8
    assert found == pytest.approx(right, rel=3e-2)
    assert checkpoint.load(tmp_path / "half" / "checkpoint.pt").scaler["scale"] > 1


@CARD_ALONE
@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"window": 3}, {"optimizer": "muon", "dropout": 0.1}])
def test_compiling_changes_rounding_alone(where, corpus, tmp_path, fields):
    """With dropout the masks differ, so that the loss alone stays near."""
    compiled = run(corpus, tmp_path / "compiled", where, compile="on", **fields)
    eager = run(corpus, tmp_path / "eager", where, **fields)
    assert compiled == pytest.approx(eager, rel=0.1 if "dropout" in fields else 1e-3)
