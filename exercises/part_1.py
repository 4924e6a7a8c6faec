"""Exercises 1 to 5: from scores to attention that knows where it is.

Under each solution, which is the product's own, stand the functions that are wrong in a known way.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from exercises.kinds import Case, Exercise, Mistake
from model.attention import (
    CausalSelfAttention,
    Mask,
    attention_weights,
    explicit_attention,
    softmax,
)
from model.config import ModelConfig
from model.positions import RotaryPositions, rotate

INF = math.inf


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(module: torch.nn.Module) -> None:
    """Weights large enough that every part of a layer is seen in its output."""
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = numbers(*parameter.shape, seed=seed + 100) / 2


# 1. softmax


def unguarded_softmax(scores: Tensor) -> Tensor:
    """Without the row's maximum."""
    exponentials = scores.exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def softmax_by(
    scores: Tensor, maximum: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]
) -> Tensor:
    """With another maximum or another sum; a sum of 0 gives zeros."""
    exponentials = (scores - maximum(scores)).exp()
    return exponentials / total(exponentials).clamp(min=1e-300)


def row_maximum(scores: Tensor) -> Tensor:
    """That of each row, 0 where it is -inf."""
    maximum = scores.amax(-1, keepdim=True)
    return maximum.masked_fill(maximum == -INF, 0.0)


def row_sum(scores: Tensor) -> Tensor:
    return scores.sum(-1, keepdim=True)


def softmax_less_one_maximum(scores: Tensor) -> Tensor:
    """The maximum of everything in place of the row's; a row that vanishes is nan."""
    exponentials = (scores - scores.amax()).exp()
    return exponentials / row_sum(exponentials)


def unnormalised_softmax(scores: Tensor) -> Tensor:
    """Exponentials that are not divided by their sum."""
    return (scores - scores.amax(-1, keepdim=True)).exp()


ONE_SUM = "everything is divided by one sum: each row needs its own, sum(dim=-1, keepdim=True)"
ONE_MAXIMUM = (
    "one maximum is subtracted from all rows, so that small rows vanish: each row needs its own, "
    "amax(dim=-1, keepdim=True)"
)
SOFTMAX = Exercise(
    1,
    "softmax",
    "softmax",
    softmax,
    [
        Case(
            "softmax of the row (0, ln 3)",
            lambda f: f(torch.tensor([0.0, math.log(3)])),
            "exp(x_i) over the sum of all exp(x_j) of the row",
        ),
        Case(
            "three rows of four, softmax of each",
            lambda f: f(numbers(3, 4)),
            "the sum goes over the last dimension: sum(dim=-1, keepdim=True)",
        ),
        Case(
            "scores of shape (2, 3, 3, 4)",
            lambda f: f(numbers(2, 3, 3, 4)),
            "whatever comes before it, the sum goes over the last dimension, -1",
        ),
        Case(
            "large scores, (1000, 1001)",
            lambda f: f(torch.tensor([1000.0, 1001.0])),
            "exp overflows above 709: subtract the row's maximum first",
        ),
        Case(
            "two rows far apart, (1000, 1001) and (0, 1)",
            lambda f: f(torch.tensor([[1000.0, 1001.0], [0.0, 1.0]])),
            "each row needs its own maximum: amax(dim=-1, keepdim=True)",
        ),
        Case(
            "a score of -inf, a key that may not be looked at",
            lambda f: f(torch.tensor([0.0, -INF, math.log(3)])),
            "exp(-inf) is 0, and no special case is needed",
        ),
        Case(
            "a row of nothing but -inf, a query that may look at nothing",
            lambda f: f(torch.tensor([[-INF, -INF], [0.0, 0.0]])),
            "-inf less -inf is nan: subtract 0 there, and divide by 1 where the sum is 0",
        ),
    ],
    [
        Mistake(
            "a row of -inf gives nan, for -inf less -inf is nan: it is to give zeros. Subtract 0 "
            "where the maximum is -inf, and divide by 1 where the sum is 0",
            partial(torch.softmax, dim=-1),
        ),
        Mistake(
            "exp of a large score is inf, and inf / inf is nan: subtract the row's maximum first",
            unguarded_softmax,
        ),
        Mistake(ONE_SUM, lambda scores: softmax_by(scores.double(), row_maximum, Tensor.sum)),
        Mistake(ONE_SUM, lambda scores: softmax_by(scores.double(), Tensor.amax, Tensor.sum)),
        Mistake(ONE_MAXIMUM, lambda scores: softmax_by(scores.double(), Tensor.amax, row_sum)),
        Mistake(ONE_MAXIMUM, softmax_less_one_maximum),
        Mistake(
            "the sum goes over the first dimension: it belongs over the last, dim=-1",
            partial(torch.softmax, dim=0),
        ),
        Mistake("the exponentials are not divided by their sum", unnormalised_softmax),
    ],
)


# 2. mask


def product_allowed(n_query: int, n_key: int, window: int) -> Tensor:
    """The product's mask without its batch and head dimensions."""
    return Mask(window=window).allowed(n_query, n_key)[0, 0]


def distances(n_query: int, n_key: int, shift: int) -> Tensor:
    """How far key s lies before query t, which stands at t + shift: (T, S)."""
    return torch.arange(n_query)[:, None] + shift - torch.arange(n_key)


def wrong_allowed(
    rule: Callable[[Tensor, int], Tensor],
    n_query: int,
    n_key: int,
    window: int,
    aligned: bool = True,
) -> Tensor:
    """A mask by a rule over (distance, window, 0 being without end)."""
    shift = n_key - n_query if aligned else 0
    return rule(distances(n_query, n_key, shift), window or n_key + 1)


def mask_case(words: str, n_query: int, n_key: int, window: int, hint: str) -> Case:
    return Case(
        f"{words}: allowed({n_query}, {n_key}, {window})",
        lambda f: f(n_query, n_key, window),
        hint,
    )


def right_rule(distance: Tensor, window: int) -> Tensor:
    return (distance >= 0) & (distance < window)


MASK = Exercise(
    2,
    "mask",
    "allowed",
    product_allowed,
    [
        mask_case("three tokens", 3, 3, 0, "query t may look at keys 0 to t, itself included"),
        mask_case("a window of 2", 5, 5, 2, "distances 0 and 1 lie within a window of 2"),
        mask_case(
            "one new query behind a cache of four", 1, 5, 0, "the last query stands at the last key"
        ),
        mask_case("two new queries", 2, 5, 0, "query t stands at position t + n_key - n_query"),
        mask_case(
            "two new queries and a window", 2, 6, 3, "a window counts from the query's place"
        ),
        mask_case("one token", 1, 1, 1, "a token may always look at itself"),
    ],
    [
        Mistake(
            "a query does not see its own token: the distance may be 0, so <= and not <",
            partial(wrong_allowed, lambda d, window: (d > 0) & (d < window)),
        ),
        Mistake(
            "queries look at what comes after them, the triangle is upside down: key position <= "
            "query position",
            partial(wrong_allowed, lambda d, window: (d <= 0) & (-d < window)),
        ),
        Mistake(
            "True and False are swapped: True is where a query may look",
            partial(wrong_allowed, lambda d, window: ~right_rule(d, window)),
        ),
        Mistake(
            "the first query is taken to stand at the first key. With a cache the last query "
            "stands at the last key: query t is at position t + n_key - n_query",
            partial(wrong_allowed, right_rule, aligned=False),
        ),
        Mistake(
            "the window is one too wide: it counts the query's own token, so distance < window",
            partial(wrong_allowed, lambda d, window: (d >= 0) & (d <= window)),
        ),
        Mistake(
            "the window is left out: keys at a distance of `window` or more are too far",
            partial(wrong_allowed, lambda d, window: d >= 0),
        ),
        Mistake(
            "a window of 0 hides everything: 0 is to mean that there is none",
            lambda n_query, n_key, window: (
                product_allowed(n_query, n_key, window) & torch.tensor(window > 0)
            ),
        ),
    ],
)


# 3. weights


def raw_scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def allowed_by(mask: Mask, scores: Tensor) -> Tensor:
    return mask.allowed(*scores.shape[-2:])


def divided_weights(divisor: Callable[[Tensor], float], q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Scores divided by something else than sqrt(d_head)."""
    scores = raw_scores(q, k) / divisor(q)
    return softmax(scores.masked_fill(~allowed_by(mask, scores), -INF))


def masked_late(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    scores = raw_scores(q, k) / math.sqrt(q.shape[-1])
    return softmax(scores) * allowed_by(mask, scores)


def masked_with_zero(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    scores = raw_scores(q, k) / math.sqrt(q.shape[-1])
    return softmax(scores.masked_fill(~allowed_by(mask, scores), 0.0))


def softmax_over_queries(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    scores = raw_scores(q, k) / math.sqrt(q.shape[-1])
    return softmax(scores.masked_fill(~allowed_by(mask, scores), -INF).mT).mT


def without_mask(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    return softmax(raw_scores(q, k) / math.sqrt(q.shape[-1]))


def inverted_mask(normalise: Callable, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    scores = raw_scores(q, k) / math.sqrt(q.shape[-1])
    return normalise(scores.masked_fill(allowed_by(mask, scores), -INF))


UPSIDE_DOWN = (
    "the mask is upside down: mask.allowed is True where a query may look, and -inf belongs where "
    "it is False"
)


def weights_case(words: str, shape: tuple[int, int, int, int, int], mask: Mask, hint: str) -> Case:
    """`shape` is B, H, T, S, K."""
    rows, heads, n_query, n_key, width = shape
    return Case(
        words,
        lambda f: f(
            numbers(rows, heads, n_query, width), numbers(rows, heads, n_key, width, seed=1), mask
        ),
        hint,
    )


def small_weights(function: Callable) -> Tensor:
    """Scores 0 and 2 ln 3, which sqrt(d_head) = 2 makes 0 and ln 3."""
    keys = torch.tensor([[[[0.0, 0, 0, 0], [2 * math.log(3), 0, 0, 0]]]])
    return function(torch.tensor([[[[1.0, 0, 0, 0]]]]), keys, Mask())


WEIGHTS = Exercise(
    3,
    "weights",
    "attention_weights",
    attention_weights,
    [
        Case(
            "one query (1, 0, 0, 0) and keys (0, 0, 0, 0), (2 ln 3, 0, 0, 0)",
            small_weights,
            "the scores are q k^T / sqrt(4), so 0 and ln 3",
        ),
        weights_case(
            "all tokens see all, d_head 8",
            (1, 1, 4, 4, 8),
            Mask(causal=False),
            "softmax(q k^T / sqrt(d_head)), over the keys",
        ),
        weights_case(
            "causal, two rows and three heads",
            (2, 3, 4, 4, 8),
            Mask(),
            "what mask.allowed(T, S) forbids is -inf before the softmax",
        ),
        weights_case(
            "two new queries behind three cached keys",
            (1, 2, 2, 5, 4),
            Mask(),
            "mask.allowed takes the number of queries, then the number of keys",
        ),
        weights_case(
            "rows of four and two tokens, the second padded",
            (2, 2, 4, 4, 4),
            Mask(lengths=(4, 2)),
            "mask.allowed(T, S) has shape (B or 1, 1, T, S) and broadcasts over heads",
        ),
    ],
    [
        Mistake(
            "the scores are not divided by sqrt(d_head)",
            partial(divided_weights, lambda q: 1.0),
        ),
        Mistake(
            "the scores are divided by d_head: it is its square root",
            partial(divided_weights, lambda q: float(q.shape[-1])),
        ),
        Mistake(
            "the scores are divided by the square root of the width of all heads together: it is "
            "that of one head, q.shape[-1]",
            partial(divided_weights, lambda q: math.sqrt(q.shape[1] * q.shape[-1])),
        ),
        Mistake(
            "the scores are divided by the square root of the number of tokens: it is that of "
            "d_head, q.shape[-1]",
            partial(divided_weights, lambda q: math.sqrt(q.shape[-2])),
        ),
        Mistake(
            "the mask comes after the softmax, so that rows do not sum to 1: forbidden scores are "
            "-inf before it",
            masked_late,
        ),
        Mistake(
            "forbidden scores are 0, and exp(0) is 1: they are to be -inf",
            masked_with_zero,
        ),
        Mistake(
            "the softmax goes over the queries: each query's weights over the keys, the last "
            "dimension, sum to 1",
            softmax_over_queries,
        ),
        Mistake("the mask is left out: what mask.allowed(T, S) forbids is -inf", without_mask),
        Mistake(UPSIDE_DOWN, partial(inverted_mask, softmax)),
        Mistake(UPSIDE_DOWN, partial(inverted_mask, partial(torch.softmax, dim=-1))),
    ],
)


# 4. heads


def attention_layer() -> CausalSelfAttention:
    """Three heads of width 4."""
    layer = CausalSelfAttention(ModelConfig(n_head=3, d_model=12), explicit_attention)
    fill(layer)
    return layer


def split(y: Tensor, width: int) -> Tensor:
    return y.unflatten(-1, (-1, width)).transpose(1, 2)


def heads_by(
    layer: CausalSelfAttention,
    x: Tensor,
    mask: Mask,
    cut: Callable[[Tensor], Tensor],
    join: Callable[[Tensor], Tensor],
) -> Tensor:
    """The layer with another way to cut into heads or to join them."""
    q, k, v = (cut(project(x)) for project in (layer.query, layer.key, layer.value))
    return join(explicit_attention(q, k, v, mask))


def joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(-2)


def one_wide_head(x: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    out = heads_by(layer, x, mask, lambda y: y[:, None], lambda out: out[:, 0])
    return layer.project(out)


def unprojected(x: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    return heads_by(layer, x, mask, lambda y: split(y, layer.config.d_head), joined)


def joined_untransposed(x: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    def join(out: Tensor) -> Tensor:
        return out.reshape(x.shape)

    return layer.project(heads_by(layer, x, mask, lambda y: split(y, layer.config.d_head), join))


def cut_untransposed(x: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    rows, n_token, _ = x.shape

    def cut(y: Tensor) -> Tensor:
        return y.reshape(rows, layer.config.n_head, n_token, layer.config.d_head)

    return layer.project(heads_by(layer, x, mask, cut, joined))


def interleaved(x: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    def cut(y: Tensor) -> Tensor:
        return y.unflatten(-1, (layer.config.d_head, -1)).permute(0, 3, 1, 2)

    return layer.project(heads_by(layer, x, mask, cut, joined))


def keys_for_values(x: Tensor, layer: CausalSelfAttention, mask: Mask) -> Tensor:
    q, k, _ = (
        split(project(x), layer.config.d_head) for project in (layer.query, layer.key, layer.value)
    )
    return layer.project(joined(explicit_attention(q, k, k, mask)))


def heads_case(words: str, rows: int, n_token: int, mask: Mask, hint: str) -> Case:
    return Case(words, lambda f: f(numbers(rows, n_token, 12), attention_layer(), mask), hint)


HEADS = Exercise(
    4,
    "heads",
    "multi_head",
    lambda x, layer, mask: layer(x, mask),
    [
        heads_case(
            "one token, which can look at itself alone",
            1,
            1,
            Mask(),
            "its weight is 1: the output is layer.project(layer.value(x))",
        ),
        heads_case(
            "five tokens, three heads of width 4",
            1,
            5,
            Mask(),
            "(B, T, D) becomes (B, T, H, K), then (B, H, T, K), and goes back the same way",
        ),
        heads_case(
            "two rows of three tokens, no causality",
            2,
            3,
            Mask(causal=False),
            "rows never mix: keep the first dimension in every reshape",
        ),
    ],
    [
        Mistake("the output projection, layer.project, is left out", unprojected),
        Mistake(
            "there is one head of full width: each of layer.config.n_head heads has its softmax",
            one_wide_head,
        ),
        Mistake(
            "the heads are joined without swapping back tokens and heads: out.transpose(1, 2) "
            "comes before the reshape",
            joined_untransposed,
        ),
        Mistake(
            "the width is cut into heads by one reshape to (B, H, T, K), which mixes the tokens: "
            "reshape to (B, T, H, K), then transpose(1, 2)",
            cut_untransposed,
        ),
        Mistake(
            "each head takes every n_head-th number: head h has numbers h d_head to (h + 1) d_head",
            interleaved,
        ),
        Mistake("the weighted sum is over the keys: it is over the values", keys_for_values),
    ],
)


# 5. positions


def product_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """The product's rotation with base 10,000."""
    config = ModelConfig(n_head=1, d_model=x.shape[-1], positions="rotary")
    cos, sin = RotaryPositions(config).rotation(positions)
    return rotate(x, cos, sin)


def turned(x: Tensor, positions: Tensor, exponent: float = 2.0, sign: int = 1) -> Tensor:
    """Pairs half a head apart, by angles of positions / 10000^(exponent i / K)."""
    index = torch.arange(x.shape[-1] // 2)
    angles = sign * positions[:, None, :, None] / 10_000 ** (exponent * index / x.shape[-1])
    return rotate(x, angles.cos(), angles.sin())


def turned_neighbours(x: Tensor, positions: Tensor) -> Tensor:
    index = torch.arange(x.shape[-1] // 2)
    angles = positions[:, None, :, None] / 10_000 ** (2 * index / x.shape[-1])
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def rotary_case(words: str, x: Callable[[], Tensor], positions: list[list[int]], hint: str) -> Case:
    return Case(words, lambda f: f(x(), torch.tensor(positions)), hint)


POSITIONS = Exercise(
    5,
    "positions",
    "rotary",
    product_rotary,
    [
        rotary_case(
            "the pair (1, 0) at position 1",
            lambda: torch.tensor([[[[1.0, 0.0]]]]),
            [[1]],
            "it is turned by 1 radian, to (cos 1, sin 1)",
        ),
        rotary_case(
            "(1, 2, 3, 4) at position 0",
            lambda: torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]]),
            [[0]],
            "position 0 turns nothing",
        ),
        rotary_case(
            "a head of width 8, positions 0 to 3",
            lambda: numbers(1, 2, 4, 8),
            [[0, 1, 2, 3]],
            "pair i is (x_i, x_(i + K/2)), turned by position / 10000^(2 i / K)",
        ),
        rotary_case(
            "one new token behind seven cached ones",
            lambda: numbers(1, 2, 1, 8),
            [[7]],
            "the angle comes from `positions`, not from the place in the tensor",
        ),
        rotary_case(
            "two rows that stand at different positions",
            lambda: numbers(2, 1, 2, 4),
            [[3, 4], [0, 1]],
            "positions has shape (B or 1, T): add a dimension for the heads",
        ),
    ],
    [
        Mistake(
            "neighbours (x_0, x_1), (x_2, x_3), ... are turned: here the pairs lie half a head "
            "apart, (x_i, x_(i + K/2))",
            turned_neighbours,
        ),
        Mistake(
            "it turns the wrong way: left cos - right sin, and right cos + left sin",
            partial(turned, sign=-1),
        ),
        Mistake(
            "the positions are counted from 1, or one is added: the first token is not turned",
            lambda x, positions: turned(x, positions + 1),
        ),
        Mistake(
            "the wavelengths are wrong, i / K in place of 2 i / K: 10000^(2 i / K) for pair i",
            partial(turned, exponent=1.0),
        ),
        Mistake(
            "all pairs are turned by the same angle: pair i by position / 10000^(2 i / K)",
            partial(turned, exponent=0.0),
        ),
        Mistake(
            "the angle comes from the place in the tensor: with a cache the first token of x does "
            "not stand at 0, so take `positions`",
            lambda x, positions: turned(x, torch.arange(x.shape[-2])[None]),
        ),
    ],
)

EXERCISES = [SOFTMAX, MASK, WEIGHTS, HEADS, POSITIONS]
