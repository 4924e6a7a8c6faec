"""A window in a compiled step on a GPU: the mask that is compiled, its result and gradients, and
when it is chosen. flex_attention's own mathematics runs on a CPU too; its backward pass does so
once torch's refusal is passed by.
"""

import types

import pytest
import torch
from helpers import make_config, make_model
from torch.nn.attention import flex_attention as pytorch
from torch.testing import assert_close

from configs import RunConfig
from model import fast_attention as twin, flex_windows
from model.attention import Mask, explicit_attention
from model.fast_attention import fast_attention, way
from model.flex_windows import flex_attention, prepare, why_not
from ops import compiling
from ops.compiling import WithLoss, compile_or_not
from ops.messages import attention_note
from training.loss import cross_entropy

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch):
    """A CPU passes for a GPU, and graphs are run as they were traced; gives the list of graphs."""
    monkeypatch.setattr(flex_windows, "DEVICES", {"cpu"})
    monkeypatch.setattr(pytorch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/true")
    graphs, real = [], torch.compile
    torch._dynamo.reset()

    def backend(module, example):
        graphs.append(module.code)
        return module

    monkeypatch.setattr(torch, "compile", lambda f: real(f, fullgraph=True, backend=backend))
    yield graphs
    flex_windows.forget()
    torch._dynamo.reset()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_token", "window"), [(300, 7), (300, 130), (128, 128), (40, 1)])
def test_the_mask_that_is_compiled(causal, n_token, window):
    mask = Mask(causal, window)
    prepare(mask, n_token, CPU)
    found = flex_windows._prepared[mask, n_token, CPU]
    assert flex_windows.forget()
    assert not flex_windows.forget()
    allowed = mask.allowed(n_token, n_token)
    compiled = pytorch.create_mask(found.mask_mod, 1, 1, n_token, n_token, device="cpu")
    assert torch.equal(compiled, allowed)
    n_block = -(-n_token // 128)
    wide = torch.zeros(128 * n_block, 128 * n_block, dtype=torch.bool)
    wide[:n_token, :n_token] = allowed[0, 0]
    tiles = wide.unflatten(0, (n_block, 128)).unflatten(2, (n_block, 128))
    assert torch.equal(found.to_dense()[0, 0].bool(), tiles.any(dim=3).any(dim=1))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients(on_cpu, causal):
    """Of explicit attention in float64, on a length that is no whole number of blocks."""
    mask = Mask(causal, window=7)
    prepare(mask, 150, CPU)
    given = [torch.randn(2, 3, 150, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda q, k, v: fast_attention(q, k, v, mask))
    results = []
    for attend in (compiled, lambda q, k, v: explicit_attention(q, k, v, mask)):
        out = attend(*given)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(on_cpu) == 1
    assert "flex_attention" in on_cpu[0]


@pytest.mark.slow
def test_a_step_with_a_window(on_cpu, monkeypatch, capsys):
    """A whole model, compiled: flex_attention in each layer; blocks where that fails, and where a
    text is of another length than what was prepared.
    """
    model = make_model(seed=0, d_model=32, context_length=40, window=5, positions="rotary")
    step = WithLoss(model, cross_entropy)
    tokens = torch.randint(11, (2, 40))
    run = RunConfig(device="cpu", precision="float32", compile="on")
    compiled = compile_or_not(step, run, tokens, tokens)
    assert len(on_cpu) == 1
    assert on_cpu[0].count("higher_order.flex_attention") == 2
    assert_close(compiled(tokens, tokens), step(tokens, tokens), rtol=1e-5, atol=1e-6)
    assert len(on_cpu) == 1
    compiled(tokens[:, :30], tokens[:, :30])
    assert "flex_attention" not in on_cpu[1]

    def broken(*_, **__):
        raise RuntimeError("no Triton here\nand more")

    monkeypatch.setattr(pytorch, "flex_attention", broken)
    flex_windows.forget()
    torch._dynamo.reset()
    compiled = compile_or_not(step, run, tokens, tokens)
    assert compiled is not step
    assert "flex_attention" not in on_cpu[-1]
    assert torch.equal(compiled(tokens, tokens), step(tokens, tokens))
    error = capsys.readouterr().err
    assert error.startswith("warning: flex_attention failed, windows in blocks (")
    assert error.count("\n") == 1


def test_an_eager_step_is_not_for_it():
    mask = Mask(window=2)
    prepare(mask, 8, CPU)
    q = torch.randn(1, 1, 8, 16)
    assert flex_attention(q, q, q, mask, 0.0) is None
    flex_windows.forget()


CASES = [
    ({}, None),
    ({"mask": Mask()}, "no window"),
    ({"n_token": 64}, "no window"),
    ({"mask": Mask(window=64, lengths=(3, 4))}, "no window"),
    ({"device": "cpu"}, "for CUDA"),
    ({"device": "mps"}, "for CUDA"),
    ({"compiled": False}, "--compile on"),
    ({"dropout": 0.1}, "no dropout"),
    ({"d_head": 8}, "16 or wider"),
]


@pytest.mark.parametrize(("change", "reason"), CASES)
def test_when_it_is_chosen(change, reason):
    usual = {"mask": Mask(window=64), "n_token": 1024, "device": "cuda", "d_head": 64}
    found = why_not(**{**usual, "dropout": 0.0, "compiled": True, **change})
    assert found is reason is None or reason in found


@pytest.mark.parametrize(
    ("device", "n_token", "window", "taken"),
    [
        ("cpu", 16, 4, "blocks"),
        ("cpu", 15, 4, "kernel"),
        ("cuda", 511, 64, "kernel"),
        ("cuda", 512, 64, "blocks"),
        ("mps", 512, 129, "kernel"),
        ("cuda", 1024, 0, "kernel"),
    ],
)
def test_when_blocks_pay(device, n_token, window, taken):
    assert way(Mask(window=window), n_token, n_token, device, torch.float32) == taken


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"compile": "off"}, "it needs a compiled step, --compile on"),
        ({"dropout": 0.1}, "it has no dropout"),
        ({"window": 0, "compile": "off"}, None),
        ({"window": 8, "compile": "off"}, None),
        ({"attention": "explicit", "compile": "off"}, None),
        ({"device": "cpu", "compile": "off"}, None),
    ],
)
def test_the_window_told(fields, reason):
    run = {"device": "cuda:1", "compile": "on", "d_model": 32, "window": 4, "context_length": 8}
    line = attention_note(make_config("d", "r", **(run | fields)))
    assert line == (reason and f"note     the window is not for flex_attention: {reason}")


# --- which masks reach flash attention ---

SQUARE, ONE, FEW = (8, 8), (1, 8), (3, 8)
FLASH = [(Mask(), SQUARE), (Mask(), ONE), (Mask(causal=False), SQUARE), (Mask(window=8), SQUARE)]
BOOLEAN = [
    (Mask(), FEW),
    (Mask(window=4), SQUARE),
    (Mask(window=4), ONE),
    (Mask(lengths=(8, 5)), SQUARE),
    (Mask(lengths=(8, 5)), ONE),
]


@pytest.mark.parametrize(
    ("mask", "shape", "flash"),
    [*((*case, True) for case in FLASH), *((*case, False) for case in BOOLEAN)],
)
def test_masks_that_reach_flash_attention(monkeypatch, mask, shape, flash):
    """On CUDA it takes no mask, and `is_causal` for as many queries as keys alone (PyTorch's
    sdp_utils.cpp: check_for_attn_mask, check_flash_causal_non_square_seqlens).
    """
    told = {}
    fake = types.SimpleNamespace(scaled_dot_product_attention=lambda q, k, v, **t: told.update(t))
    monkeypatch.setattr(twin, "F", fake)
    q, k = (torch.zeros(2, 1, n, 16) for n in shape)
    twin._kernel_attention(q, k, k, mask, 0.0)
    assert (told["attn_mask"] is None) == flash
    assert not told["is_causal"] or shape == SQUARE
