"""Positions: against the published formulas in plain Python, against transformers, and against what
they are for.
"""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch.testing import assert_close

from model.attention import Mask, attention_scores
from model.config import ModelConfig
from model.positions import KINDS, rotate, sinusoid
from viz.record import record_attention

ULP = 2.0**-24  # unit roundoff of float32


def angle_error(position, frequency):
    """Bound on the error of position * exp(-log(10000) e) in float32: three roundings of the
    exponent, which exp turns from absolute to relative, and three more, of exp and the product.
    """
    return position * frequency * (3 * -math.log(frequency) + 3) * ULP


def kind(name, **options):
    return KINDS[name](
        ModelConfig(**({"n_layer": 1, "n_head": 2, "d_model": 8, "context_length": 16} | options))
    )


def turned(x, positions, **options):
    """x (..., T, K) turned by rotary positions (T,)."""
    return rotate(
        x,
        *kind("rotary", n_head=1, d_model=x.shape[-1], **options).rotation(
            torch.as_tensor(positions)[None]
        ),
    )


def test_kinds():
    assert set(KINDS) == {"learned", "sinusoidal", "rotary", "none"}
    assert set(KINDS) == set(get_args(get_type_hints(ModelConfig)["positions"]))


# --- sinusoidal ---


@pytest.mark.parametrize("d_model", [2, 6, 64])
def test_sinusoid_entry_by_entry(d_model, device):
    """Vaswani et al. 2017, section 3.5; two more roundings for the sine itself."""
    positions = [0, 1, 2, 3, 50, 1000]
    table = sinusoid(torch.tensor(positions, device=device), d_model).cpu()
    assert table.shape == (6, d_model)
    for row, position in enumerate(positions):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            slack = angle_error(position, 10000 ** (-2 * i / d_model)) + 2 * ULP
            assert abs(table[row, 2 * i].item() - math.sin(angle)) <= slack
            assert abs(table[row, 2 * i + 1].item() - math.cos(angle)) <= slack


def test_sinusoid_by_hand():
    assert_close(
        sinusoid(torch.tensor([0, 1]), 4),
        torch.tensor([[0, 1, 0, 1], [0.841471, 0.540302, 0.0099998, 0.99995]]),
        rtol=0,
        atol=1e-6,
    )


def test_sinusoidal_has_the_size_of_the_embeddings():
    """Sines and cosines have a root mean square of 1 / sqrt(2), embeddings one of 0.02 at the
    start.
    """
    embedded, positions = (
        torch.randn(3, 4, 8),
        torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8], [2, 3, 4, 5]]),
    )
    positioned = kind("sinusoidal")
    for given in (positions, positions[:1]):
        expected = embedded + 0.02 * math.sqrt(2) * sinusoid(given, 8)
        assert_close(positioned.add(embedded, given), expected, rtol=0, atol=8 * ULP)
    assert positioned.rotation(positions) is None
    assert (
        abs(
            positioned.add(torch.zeros(1, 16, 8), torch.arange(16)[None]).square().mean().sqrt()
            - 0.02
        )
        < 20 * ULP
    )
    assert positioned.add(embedded.bfloat16(), positions).dtype == torch.bfloat16


# --- learned, none ---


def test_learned_adds_its_rows():
    embedded, positions = torch.randn(2, 3, 8), torch.tensor([[0, 1, 2], [13, 14, 15]])
    positioned = kind("learned")
    assert positioned.table.weight.shape == (16, 8)
    expected = torch.stack(
        [embedded[row] + positioned.table.weight[positions[row]] for row in range(2)]
    )
    assert torch.equal(positioned.add(embedded, positions), expected)
    assert torch.equal(
        positioned.add(embedded, positions[:1])[1], embedded[1] + positioned.table.weight[:3]
    )
    assert positioned.rotation(positions) is None


def test_none_adds_nothing():
    embedded = torch.randn(2, 3, 8)
    for name in ("none", "rotary"):
        assert torch.equal(kind(name).add(embedded, torch.tensor([[4, 5, 6]])), embedded)
    assert kind("none").rotation(torch.tensor([[4, 5, 6]])) is None


@pytest.mark.parametrize("name", ["none", "sinusoidal", "rotary"])
def test_only_learned_positions_have_parameters(name):
    assert not kind(name).state_dict()
    assert not list(kind(name).buffers())


# --- rotary ---


def test_rotation_by_hand():
    """At d_head = 4 the pairs are (x0, x2), turning by 1 radian a position, and (x1, x3), by 1/100
    = 10000^(-2/4).
    """
    x = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1], [1, 2, 3, 4]])
    one, hundredth = (math.cos(1), math.sin(1)), (math.cos(0.01), math.sin(0.01))
    expected = torch.tensor(
        [
            [one[0], hundredth[0], one[1], hundredth[1]],
            [-one[1], -hundredth[1], one[0], hundredth[0]],
            [
                one[0] - 3 * one[1],
                2 * hundredth[0] - 4 * hundredth[1],
                3 * one[0] + one[1],
                4 * hundredth[0] + 2 * hundredth[1],
            ],
        ]
    )
    assert_close(turned(x, [1, 1, 1])[0, 0], expected, rtol=0, atol=16 * ULP)


def test_rotation_at_the_origin_is_none():
    x = torch.randn(3, 8)
    assert torch.equal(turned(x, [0, 0, 0])[0, 0], x)


def test_queries_and_keys_turn_alike(tiny):
    """In a layer whose queries and keys are one projection, they stay one when they are turned."""
    model = tiny(positions="rotary")
    layer = model.blocks[0].attention
    layer.key.load_state_dict(layer.query.state_dict())
    with record_attention(model) as record:
        model(torch.tensor([[3, 3, 3]]))
    assert torch.equal(record[0].q, record[0].k)
    assert (record[0].q[0, :, 0] - record[0].q[0, :, 1]).abs().max() > 0.1


def test_rotation_keeps_lengths():
    x = torch.randn(100, 8)
    lengths = turned(x, range(100)).norm(dim=-1)[0, 0]
    assert_close(lengths, x.norm(dim=-1), rtol=8 * ULP, atol=0)


def test_rotary_scores_depend_on_distance_alone(device):
    """One query and one key, each at 40 places: the score is the same along every diagonal, and not
    along rows. Angles, two to a score, are off by `angle_error`, and the rest is a few roundings of
    a product of two vectors.
    """
    query, key = torch.randn(16, device=device), torch.randn(16, device=device)
    places = torch.arange(40, device=device)
    angle = max(angle_error(540, 10000 ** (-i / 8)) for i in range(8))
    slack = query.norm().item() * key.norm().item() / 4 * (2 * angle + 40 * ULP)

    def scores(start):
        q, k = (turned(x.expand(40, 16), places + start) for x in (query, key))
        return attention_scores(q, k, Mask(causal=False))[0, 0]

    near, far = scores(0), scores(500)
    assert ((near - far).abs() <= 2 * slack).all()
    for distance in range(-39, 40):
        diagonal = near.diagonal(distance)
        assert diagonal.max() - diagonal.min() <= 2 * slack
    assert near[0].max() - near[0].min() > 100 * slack


@pytest.mark.slow
def test_rotary_is_llama(device):
    """Halves, base 10,000, as transformers' own function turns them."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    n_token, d_head = 30, 16
    query, key = (
        torch.randn(2, 3, n_token, d_head, device=device),
        torch.randn(2, 3, n_token, d_head, device=device),
    )
    positions = torch.stack((torch.arange(n_token), torch.arange(5, 5 + n_token))).to(device)
    config = LlamaConfig(hidden_size=3 * d_head, num_attention_heads=3, max_position_embeddings=64)
    assert config.rope_parameters["rope_theta"] == 10_000
    cos, sin = LlamaRotaryEmbedding(config).to(device)(query, positions)
    ours = kind("rotary", n_head=3, d_model=3 * d_head).rotation(positions)
    slack = 2 * max(angle_error(n_token + 5, 10000 ** (-i / 8)) for i in range(8)) + 4 * ULP
    for x, theirs in zip((query, key), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        assert ((rotate(x, *ours) - theirs).abs() <= slack * 2 * x.abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rotation_is_rounded_once(dtype):
    """Computed in float32, or float64 where that is given; the result has the dtype of what is
    turned.
    """
    x = torch.randn(20, 8, dtype=torch.float64).to(dtype)
    cos, sin = kind("rotary", n_head=1).rotation(torch.arange(300, 320)[None])
    assert cos.dtype == sin.dtype == torch.float32
    left, right = x.to(torch.promote_types(dtype, torch.float32)).chunk(2, -1)
    expected = torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(dtype)
    out = rotate(x, cos, sin)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
