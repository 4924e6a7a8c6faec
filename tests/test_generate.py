"""Sampling: what is drawn, from which tokens it is drawn, and that neither cache nor company in a
batch makes a difference.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import restored
from torch.testing import assert_close

import model.generate
from model.attention import explicit_attention
from model.fast_attention import fast_attention
from model.generate import generate, next_token
from model.sampling import Sampling
from model.transfer import where_drawn

KINDS = pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
WINDOWS = pytest.mark.parametrize("window", [0, 3])
BIGRAMS = pytest.mark.parametrize("bigrams", [0, 7])
RAGGED = [
    [1, 2, 3],
    [4, *[5, 6] * 11, 4],
    [7],
    [8, 9, 10, 1, 2, 3, 4, 5],
]  # within a context of 8, three of it, one token, full


def generators(n, seed=0):
    return [torch.Generator().manual_seed(seed + row) for row in range(n)]


def draw(probabilities, generator):
    """The first token at which the running sum passes a uniform number: inverse transform sampling
    in plain Python.
    """
    uniform, running = torch.rand(1, generator=generator, dtype=torch.float64).item(), 0.0
    for token, probability in enumerate(probabilities):
        running += probability
        if running > uniform:
            return token
    raise AssertionError(f"{uniform} is not below {running}")


# --- one token ---


def test_temperature_0_is_greedy():
    logits = torch.tensor([[0.1, 0.3, -2.0], [1e4, -1e4, 0.0], [-5.0, -5.5, -4.9]])
    assert next_token(logits, Sampling(temperature=0)) == [1, 0, 2]


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-9}, {"top_p": 5e-324}, {"top_k": 5, "top_p": 0.05}]
)
def test_the_most_likely_alone(options):
    logits = torch.randn(50, 20)
    assert next_token(logits, Sampling(**options)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_small_temperature_does_not_overflow(temperature, options):
    logits = torch.tensor(
        [[0.0, 50.0, 49.0, -1e4], [-1e30, 1e30, 0.0, 1.0], [-3.0, -2.0, -3.0, -2.5]]
    )
    assert next_token(logits, Sampling(temperature=temperature, **options)) == [1, 1, 1]


def test_a_large_temperature_is_uniform():
    drawn = torch.tensor(
        next_token(torch.tensor([[3.0, -3.0, 0.0, 9.0]]).expand(4000, 4), Sampling(temperature=1e9))
    ).bincount(minlength=4)
    assert ((drawn - 1000).abs() < 5 * math.sqrt(4000 * 0.25 * 0.75)).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_k": 3}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_k": 99}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),  # 0.4 + 0.3 do not reach it
        ({"top_p": 1.0}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        (
            {"top_k": 3, "top_p": 0.8},
            [0, 4 / 7, 0, 3 / 7, 0],
        ),  # of what top_k left, 0.7 / 0.85 = 0.82 is enough
        ({"temperature": 0.5}, [x * x / 0.285 for x in (0.05, 0.4, 0.1, 0.3, 0.15)]),
        ({"temperature": 2.0}, [math.sqrt(x) / 2.10732 for x in (0.05, 0.4, 0.1, 0.3, 0.15)]),
        (
            {"temperature": 0.5, "top_p": 0.6},
            [0, 0.16 / 0.25, 0, 0.09 / 0.25, 0],
        ),  # 0.16 / 0.285 = 0.56: one is not enough
    ],
)
def test_draws_follow_the_distribution(options, expected):
    """Chi-square of 20,000 draws: below 23.5, the 99.99th percentile at four degrees of freedom. Of
    a token of probability zero a single draw is too many.
    """
    assert math.isclose(sum(expected), 1, rel_tol=1e-5)
    n = 20_000
    logits = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15]).log() + 17
    drawn = (
        torch.tensor(next_token(logits.expand(n, 5), Sampling(**options)))
        .bincount(minlength=5)
        .tolist()
    )
    assert all(count == 0 for count, share in zip(drawn, expected, strict=True) if share == 0)
    assert (
        sum(
            (count - n * share) ** 2 / (n * share)
            for count, share in zip(drawn, expected, strict=True)
            if share
        )
        < 23.5
    )


def test_a_draw_is_the_inverse_of_the_running_sum():
    logits = torch.randn(200, 30, dtype=torch.float64)
    expected = [
        draw(row.tolist(), generator)
        for row, generator in zip(logits.softmax(-1), generators(200), strict=True)
    ]
    assert next_token(logits, Sampling(), generators=generators(200)) == expected


def test_the_default_generator_is_torch_s():
    logits = torch.zeros(5, 1000)
    torch.manual_seed(3)
    first = next_token(logits, Sampling())
    torch.manual_seed(3)
    assert next_token(logits, Sampling()) == first
    assert len(set(first)) > 1
    assert next_token(logits, Sampling()) != first


def test_each_row_has_its_own_generator():
    logits = torch.randn(4, 100)
    together = next_token(logits, Sampling(), generators=generators(4))
    alone = [
        next_token(logits[row : row + 1], Sampling(), generators=[generator])[0]
        for row, generator in enumerate(generators(4))
    ]
    assert together == alone
    with pytest.raises((ValueError, RuntimeError)):
        next_token(
            logits, Sampling(), generators=generators(1)
        )  # one for all four would draw four times the same
    with pytest.raises((ValueError, RuntimeError)):
        next_token(logits, Sampling(), generators=generators(3))


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_draw_nothing(wrong, temperature):
    """In one row of three, and in a place that need not be drawn."""
    logits = torch.zeros(3, 5)
    logits[1, 2] = wrong
    with pytest.raises(FloatingPointError, match="not finite"):
        next_token(logits, Sampling(temperature=temperature), generators(3))


def test_where_tokens_are_drawn():
    """Where the logits are, on CUDA alone, and there unless results must repeat."""

    def moved(kind):
        logits = SimpleNamespace(device=torch.device(kind), cpu=lambda: "to the CPU")
        return where_drawn(logits) is not logits

    with restored():
        assert [moved(kind) for kind in ("cuda", "mps", "cpu")] == [False, True, True]
        torch.use_deterministic_algorithms(True)
        assert moved("cuda")


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 10, dtype=torch.float64)
    before = logits.clone()
    next_token(logits, Sampling(temperature=0.5, top_k=4, top_p=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_any_precision(dtype, device):
    logits = torch.randn(3, 10, device=device).to(dtype)
    assert next_token(logits, Sampling(), generators=generators(3)) == next_token(
        logits.double(), Sampling(), generators=generators(3)
    )


# --- many tokens ---


def alone(model, prompt, n, generator=None):
    """The definition, in a loop: no cache, no batch, and at the context's edge the last half of it
    is kept. generator None: greedy.
    """
    limit, row, new = model.config.context_length, list(prompt), []
    for _ in range(n):
        if len(row) > limit:
            row = row[len(row) - max(1, limit // 2) :]
        with torch.no_grad():
            logits = model(torch.tensor([row], device=model.embed.weight.device))[0, -1].cpu()
        new.append(
            logits.argmax().item()
            if generator is None
            else draw(logits.softmax(-1).tolist(), generator)
        )
        row.append(new[-1])
    return new


def lines(model, prompts, n, *, generators=None, use_cache=True, **options):
    """New tokens by row."""
    stream = generate(model, prompts, n, Sampling(**options), generators, use_cache)
    return [list(row) for row in zip(*stream, strict=True)]


@pytest.mark.slow
@KINDS
@WINDOWS
@BIGRAMS
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("attend", [explicit_attention, fast_attention])
def test_rows_are_what_they_are_alone(tiny, positions, window, bigrams, use_cache, attend, device):
    """Prompts of any length, up to three times the context, continued far past its edge, each by
    its own generator.
    """
    model = tiny(attend, positions=positions, window=window, bigrams=bigrams, device=device)
    drawn = lines(model, RAGGED, 25, generators=generators(4), use_cache=use_cache)
    assert drawn == [
        alone(model, prompt, 25, generator)
        for prompt, generator in zip(RAGGED, generators(4), strict=True)
    ]
    assert all(len(set(row)) > 1 for row in drawn)
    greedy = lines(model, RAGGED, 12, temperature=0, use_cache=use_cache)
    assert greedy == [alone(model, prompt, 12) for prompt in RAGGED]
    assert lines(model, RAGGED, 12, top_k=1, use_cache=use_cache) == greedy


@KINDS
@WINDOWS
@BIGRAMS
@pytest.mark.parametrize("context_length", [1, 2, 3, 8])
def test_cached_logits_are_uncached(tiny, positions, window, bigrams, context_length, monkeypatch):
    """Not the draws alone: the logits themselves, at every step and past the edge."""
    seen, original = [], next_token

    def spy(logits_BV, *drawing):
        seen.append(logits_BV.clone())
        return original(logits_BV, *drawing)

    monkeypatch.setattr(model.generate, "next_token", spy)
    network = tiny(
        positions=positions, window=window, bigrams=bigrams, context_length=context_length
    )
    cached = lines(network, RAGGED, 20, generators=generators(4))
    one = torch.stack(seen)
    seen.clear()
    assert lines(network, RAGGED, 20, generators=generators(4), use_cache=False) == cached
    assert_close(one, torch.stack(seen), rtol=0, atol=1e-11)
    assert one.shape == (20, 4, 11)


@pytest.mark.parametrize(
    ("context_length", "kept"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (9, 4)]
)
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
def test_what_is_kept_at_the_edge(tiny, context_length, kept, use_cache):
    """A full context is read whole; one token more, and its last half is read again from position
    0, together with nothing else.
    """
    network, read = tiny(context_length=context_length), []

    def note(module, arguments):
        read.append(arguments[0][0].tolist())

    prompt = list(range(1, context_length + 1))
    network.embed.register_forward_pre_hook(note)
    (drawn,) = lines(network, [prompt], 3, temperature=0, use_cache=use_cache)
    tokens = prompt + drawn
    again = tokens[context_length + 1 - kept : context_length + 1]
    if use_cache:  # all but the last token first, then that one in a step of its own
        parts = [prompt[:-1], prompt[-1:], again[:-1], again[-1:]]
        expected = [part for part in parts if part]
    else:
        expected = [prompt, again]
    assert read[: len(expected)] == expected
    assert drawn == alone(network, prompt, 3)


def test_the_cache_saves_reading(tiny):
    """The prompt but for its last token is read once, then one token a row and step; without a
    cache all of them.
    """
    network, shapes = tiny(context_length=16), []
    network.embed.register_forward_pre_hook(
        lambda module, arguments: shapes.append(tuple(arguments[0].shape))
    )
    list(generate(network, [[1, 2, 3], [4, 5]], 4, Sampling(temperature=0)))
    assert shapes == [(2, 2), (2, 1), (2, 1), (2, 1), (2, 1)]
    shapes.clear()
    list(generate(network, [[1, 2, 3], [4, 5]], 4, Sampling(temperature=0), use_cache=False))
    assert shapes == [(2, 3), (2, 4), (2, 5), (2, 6)]


def test_the_cache_holds_what_is_asked_for_not_the_whole_context(tiny):
    """64 terabytes would be needed for all of it."""
    network = tiny(context_length=10**12, positions="rotary")
    drawn = list(generate(network, [[1, 2, 3], [4]], 4, Sampling(temperature=0)))
    assert drawn == list(
        generate(network, [[1, 2, 3], [4]], 4, Sampling(temperature=0), use_cache=False)
    )


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
def test_generators_make_it_reproducible(tiny, use_cache):
    network = tiny()
    first = lines(network, RAGGED, 20, generators=generators(4), use_cache=use_cache)
    assert lines(network, RAGGED, 20, generators=generators(4), use_cache=use_cache) == first
    assert (
        lines(network, RAGGED, 20, generators=generators(4, seed=9), use_cache=use_cache) != first
    )
    same = lines(network, [[1, 2]] * 3, 20, generators=generators(3), use_cache=use_cache)
    assert same[0] != same[1] != same[2]


def test_options_reach_the_draw(tiny, monkeypatch):
    given = []
    monkeypatch.setattr(
        model.generate,
        "next_token",
        lambda logits_BV, *options: given.append(options) or [0] * len(logits_BV),
    )
    mine = generators(2)
    list(
        generate(
            tiny(), [[1], [2]], 1, Sampling(temperature=0.7, top_k=5, top_p=0.9), generators=mine
        )
    )
    assert given == [(Sampling(temperature=0.7, top_k=5, top_p=0.9), mine)]


def test_it_streams(tiny):
    """One step at a time, as many as asked, without gradients; prompts and the caller's gradient
    mode stay as they are.
    """
    network, prompts = tiny(), [[1, 2], [3, 4]]
    calls = []
    network.embed.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    stream = generate(network, prompts, 3)
    assert calls == []
    for step in range(3):
        assert len(next(stream)) == 2
        assert len(calls) == step + 2  # the prompt but for its last token, and a token a step
        assert torch.is_grad_enabled()
    assert next(stream, None) is None
    assert calls == [False] * 4
    assert prompts == [[1, 2], [3, 4]]
    assert list(generate(network, prompts, 0)) == []
