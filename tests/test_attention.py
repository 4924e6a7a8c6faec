"""The softmax, the mask, the twins and the cache: against hand calculation, plain Python loops,
float64 and torch.
"""

import math
import sys

import pytest
import torch
from torch.testing import assert_close

from model.attention import (
    CausalSelfAttention,
    Mask,
    attention_scores,
    attention_weights,
    explicit_attention,
    softmax,
)
from model.cache import KVCache
from model.fast_attention import fast_attention
from viz.record import record_attention

ULP32, ULP16 = 2.0**-24, 2.0**-8  # unit roundoff of float32 and of bfloat16
TWINS = pytest.mark.parametrize("attend", [explicit_attention, fast_attention])


def near(actual, expected, atol):
    assert_close(
        actual,
        torch.as_tensor(expected, dtype=actual.dtype, device=actual.device),
        rtol=0,
        atol=atol,
    )


def some(*shape, dtype=torch.float64, device="cpu", grad=True):
    return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_(grad)


# --- softmax ---


def test_softmax_by_hand(device):
    # exp gives 3.3201, 12.1825, 2.7183, 7.3891; their sum is 25.6100
    near(
        softmax(torch.tensor([1.2, 2.5, 1.0, 2.0], device=device)),
        [0.1296, 0.4757, 0.1061, 0.2885],
        atol=5e-5,
    )


def test_softmax_in_float32(device):
    """Rounding, to first order: of x - max, which the exponential turns from absolute to relative;
    of exp (2), the sum (n) and the quotient (1).
    """
    scores = 4 * torch.randn(50, 33)
    rows = [[math.exp(x) / sum(map(math.exp, row)) for x in row] for row in scores.tolist()]
    exact = torch.tensor(rows, dtype=torch.float64)
    spread = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
    bound = ULP32 * exact * (spread + scores.shape[-1] + 3)
    weights = softmax(scores.to(device))
    assert weights.dtype == torch.float32
    assert ((weights.cpu().double() - exact).abs() <= bound).all()
    assert ((weights - torch.softmax(scores.to(device), -1)).cpu().abs() <= 2 * bound).all()


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
    ],
)
def test_softmax_is_float32_or_better(given, computed):
    assert softmax(torch.zeros(3, dtype=getattr(torch, given))).dtype == getattr(torch, computed)


def test_softmax_gradient():
    scores = some(3, 5)
    row = some(6, grad=False).masked_fill(torch.arange(6) == 2, -math.inf).requires_grad_()
    assert torch.autograd.gradcheck(softmax, (scores,))
    assert torch.autograd.gradcheck(softmax, (row,))


def test_softmax_of_a_row_fully_masked(device):
    scores = torch.tensor(
        [[-math.inf] * 3, [0.0, -math.inf, 0.0]], device=device, requires_grad=True
    )
    weights = softmax(scores)
    near(weights.detach(), [[0, 0, 0], [0.5, 0, 0.5]], atol=0)
    (gradient,) = torch.autograd.grad(
        (weights * torch.tensor([1.0, 2.0, 3.0], device=device)).sum(), scores
    )
    near(gradient, [[0, 0, 0], [-0.5, 0, 0.5]], atol=0)


def test_softmax_of_large_scores(device):
    scores = torch.tensor(
        [[1e4, -1e4, 1e4], [-1e4, -1e4, -1e4], [1e4, 1e4 - 1, -1e4]],
        device=device,
        requires_grad=True,
    )
    weights = softmax(scores)
    e = 1 / (1 + math.exp(-1))
    near(weights.detach(), [[0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3], [e, 1 - e, 0]], atol=4 * ULP32)
    assert torch.autograd.grad(weights[:, 0].sum(), scores)[0].isfinite().all()


def test_softmax_of_one_score():
    near(softmax(torch.tensor([[-7.5], [1e4]])), [[1.0], [1.0]], atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_sum_to_one_under_autocast(dtype, device):
    """A softmax in bfloat16 would be off by about 5e-3."""
    query, key = (
        some(2, 3, 40, 8, dtype=dtype, device=device),
        some(2, 3, 40, 8, dtype=dtype, device=device),
    )
    with torch.autocast(device.type, torch.bfloat16):
        weights = attention_weights(query, key, Mask())
        assert torch.equal(softmax(query), softmax(query.float()))
    assert weights.dtype == torch.float32
    near(weights.detach().double().sum(-1), torch.ones(2, 3, 40), atol=1e-6)


def test_scores_are_float32_under_autocast(device):
    """Off from float64 by the rounding of float32: K products and their sum."""
    query, key = (
        some(1, 1, 20, 16, dtype=torch.bfloat16, device=device),
        some(1, 1, 20, 16, dtype=torch.bfloat16, device=device),
    )
    with torch.autocast(device.type, torch.bfloat16):
        scores = attention_scores(query, key, Mask(causal=False))
    q, k = query.double(), key.double()
    bound = (16 + 2) * ULP32 * (q.abs() @ k.abs().mT) / 4
    assert scores.dtype == torch.float32
    assert ((scores - q @ k.mT / 4).abs() <= bound).all()


# --- the mask ---


def test_causal_pattern(device):
    allowed = Mask().allowed(4, 4, device=device)
    assert allowed.device.type == device.type
    assert allowed.dtype == torch.bool
    assert allowed.int().tolist() == [[[
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]]]  # fmt: skip


def test_causal_with_padding(device):
    assert Mask(lengths=torch.tensor([2, 4, 0])).allowed(4, 4, device=device).int().tolist() == [
        [[[1, 0, 0, 0],
          [1, 1, 0, 0],
          [1, 1, 0, 0],
          [1, 1, 0, 0]]],
        [[[1, 0, 0, 0],
          [1, 1, 0, 0],
          [1, 1, 1, 0],
          [1, 1, 1, 1]]],
        [[[0, 0, 0, 0]] * 4],
    ]  # fmt: skip


def test_causal_window():
    assert Mask(window=2).allowed(4, 4).int().tolist() == [[[
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]]]  # fmt: skip
    assert torch.equal(Mask(window=1).allowed(4, 4)[0, 0], torch.eye(4, dtype=torch.bool))
    assert torch.equal(Mask(window=4).allowed(4, 4), Mask().allowed(4, 4))


def test_window_with_padding():
    assert Mask(window=2, lengths=torch.tensor([2])).allowed(4, 4).int().tolist() == [[[
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
    ]]]  # fmt: skip


def test_bidirectional():
    assert Mask(causal=False).allowed(2, 3).all()
    assert Mask(causal=False, lengths=torch.tensor([1, 3])).allowed(2, 3).int().tolist() == [
        [[[1, 0, 0]] * 2],
        [[[1, 1, 1]] * 2],
    ]
    assert Mask(causal=False, window=2).allowed(4, 4).int().tolist() == [[[
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 1],
        [0, 0, 1, 1],
    ]]]  # fmt: skip


def test_fewer_queries_than_keys():
    assert Mask().allowed(2, 4).int().tolist() == [[[
        [1, 1, 1, 0],
        [1, 1, 1, 1],
    ]]]  # fmt: skip
    assert Mask(window=2).allowed(2, 4).int().tolist() == [[[
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]]]  # fmt: skip


def test_fewer_queries_than_keys_in_ragged_rows():
    """Row 0 ends one key early, so its two queries stand one place further left; row 1 has a single
    key, so its second query is padding.
    """
    assert Mask(lengths=torch.tensor([3, 1, 4])).allowed(2, 4).int().tolist() == [
        [[[1, 1, 0, 0],
          [1, 1, 1, 0]]],
        [[[1, 0, 0, 0],
          [1, 0, 0, 0]]],
        [[[1, 1, 1, 0],
          [1, 1, 1, 1]]],
    ]  # fmt: skip


def test_one_query_sees_its_whole_row():
    assert Mask().allowed(1, 4).all()
    assert Mask(lengths=torch.tensor([2, 4])).allowed(1, 4).int().tolist() == [
        [[[1, 1, 0, 0]]],
        [[[1, 1, 1, 1]]],
    ]


# --- the equation ---


def looks(mask, row, n_query, n_key, t, s):
    """The meaning of a mask in plain Python."""
    length = n_key if mask.lengths is None else mask.lengths[row]
    position = max(length - n_query, 0) + t
    return (
        s < length
        and not (mask.causal and s > position)
        and not (mask.window and abs(position - s) >= mask.window)
    )


def by_hand(query, key, value, mask):
    """softmax(Q K^T / sqrt(d)) V with loops over rows, heads and queries; no masking at all: keys
    not looked at are not there.
    """
    n_row, n_head, n_query, d_head = query.shape
    out = torch.zeros_like(query)
    for row in range(n_row):
        for t in range(n_query):
            seen = [s for s in range(key.shape[2]) if looks(mask, row, n_query, key.shape[2], t, s)]
            for head in range(n_head if seen else 0):
                scores = [query[row, head, t].dot(key[row, head, s]) / d_head**0.5 for s in seen]
                exponentials = [score.exp() for score in scores]
                taken = [e * value[row, head, s] for e, s in zip(exponentials, seen, strict=True)]
                out[row, head, t] = sum(taken) / sum(exponentials)
    return out


@TWINS
def test_identity_example(attend, device):
    identity = torch.eye(2, device=device)[None, None]
    everything = Mask(causal=False)
    near(
        attention_weights(identity, identity, everything)[0, 0],
        [[0.670, 0.330], [0.330, 0.670]],
        atol=5e-4,
    )
    near(
        attend(identity, identity, identity, everything, 0.0)[0, 0],
        [[0.670, 0.330], [0.330, 0.670]],
        atol=5e-4,
    )


@TWINS
def test_three_keys_example(attend, device):
    """The products are (0, 2, 0), so the weights are (1, e, 1) / (2 + e) with e = exp(2 / sqrt(2))
    = 4.1133. Cut to three digits, as a textbook would, they are (0.163, 0.673, 0.163) and lead to
    (2.182, 0.489).
    """
    query = torch.tensor([[[[0.0, 1.0]]]], device=device)
    key = torch.tensor([[[[1.0, 0.0], [1.0, 2.0], [-3.0, 0.0]]]], device=device)
    value = torch.tensor([[[[1.0, 0.0], [3.0, 0.0], [0.0, 3.0]]]], device=device)
    near(attention_weights(query, key, Mask())[0, 0, 0], [0.1636, 0.6728, 0.1636], atol=5e-5)
    near(attend(query, key, value, Mask(), 0.0)[0, 0, 0], [2.1821, 0.4907], atol=5e-5)


@TWINS
@pytest.mark.parametrize("lengths", [None, [7, 4, 0]], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [0, 1, 3, 50])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_twins_against_loops(monkeypatch, attend, causal, window, lengths, device):
    """Values and gradients in float64. With products |q||k| of up to 10 and values up to 3, scores
    are off by 3e-15 and outputs by 3e-14 at worst; gradients pass through the scores once more.
    """
    monkeypatch.setattr("model.fast_attention.GPU_BLOCKS", 0)
    mask = Mask(causal, window, None if lengths is None else torch.tensor(lengths))
    for n_query, n_key in (
        [(7, 7), (1, 7), (3, 7)] if lengths else [(13, 13), (12, 12), (1, 7), (3, 7)]
    ):
        inputs = some(3, 2, n_query, 4), some(3, 2, n_key, 4), some(3, 2, n_key, 4)
        upstream = some(3, 2, n_query, 4, grad=False)
        expected = by_hand(*inputs, mask)
        expected_gradients = torch.autograd.grad((expected * upstream).sum(), inputs)
        moved = [x.detach().to(device).requires_grad_() for x in inputs]
        actual = attend(*moved, mask, 0.0)
        near(actual, expected, atol=3e-14)
        for one, other in zip(
            torch.autograd.grad((actual * upstream.to(device)).sum(), moved),
            expected_gradients,
            strict=True,
        ):
            near(one, other, atol=2e-13)


@pytest.mark.parametrize("lengths", [None, [64, 40]], ids=["whole", "padded"])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_twins_in_bfloat16(causal, window, lengths, device):
    """The bounds count the roundings to bfloat16 in each twin, to first order in the unit roundoff
    u = 2^-8.

    Output: the weights and the result, so 2 u sum_s w |v| each. Gradient of the values: alike.
    Gradient of a score, w (dw - sum w dw) with dw = g.v: the fused one rounds its output, used for
    the second term, and the whole; the explicit one rounds dw. Then either rounds the result.
    """
    mask = Mask(causal, window, None if lengths is None else torch.tensor(lengths))
    inputs = [some(2, 2, 64, 16, dtype=torch.bfloat16, device=device) for _ in range(3)]
    upstream = some(2, 2, 64, 16, dtype=torch.bfloat16, device=device, grad=False)
    results = []
    with torch.autocast(device.type, torch.bfloat16):
        for attend in (explicit_attention, fast_attention):
            out = attend(*inputs, mask, 0.0)
            assert out.dtype == torch.bfloat16
            results.append([x.double() for x in (out, *torch.autograd.grad(out, inputs, upstream))])
    query, key, value, g = (x.detach().double().abs() for x in (*inputs, upstream))
    weights = attention_weights(*(x.detach().double() for x in inputs[:2]), mask)
    terms = weights * (g @ value.mT + (g * (weights @ value)).sum(-1, keepdim=True)) / 4
    bounds = [
        4 * (weights @ value),
        5 * (terms @ key),
        5 * (terms.mT @ query),
        4 * (weights.mT @ g),
    ]
    for explicit, fused, bound in zip(*results, bounds, strict=True):
        assert explicit.abs().max() > 0
        assert ((explicit - fused).abs() <= 1.05 * ULP16 * bound + 1e-6).all()


@pytest.mark.parametrize("n_query", [2, 40, 128])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_short_attention_in_bfloat16(causal, window, n_query):
    """Against float64. To first order in u = 2^-8: a score s is rounded by u |s|, which moves the
    weights as the softmax's derivative says, by w (u |s| + sum w u |s|) at most; the weights are
    rounded, and the result, by u each.
    """
    mask = Mask(causal, window)
    query, key, value = (
        some(2, 3, n, 16, dtype=torch.bfloat16, grad=False) for n in (n_query, 128, 128)
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = fast_attention(query, key, value, mask, 0.0)
    assert out.dtype == torch.bfloat16
    wide = [x.double() for x in (query, key, value)]
    weights = attention_weights(*wide[:2], mask)
    scores = attention_scores(*wide[:2], mask).abs().nan_to_num(posinf=0.0)
    moved = weights * (scores + (weights * scores).sum(-1, keepdim=True)) + 2 * weights
    error = (out.double() - weights @ wide[2]).abs()
    assert (error <= 1.05 * ULP16 / 2 * moved @ wide[2].abs()).all()
    assert error.any()


@TWINS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_may_share_keys_and_values(attend, dtype, device):
    query, *rest = (
        some(2, n_head, 6, 8, dtype=dtype, device=device, grad=False) for n_head in (3, 1, 1)
    )
    shared = attend(query, *rest, Mask(), 0.0)
    assert_close(
        shared,
        attend(query, *(x.repeat(1, 3, 1, 1) for x in rest), Mask(), 0.0),
        rtol=4 * ULP16,
        atol=4 * ULP16,
    )


@TWINS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_fully_masked(attend, dtype, device):
    """A row of no keys, and padded queries whose window ends before they begin: zeros, with
    gradients finite everywhere and zero there.
    """
    mask = Mask(window=2, lengths=torch.tensor([6, 2, 0]))
    inputs = [some(3, 2, 6, 8, dtype=dtype, device=device) for _ in range(3)]
    out = attend(*inputs, mask, 0.0)
    gradients = torch.autograd.grad(out.float().sum() + out.float().square().sum(), inputs)
    assert out.isfinite().all()
    assert not out[2].any()
    assert not out[1, :, 3:].any()
    assert out[1, :, :3].all()
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert not gradient[2].any()
        assert not gradient[1, :, 3:].any()
        assert gradient[0].any()


@TWINS
def test_one_token(attend, device):
    """It looks at itself alone: the output is the value, and what query and key are does not
    matter.
    """
    inputs = [some(2, 3, 1, 4, device=device) for _ in range(3)]
    out = attend(*inputs, Mask(), 0.0)
    assert torch.equal(out, inputs[2])
    for gradient in torch.autograd.grad((out * some(2, 3, 1, 4, device=device)).sum(), inputs)[:2]:
        near(gradient, torch.zeros(2, 3, 1, 4), atol=1e-15)


@TWINS
def test_large_scores(attend, device):
    """Scores of +1e4 and -1e4: each query takes the value of the key that is like it."""
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)[None, None, :, None]
    query = key = 100 * sign
    value = some(1, 1, 4, 1, dtype=torch.float32, device=device)
    assert attention_scores(query, key, Mask(causal=False)).abs().eq(1e4).all()
    out = attend(query, key, value, Mask(causal=False), 0.0)
    v = value.detach().flatten().tolist()
    even, odd = (v[0] + v[2]) / 2, (v[1] + v[3]) / 2
    near(out.detach().flatten(), [even, odd, even, odd], atol=8 * ULP32)
    assert torch.autograd.grad(out.sum(), value)[0].isfinite().all()


@TWINS
@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask(window=3), Mask(causal=False), Mask(causal=False, lengths=torch.tensor([5, 8]))],
)
def test_outputs_lie_in_the_hull_of_the_values(attend, mask):
    """A point lies in a convex hull if in no direction it lies beyond all of its corners."""
    query, key, value = (3 * some(2, 2, 8, 3, grad=False) for _ in range(3))
    out = attend(query, key, value, mask, 0.0)
    directions = some(3, 500, grad=False)
    along, corners = (
        out @ directions,
        (value @ directions)[:, :, None],
    )  # (B, H, T, directions) and (B, H, 1, S, directions)
    allowed = mask.allowed(8, 8)[..., None]
    assert (along <= corners.masked_fill(~allowed, -math.inf).amax(3) + 1e-12).all()
    assert (along >= corners.masked_fill(~allowed, math.inf).amin(3) - 1e-12).all()
    weights = attention_weights(query, key, mask)
    assert (weights >= 0).all()
    near(weights.sum(-1), torch.ones(2, 2, 8), atol=1e-14)
    assert torch.equal(weights > 0, mask.allowed(8, 8).expand(2, 2, 8, 8))


@pytest.mark.parametrize("d_head", [4, 64, 256])
def test_variance_of_the_products(d_head):
    """Var(q.k) = d_head, and 1 once scaled. For normal entries q.k has kurtosis 3 + 6 / d_head, so
    that the variance measured on n pairs has a relative standard deviation of sqrt((2 + 6 / d_head)
    / n); five of them are allowed.
    """
    n = 40_000
    query, key = torch.randn(n, 1, 1, d_head), torch.randn(n, 1, 1, d_head)
    slack = 5 * math.sqrt((2 + 6 / d_head) / n)
    assert abs((query * key).sum(-1).square().mean().item() / d_head - 1) < slack
    assert abs(attention_scores(query, key, Mask()).square().mean().item() - 1) < slack


def test_unscaled_scores_saturate_the_softmax():
    """At d_head = 256 the products have standard deviation 16. Among n = 64 of them one takes
    nearly all: the expected sum of squared weights is 1 - sqrt(2 ln n) / 16 = 0.82 (Derrida 1981,
    the random energy model in its frozen phase); scaled it is e / n = 0.04, and the entropy ln n -
    1/2. The gradient of a weight to its own score is w (1 - w): its sum falls from 0.96 to 0.18.
    """
    n, d_head = 64, 256
    query, key = torch.randn(2000, 1, 1, d_head), torch.randn(2000, 1, n, d_head)
    scaled = attention_weights(query, key, Mask())
    unscaled = attention_weights(query * math.sqrt(d_head), key, Mask())

    def entropy(weights):
        return -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean().item()

    assert abs(entropy(scaled) - (math.log(n) - 0.5)) < 0.05
    assert entropy(unscaled) < 0.6
    assert abs(scaled.square().sum(-1).mean().item() - math.e / n) < 0.01
    assert 0.75 < unscaled.square().sum(-1).mean().item() < 0.9
    assert (unscaled * (1 - unscaled)).sum(-1).mean().item() < 0.3 * (scaled * (1 - scaled)).sum(
        -1
    ).mean().item()


@TWINS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_on_the_weights(attend, dtype, device):
    """With equal scores and values of one, an output is the share of weights kept over 1 - p: mean
    1, variance p / ((1 - p) S).
    """
    n_row, size, p = 400, 50, 0.3
    zeros, ones = (
        torch.full((n_row, 1, size, 4), x, dtype=dtype, device=device) for x in (0.0, 1.0)
    )
    out = attend(zeros, zeros, ones, Mask(causal=False), p)[..., 0].float()
    variance, n = p / ((1 - p) * size), n_row * size
    assert abs(out.mean().item() - 1) < 5 * math.sqrt(variance / n)
    assert abs(out.var().item() / variance - 1) < 5 * math.sqrt(2 / n)
    windowed = attend(zeros, zeros, ones, Mask(window=10), p)[:, 0, 10:, 0].float()
    assert abs(windowed.var().item() / (p / ((1 - p) * 10)) - 1) < 5 * math.sqrt(
        3 / windowed.numel()
    )


# --- what the fused twin hands to the kernel ---


@pytest.fixture
def kernel(monkeypatch):
    """A list of (query's shape, key's shape, mask's shape or None, is_causal) for every call of
    PyTorch's kernel.
    """
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        calls.append(
            (
                tuple(query.shape),
                tuple(key.shape),
                None if attn_mask is None else tuple(attn_mask.shape),
                is_causal,
            )
        )
        return original(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal
        )

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize(
    ("mask", "n_query", "shape", "is_causal"),
    [
        (Mask(), 6, None, True),
        (Mask(), 1, None, False),
        (Mask(), 2, (1, 1, 2, 6), False),
        (Mask(window=6), 6, None, True),
        (Mask(window=9), 1, None, False),
        (Mask(causal=False), 6, None, False),
        (Mask(causal=False), 2, None, False),
        (Mask(lengths=torch.tensor([6, 2])), 6, (2, 1, 6, 6), False),
        (Mask(window=2), 1, (1, 1, 1, 6), False),
    ],
    ids=str,
)
def test_fused_reads_the_description(mask, n_query, shape, is_causal, kernel):
    fast_attention(some(2, 3, n_query, 4), some(2, 3, 6, 4), some(2, 3, 6, 4), mask, 0.0)
    assert kernel == [((2, 3, n_query, 4), (2, 3, 6, 4), shape, is_causal)]


@pytest.mark.parametrize(
    ("dtype", "n_query", "n_key", "mask", "n_call"),
    [
        (torch.bfloat16, 512, 512, Mask(), 0),
        (torch.bfloat16, 2, 512, Mask(window=9), 0),
        (torch.bfloat16, 513, 513, Mask(), 1),
        (torch.bfloat16, 1, 512, Mask(), 1),
        (torch.bfloat16, 9, 9, Mask(lengths=torch.tensor([9, 4])), 1),
        (torch.float32, 512, 512, Mask(), 1),
    ],
    ids=str,
)
def test_short_contexts_in_bfloat16_pass_the_kernel_by(dtype, n_query, n_key, mask, n_call, kernel):
    """On a CPU: up to 512 keys, where a row has no padding (it may have to look at nothing) and
    more than one query.
    """
    fast_attention(
        *(some(2, 1, n, 4, dtype=dtype, grad=False) for n in (n_query, n_key, n_key)), mask, 0.0
    )
    assert len(kernel) == n_call


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_costs_linear_time_and_memory(causal, kernel):
    """A query meets the keys of its own block and of one neighbour on each side it may look to: at
    most 2 or 3 windows, whatever the length. The mask is as large at most, and has the 2 or 4
    dimensions without which PyTorch falls back to its slow path.
    """
    window = 8
    for n_token in (64, 128, 1024):
        kernel.clear()
        fast_attention(*(some(1, 1, n_token, 2) for _ in range(3)), Mask(causal, window), 0.0)
        scores = [math.prod(query[:-1]) * key[-2] for query, key, _, _ in kernel]
        assert sum(scores) <= n_token * window * (2 if causal else 3)
        assert all(math.prod(shape) <= n_token * window * 3 for _, _, shape, _ in kernel)
        assert all(len(shape) in (2, 4) for _, _, shape, _ in kernel)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_never_costs_more_than_none(causal, kernel):
    for window in range(1, 70):
        kernel.clear()
        fast_attention(
            *(some(1, 1, 60, 2, grad=False) for _ in range(3)), Mask(causal, window), 0.0
        )
        assert sum(math.prod(query[:-1]) * key[-2] for query, key, _, _ in kernel) <= 60 * 60


def test_explicit_calls_no_kernel(kernel):
    explicit_attention(some(2, 3, 6, 4), some(2, 3, 6, 4), some(2, 3, 6, 4), Mask(), 0.0)
    assert kernel == []


# --- the cache ---


def test_cache_returns_what_was_written():
    cache = KVCache(2, 6)
    first, second = some(2, 3, 4, 5, grad=False), some(2, 3, 1, 5, grad=False)
    keys, values = cache.write(0, first, -first)
    assert torch.equal(keys, first)
    assert torch.equal(values, -first)
    cache.lengths = [4, 4]
    keys, values = cache.write(0, second, -second)
    assert torch.equal(keys, torch.cat((first, second), 2))
    assert torch.equal(values, -keys)


def test_cache_writes_behind_each_row():
    cache = KVCache(2, 6)
    first, second = some(2, 3, 4, 5, grad=False), some(2, 3, 2, 5, grad=False)
    cache.write(0, first, -first)
    cache.lengths = [1, 4]
    cache.place(torch.zeros(2, 2, dtype=torch.long), Mask())
    keys, values = cache.write(0, second, -second)
    assert keys.shape == (2, 3, 6, 5)
    assert torch.equal(keys[0, :, :3], torch.cat((first[0, :, :1], second[0]), 1))
    assert torch.equal(keys[1], torch.cat((first[1], second[1]), 1))
    assert torch.equal(values, -keys)
    assert keys.isfinite().all()


def test_cache_keeps_layers_apart():
    cache = KVCache(1, 2)
    first, second = some(1, 1, 2, 3, grad=False), some(1, 1, 2, 3, grad=False)
    one, two = cache.write(0, first, first), cache.write(1, second, second)
    assert torch.equal(one[0], first)
    assert torch.equal(two[0], second)


def test_cache_replaces_rows():
    cache, part = KVCache(3, 4), KVCache(2, 4)
    whole, new = some(3, 1, 4, 2, grad=False), some(2, 1, 3, 2, grad=False)
    cache.write(0, whole, -whole)
    part.write(0, new, -new)
    cache.lengths, part.lengths = [4, 4, 4], [3, 2]
    cache.replace([2, 0], part)
    assert cache.lengths == [2, 4, 3]
    keys, values = cache.layers[0]
    assert torch.equal(keys[2, :, :3], new[0])
    assert torch.equal(keys[0, :, :2], new[1, :, :2])
    assert torch.equal(keys[1], whole[1])
    assert torch.equal(values[2, :, :3], -new[0])


@pytest.mark.parametrize("lengths", [[4, 4], [2, 4]], ids=["even", "ragged"])
def test_cache_refuses_what_does_not_fit(lengths):
    """A key that were silently dropped would be silently not looked at."""
    cache = KVCache(2, 4)
    cache.write(0, some(2, 1, 4, 2, grad=False), some(2, 1, 4, 2, grad=False))
    cache.lengths = lengths
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        cache.write(0, some(2, 1, 1, 2, grad=False), some(2, 1, 1, 2, grad=False))


# --- recording ---


def watch(kept):
    """An attention that notes its weights by torch's own softmax, and drops none."""

    def attend(query, key, value, mask, dropout):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(
            ~mask.allowed(query.shape[2], key.shape[2]), -math.inf
        ).softmax(-1)
        kept.append(weights)
        return weights @ value

    return attend


@pytest.mark.parametrize(
    "options", [{}, {"positions": "rotary", "qk_norm": True, "window": 3}], ids=["gpt2", "modern"]
)
def test_record_is_what_was_attended(tiny, options):
    kept = []
    model, tokens = tiny(watch(kept), n_layer=3, **options), torch.randint(11, (2, 6))
    with record_attention(model) as record:
        model(tokens)
    assert len(record) == len(kept) == 3
    for layer, weights in zip(record, kept, strict=True):
        near(layer.weights(), weights, atol=1e-14)
        assert torch.equal(
            layer.scores() == -math.inf, ~model.mask().allowed(6, 6).expand(2, 2, 6, 6)
        )
        near(softmax(layer.scores()), weights, atol=1e-14)
        assert layer.v.shape == (2, 2, 6, 4)
        assert not layer.q.requires_grad


@TWINS
def test_record_changes_nothing(tiny, attend, device):
    model, tokens = tiny(attend, device=device), torch.randint(11, (2, 6), device=device)
    logits = model(tokens)
    with record_attention(model) as record:
        assert torch.equal(model(tokens), logits)
    assert len(record) == 2
    assert torch.equal(model(tokens), logits)
    assert len(record) == 2
    assert [block.attention.attend for block in model.blocks] == [attend, attend]


def test_record_of_the_twins_agree(tiny):
    fused, tokens = tiny(fast_attention), torch.randint(11, (2, 6))
    explicit = tiny(explicit_attention)
    explicit.load_state_dict(fused.state_dict())
    with record_attention(fused) as one, record_attention(explicit) as other:
        fused(tokens), explicit(tokens)
    for here, there in zip(one, other, strict=True):
        near(here.weights(), there.weights(), atol=1e-13)


def test_record_ends_with_an_exception(tiny):
    model = tiny()
    with pytest.raises(IndexError), record_attention(model):
        model(torch.tensor([[99]]))
    assert all(block.attention.attend is fast_attention for block in model.blocks)


def test_record_within_a_record(tiny):
    model, tokens = tiny(), torch.randint(11, (1, 4))
    with record_attention(model) as outer:
        with record_attention(model) as inner:
            model(tokens)
        model(tokens)
    assert (len(outer), len(inner)) == (4, 2)
    assert all(block.attention.attend is fast_attention for block in model.blocks)


@TWINS
def test_record_is_before_dropout(tiny, attend):
    """And what runs still drops, the same as without."""
    model, tokens = tiny(attend, dropout=0.5).train(), torch.randint(11, (2, 6))
    torch.manual_seed(1)
    logits = model(tokens)
    torch.manual_seed(1)
    with record_attention(model) as record:
        assert torch.equal(model(tokens), logits)
    for layer in record:
        near(layer.weights().sum(-1), torch.ones(2, 2, 6), atol=1e-14)


def test_record_with_a_cache(tiny):
    """What was recorded stays what it was when later tokens, or rows begun anew, are written to the
    cache.
    """
    model, tokens = tiny(), torch.randint(11, (2, 6))
    cache = KVCache(2, 8)
    with record_attention(model) as record:
        model(tokens[:, :4], model.mask(torch.tensor([2, 4])), cache)
        before = [layer.k.clone() for layer in record]
        model(tokens[:, 4:5], model.mask(torch.tensor([3, 5])), cache)
        assert [layer.weights().shape for layer in record[2:]] == [(2, 2, 1, 5)] * 2
        cache.lengths = [0, 0]
        model(tokens[:, :1], cache=cache)
    assert all(torch.equal(layer.k, k) for layer, k in zip(record, before, strict=False))


def test_training_keeps_no_weights(tiny):
    """Nothing of a forward pass stays in the module."""
    model = tiny(explicit_attention)
    attention = next(
        module for module in model.modules() if isinstance(module, CausalSelfAttention)
    )
    before = (
        sys.getsizeof(attention.__dict__),
        set(attention.__dict__),
        list(attention.named_buffers()),
    )
    model(torch.randint(11, (1, 8)))
    assert (
        sys.getsizeof(attention.__dict__),
        set(attention.__dict__),
        list(attention.named_buffers()),
    ) == before
