"""A model laid out for drawing is the same function, for any number of rows and threads."""

import copy

import pytest
import torch
from helpers import MODERN
from torch import Tensor
from torch.testing import assert_close

from model.attention import Mask, explicit_attention
from model.cache import KVCache
from model.config import ModelConfig
from model.fast_attention import attention_of_groups, fast_attention
from model.fast_sampling import (
    SlabLinear,
    attention_kernels,
    one_by_one,
    prepare_for_sampling,
)
from model.generate import generate
from model.gpt import GPT
from model.sampling import Sampling
from ops import device as device_module
from ops.device import DTYPES, autocast, prefers_slabs
from viz.record import record_attention

GROUPED = {"n_head": 4, "n_kv_head": 2}
SHAPES = pytest.mark.parametrize(
    "options",
    [{}, MODERN, {"window": 3}, {"bias": False}, {"n_kv_head": 1, "d_ff": 9}, GROUPED],
    ids=["gpt2", "modern", "window", "no bias", "one key head", "grouped"],
)
LEAD = pytest.mark.parametrize("lead", [(1,), (1, 1), (2, 1), (1, 5), (3, 4), (7,)])


@pytest.fixture(params=["AMD EPYC", "Intel Xeon"])
def maker(request, monkeypatch):
    """Whose processor this is made out to be: slabs are for those not of Intel's making."""
    monkeypatch.setattr(device_module, "device_name", lambda device: request.param)
    return request.param


def laid_out(model, precision="float32", threads=1):
    """A copy of `model`, laid out as on a machine with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        other = copy.deepcopy(model)
        prepare_for_sampling(other, DTYPES[precision], prefers_slabs("cpu", precision))
    finally:
        torch.set_num_threads(before)
    return other


@LEAD
@pytest.mark.parametrize("n_slab", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "shape", [(12, 6), (6, 12), (6, 6), (7, 6), (5, 12), (13, 10), (65, 30)], ids=str
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_slab_layer_is_a_linear_layer(lead, n_slab, shape, bias):
    """x W^T + b in float64, whether the slabs divide the matrix evenly or not."""
    n_out, n_in = shape
    weight, b = (
        torch.randn(shape, dtype=torch.float64),
        torch.randn(n_out, dtype=torch.float64) if bias else None,
    )
    x = torch.randn(*lead, n_in, dtype=torch.float64)
    expected = torch.einsum("...i,oi->...o", x, weight) + (b if bias else 0)
    assert_close(SlabLinear(weight, b, n_slab)(x), expected, rtol=0, atol=1e-12)
    assert_close(
        SlabLinear(weight, b, n_slab)(x.mT.contiguous().mT), expected, rtol=0, atol=1e-12
    )  # of any strides


def test_one_row_is_read_along_the_longer_side():
    """Memory is read in stretches as long as the matrix's longer side, and there is one copy of the
    weights.
    """
    up, down = (SlabLinear(torch.randn(shape), None, 2) for shape in ((32, 8), (8, 32)))
    assert up.by_input.stride() == (4 * 32, 32, 1)
    assert up.by_input.data_ptr() == up.by_output.data_ptr()
    assert down.by_input is None
    assert down.by_output.stride() == (4 * 32, 1, 32)


@torch.no_grad()
@SHAPES
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_logits(maker, tiny, options, threads):
    """float32 throughout: some hundred roundings of numbers up to 10."""
    model = tiny(d_model=12, **options).float()
    other, tokens = laid_out(model, threads=threads), torch.randint(11, (3, 6))
    assert_close(other(tokens), model(tokens), rtol=0, atol=2e-5)
    cache = KVCache(1, 8)
    for step in range(6):
        assert_close(
            other(tokens[:1, step : step + 1], cache=cache)[:, 0],
            model(tokens[:1])[:, step],
            rtol=0,
            atol=2e-5,
        )


@SHAPES
def test_the_same_text(maker, tiny, options):
    model = tiny(**options).float()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1]]
    for part in (prompts, prompts[:1]):
        drawn = [
            list(generate(m, part, 12, Sampling(temperature=0)))
            for m in (model, laid_out(model, threads=2))
        ]
        assert drawn[0] == drawn[1]


@torch.no_grad()
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("lengths", [None, (7, 2, 5)])
def test_groups_share_keys_without_copies(n_kv_head, window, lengths):
    """The equation in float64, its keys repeated; a cache's store is read in part."""
    q_BHTK = torch.randn(3, 4, 1, 5, dtype=torch.float64)
    k_BGSK, v_BGSK = torch.randn(2, 3, n_kv_head, 9, 5, dtype=torch.float64)[..., :7, :]
    mask = Mask(window=window, lengths=lengths)
    k_BHSK, v_BHSK = (x.repeat_interleave(4 // n_kv_head, 1) for x in (k_BGSK, v_BGSK))
    expected = explicit_attention(q_BHTK, k_BHSK, v_BHSK, mask)
    found = attention_of_groups(q_BHTK, k_BGSK, v_BGSK, mask)
    assert_close(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_cached_step_of_groups_copies_no_keys_but_where_it_is_watched(tiny, monkeypatch):
    """Nor with explicit attention, whose equation has a head of keys for each of queries."""
    copied = []
    repeat = Tensor.repeat_interleave
    monkeypatch.setattr(
        Tensor, "repeat_interleave", lambda x, *rest: copied.append(1) or repeat(x, *rest)
    )
    tokens = torch.randint(11, (2, 6))
    for attend, expected in ((fast_attention, 0), (explicit_attention, 4)):
        model = laid_out(
            GPT(ModelConfig(n_layer=2, d_model=16, context_length=8, **GROUPED), 11, attend)
        )
        cache = KVCache(2, 8)
        model(tokens[:, :5], cache=cache)
        copied.clear()
        model(tokens[:, 5:], cache=cache)
        assert len(copied) == expected
    copied.clear()
    with record_attention(model) as record:
        model(tokens[:, :1], cache=cache)
    assert len(copied) == 4
    assert record[0].k.shape[1] == 4


@torch.no_grad()
def test_bfloat16_is_of_weights_and_products_alone(tiny):
    """Linear layers are kept in bfloat16, one for queries, keys and values; embeddings, norms and
    biases stay as they were.
    """
    model = tiny(d_model=16, n_head=2).float()
    other, tokens = laid_out(model, "bfloat16"), torch.randint(11, (2, 6))
    for block in other.blocks:
        layers = (
            block.attention.projections.keywords["product"],
            block.attention.project,
            block.mlp.up,
            block.mlp.project,
            other.unembed.__wrapped__,
        )
        assert [layer.keywords["weight"].dtype for layer in layers] == [torch.bfloat16] * 5
        kept = (block.attention_norm, block.mlp_norm, other.norm)
        assert [norm.keywords[name].dtype for norm in kept for name in ("weight", "bias")] == [
            torch.float32
        ] * 6
    assert {name: parameter.dtype for name, parameter in other.named_parameters()} == {
        name: torch.float32
        for name, _ in model.named_parameters()
        if name.startswith(("embed", "positions"))
    }
    with autocast("cpu", "bfloat16"):
        assert_close(other(tokens).float(), model(tokens).float(), rtol=0.02, atol=0.05)


def test_a_single_token_goes_without_onednn(tiny):
    """In bfloat16, both through the blocks and to the logits; afterwards, also after an error, it
    is as it was.
    """
    tokens, vectors = torch.ones(1, 1, dtype=torch.long), torch.ones(1, 16)
    plain, rounded = (
        laid_out(tiny(d_model=16, n_head=2).float(), precision)
        for precision in ("float32", "bfloat16")
    )
    seen = []
    for model in (plain, rounded):
        model.norm = lambda x, norm=model.norm: (
            seen.append(torch.backends.mkldnn.enabled) or norm(x)
        )
        for batch in (tokens, tokens.expand(1, 2), tokens.expand(2, 1)):
            with autocast("cpu", "bfloat16"):
                model.features(batch)
    before = torch.backends.mkldnn.enabled
    assert seen == [before] * 3 + [False, before, before]
    tell = one_by_one(lambda _: torch.backends.mkldnn.enabled)
    assert [tell(x) for x in (vectors, vectors[None], vectors.expand(2, 16))] == [
        False,
        False,
        before,
    ]
    assert [hasattr(model.unembed, "__wrapped__") for model in (plain, rounded)] == [False, True]
    with pytest.raises(ZeroDivisionError):
        one_by_one(lambda _: 1 / 0)(tokens)
    assert torch.backends.mkldnn.enabled == before


def test_slabs_are_for_processors_where_the_library_uses_one_thread(tiny, device, maker):
    """Intel's own, and other devices, keep plain products."""
    model = tiny().float().to(device)
    slabs = prefers_slabs(device.type, "float32")
    prepare_for_sampling(model, torch.float32, slabs)
    assert isinstance(model.blocks[0].mlp.up, SlabLinear) is (
        device.type == "cpu" and maker == "AMD EPYC"
    )


def test_sampling_on_cuda_goes_without_cudnn():
    """cuDNN's attention plans anew for each number of keys; the other kernels stay, and so does
    what other devices have.
    """

    def kernels():
        cuda = torch.backends.cuda
        asked = cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled
        return [enabled() for enabled in asked]

    before = kernels()
    with attention_kernels(torch.device("cuda")):
        assert kernels() == [False, True, True]
    with attention_kernels(torch.device("cpu")):
        assert kernels() == before
    assert before[0]
