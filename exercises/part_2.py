"""Exercises 6 to 10: from attention to a model that is trained and sampled from.

Under each solution, which is the product's own, stand the functions that are wrong in a known way.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from configs import OptimConfig
from exercises.kinds import Case, Exercise, Mistake
from exercises.part_1 import fill, numbers
from model.attention import (
    CausalSelfAttention,
    Mask,
    Rotation,
    attention_weights,
    explicit_attention,
)
from model.cache import KVCache
from model.config import ModelConfig
from model.generate import next_distribution
from model.gpt import Block
from model.positions import RotaryPositions, rotate
from model.sampling import Sampling
from training.loss import cross_entropy
from training.optimizer import learning_rate

# 6. block


def full_block() -> Block:
    """Two heads of width 4, and norms that do not look alike."""
    block = Block(ModelConfig(n_head=2, d_model=8), explicit_attention)
    fill(block)
    return block


def still_block(part: str) -> Block:
    """One in which the last projection of attention or MLP is zero."""
    block = full_block()
    project = block.attention.project if part == "attention" else block.mlp.project
    torch.nn.init.zeros_(project.weight)
    torch.nn.init.zeros_(project.bias)
    return block


def post_norm(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = layers.attention_norm(x + layers.attention(x, mask))
    return layers.mlp_norm(x + layers.mlp(x))


def without_residual(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = layers.attention(layers.attention_norm(x), mask)
    return layers.mlp(layers.mlp_norm(x))


def without_first_residual(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = layers.attention(layers.attention_norm(x), mask)
    return x + layers.mlp(layers.mlp_norm(x))


def without_second_residual(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = x + layers.attention(layers.attention_norm(x), mask)
    return layers.mlp(layers.mlp_norm(x))


def normed_residual(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = layers.attention_norm(x)
    x = x + layers.attention(x, mask)
    x = layers.mlp_norm(x)
    return x + layers.mlp(x)


def parallel(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    update = layers.attention(layers.attention_norm(x), mask)
    return x + update + layers.mlp(layers.mlp_norm(x))


def first_stream_twice(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    h = x + layers.attention(layers.attention_norm(x), mask)
    return x + layers.mlp(layers.mlp_norm(h))


def one_norm(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = x + layers.attention(layers.attention_norm(x), mask)
    return x + layers.mlp(layers.attention_norm(x))


def without_norms(x: Tensor, layers: Block, mask: Mask) -> Tensor:
    x = x + layers.attention(x, mask)
    return x + layers.mlp(x)


def block_case(words: str, make: Callable[[], Block], hint: str) -> Case:
    return Case(words, lambda f: f(3 * numbers(2, 4, 8), make(), Mask()), hint)


BLOCK = Exercise(
    6,
    "block",
    "block",
    lambda x, layers, mask: layers(x, mask),
    [
        block_case(
            "an attention that adds nothing",
            partial(still_block, "attention"),
            "what is left is x + mlp(mlp_norm(x))",
        ),
        block_case(
            "an MLP that adds nothing",
            partial(still_block, "mlp"),
            "what is left is x + attention(attention_norm(x), mask)",
        ),
        block_case(
            "two rows of four tokens",
            full_block,
            "the MLP reads the stream to which attention has added",
        ),
    ],
    [
        Mistake(
            "the norms come behind the additions (post-norm): here each layer reads a normed copy, "
            "x + attention(attention_norm(x)), and the stream itself is never normed",
            post_norm,
        ),
        Mistake(
            "the residual is left out: each layer's output is added to the stream, x + ...",
            without_residual,
        ),
        Mistake(
            "the first residual is left out: attention's output is added to the stream, x + ...",
            without_first_residual,
        ),
        Mistake(
            "the second residual is left out: the MLP's output is added to the stream, x + ...",
            without_second_residual,
        ),
        Mistake(
            "the stream itself is normed: only the copy that a layer reads is, so x = norm(x) "
            "overwrites what is to be added to",
            normed_residual,
        ),
        Mistake(
            "the MLP reads the stream as it was before attention: it is to read the sum",
            parallel,
        ),
        Mistake(
            "attention's update is lost: the MLP's output is added to the block's input, not to "
            "the stream that attention has added to",
            first_stream_twice,
        ),
        Mistake("the MLP has attention's norm: it has its own, layers.mlp_norm", one_norm),
        Mistake("the norms are left out", without_norms),
    ],
)


# 7. loss


def table_model(logits_VV: Tensor) -> Callable[[Tensor], Tensor]:
    """A model that looks at the last token alone: a row of logits for each."""
    return lambda tokens_BT: logits_VV[tokens_BT]


def product_loss(model: Callable[[Tensor], Tensor], text_BL: Tensor) -> Tensor:
    """The product's loss of a text: inputs all but the last, targets all but the first."""
    return cross_entropy(model(text_BL[:, :-1]), text_BL[:, 1:])


def loss_of(
    logits: Callable[[Callable, Tensor], Tensor],
    targets: Callable[[Tensor], Tensor],
    model: Callable[[Tensor], Tensor],
    text_BL: Tensor,
) -> Tensor:
    """The loss with another choice of logits or targets."""
    return cross_entropy(logits(model, text_BL), targets(text_BL))


def chosen(model: Callable[[Tensor], Tensor], text_BL: Tensor) -> Tensor:
    """The probability of each token that came, unguarded."""
    probabilities = model(text_BL[:, :-1]).softmax(-1)
    return probabilities.gather(-1, text_BL[:, 1:, None])


TEXT = [[0, 2, 1, 3, 3, 0], [4, 1, 1, 2, 0, 3]]
SURE = 120 * torch.eye(5)  # expects each token again, beyond what float32's exponential can say
NO_SHIFT = (
    "there is no shift: the model is asked for the token that it has just read. Targets are "
    "text[:, 1:], for logits behind text[:, :-1]"
)
LOSS = Exercise(
    7,
    "loss",
    "loss",
    product_loss,
    [
        Case(
            "a model that knows nothing, four tokens: ln 4 = 1.3863",
            lambda f: f(table_model(torch.zeros(4, 4)), torch.tensor([[0, 1, 2, 3]])),
            "the mean of -ln p, p being the probability of the token that came",
        ),
        Case(
            "two rows of six tokens",
            lambda f: f(table_model(2 * numbers(5, 5)), torch.tensor(TEXT)),
            "logits behind token t are compared with token t + 1",
        ),
        Case(
            "a text of two tokens, one prediction",
            lambda f: f(table_model(2 * numbers(5, 5, seed=1)), torch.tensor([[3, 1]])),
            "two tokens make one prediction: the second from the first",
        ),
        Case(
            "a model that is sure, and wrong",
            lambda f: f(table_model(SURE), torch.tensor([[0, 1]])),
            "the probability rounds to 0, whose logarithm is -inf: compute log_softmax, which "
            "takes the maximum away first",
        ),
    ],
    [
        Mistake(NO_SHIFT, partial(loss_of, lambda model, text: model(text), lambda text: text)),
        Mistake(
            NO_SHIFT,
            partial(loss_of, lambda model, text: model(text[:, 1:]), lambda text: text[:, 1:]),
        ),
        Mistake(
            NO_SHIFT,
            partial(loss_of, lambda model, text: model(text[:, :-1]), lambda text: text[:, :-1]),
        ),
        Mistake(
            "the shift goes the wrong way, to the token before: targets are text[:, 1:], for "
            "logits behind text[:, :-1]",
            partial(loss_of, lambda model, text: model(text[:, 1:]), lambda text: text[:, :-1]),
        ),
        Mistake(
            "it is the sum over all predictions: it is to be their mean",
            lambda model, text: product_loss(model, text) * text[:, 1:].numel(),
        ),
        Mistake(
            "the sum is divided by the number of tokens: L tokens make L - 1 predictions",
            lambda model, text: product_loss(model, text) * text[:, 1:].numel() / text.numel(),
        ),
        Mistake(
            "the logarithm has base 2 (bits): it is the natural one (nats)",
            lambda model, text: product_loss(model, text) / math.log(2),
        ),
        Mistake(
            "the sign is wrong: the loss is minus the mean logarithm",
            lambda model, text: -product_loss(model, text),
        ),
        Mistake(
            "the logarithm is of a softmax that has rounded to 0, hence inf: compute log_softmax, "
            "which takes the maximum away first",
            lambda model, text: -chosen(model, text).log().mean(),
        ),
        Mistake(
            "softmax is taken twice: F.cross_entropy wants logits, not probabilities",
            partial(
                loss_of,
                lambda model, text: model(text[:, :-1]).softmax(-1),
                lambda text: text[:, 1:],
            ),
        ),
        Mistake(
            "the logarithm is of the mean probability: it is the mean of the logarithms",
            lambda model, text: -chosen(model, text).mean().log(),
        ),
        Mistake(
            "it is 1 less the mean probability: it is the mean of -ln p",
            lambda model, text: 1 - chosen(model, text).mean(),
        ),
    ],
)


# 8. sampler


def product_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The product's, which leaves it to the draw to bring the rest back to a sum of 1."""
    kept = next_distribution(logits, Sampling(temperature, top_k, top_p))
    return kept / kept.sum(-1, keepdim=True)


def distribution_by(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    fault: str = "",
) -> Tensor:
    """One that works, but for its fault."""
    scaled = logits.double() * temperature if fault == "times" else logits.double() / temperature
    probabilities = scaled.softmax(-1)
    ordered, order = probabilities.sort(-1, descending=fault != "ascending")
    rank = torch.arange(ordered.shape[-1])
    top_k = top_k or ordered.shape[-1]
    in_k = rank < top_k + (fault == "one more")
    kept = ordered * (in_k | torch.tensor(fault == "no top-k"))
    total = 1.0 if fault == "nucleus of all" else kept.sum(-1, keepdim=True)
    before = kept.cumsum(-1) - (0.0 if fault == "before p" else kept)
    beyond = before >= top_p * total - 1e-12
    if fault != "before p":
        beyond[..., 0] = False
    if fault == "unscaled nucleus":
        plain = logits.double().softmax(-1).gather(-1, order) * in_k
        beyond = plain.cumsum(-1) - plain >= top_p * plain.sum(-1, keepdim=True)
    if top_p < 1 and fault != "no top-p":
        kept = kept.masked_fill(beyond, 0.0)
    if fault != "unnormalised":
        kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def unguarded_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    exponentials = (logits / temperature).exp()
    probabilities = exponentials / exponentials.sum(-1, keepdim=True)
    return distribution_by(probabilities.log(), 1.0, top_k, top_p)


def sampler_case(words: str, settings: tuple[float, int, float], hint: str) -> Case:
    temperature, top_k, top_p = settings
    told = f"{words}: temperature {temperature:g}, top_k {top_k}, top_p {top_p:g}"
    return Case(told, lambda f: f(2 * numbers(2, 7), temperature, top_k, top_p), hint)


def shares(*probabilities: float) -> Tensor:
    """Logits of these probabilities."""
    return torch.tensor([probabilities], dtype=torch.float64).log()


SAMPLER = Exercise(
    8,
    "sampler",
    "next_distribution",
    product_distribution,
    [
        sampler_case("nothing cut", (1.0, 0, 1.0), "this is softmax(logits); top_k 0 keeps all"),
        sampler_case("colder", (0.5, 0, 1.0), "softmax(logits / temperature)"),
        sampler_case("hotter", (2.0, 0, 1.0), "softmax(logits / temperature)"),
        sampler_case(
            "the three likeliest", (1.0, 3, 1.0), "the rest is 0, and what is kept sums to 1 again"
        ),
        sampler_case("k above the number of tokens", (1.0, 50, 1.0), "then all are kept"),
        Case(
            "probabilities 0.5 0.3 0.15 0.05 with top_p 0.7",
            lambda f: f(shares(0.5, 0.3, 0.15, 0.05), 1.0, 0, 0.7),
            "0.5 does not reach 0.7, 0.5 + 0.3 does: two are kept, 0.625 and 0.375",
        ),
        Case(
            "probabilities 0.05 0.5 0.15 0.3 with top_p 0.01",
            lambda f: f(shares(0.05, 0.5, 0.15, 0.3), 1.0, 0, 0.01),
            "the likeliest token always stays",
        ),
        Case(
            "probabilities 0.4 0.3 0.2 0.1 with top_k 2 and top_p 0.5",
            lambda f: f(shares(0.4, 0.3, 0.2, 0.1), 1.0, 2, 0.5),
            "top_k first: 0.4 and 0.3 are 0.57 and 0.43 of what is left, and 0.57 reaches 0.5",
        ),
        Case(
            "probabilities 0.4 0.3 0.2 0.1 with temperature 0.5 and top_p 0.5",
            lambda f: f(shares(0.4, 0.3, 0.2, 0.1), 0.5, 0, 0.5),
            "top_p counts probabilities after the temperature",
        ),
        Case(
            "a temperature of 0.001",
            lambda f: f(torch.tensor([[3.0, 1.0, 2.0]]), 0.001, 0, 1.0),
            "logits / temperature are large: the softmax takes their maximum away first",
        ),
    ],
    [
        Mistake(
            "the logits are multiplied by the temperature: they are divided by it",
            partial(distribution_by, fault="times"),
        ),
        Mistake(
            "the token that reaches p is dropped: the nucleus is the fewest tokens whose "
            "probabilities reach p, so it stays, and the likeliest always does",
            partial(distribution_by, fault="before p"),
        ),
        Mistake(
            "what is kept is not divided by its sum: it is to be a distribution again",
            partial(distribution_by, fault="unnormalised"),
        ),
        Mistake(
            "the least likely tokens are kept: sort with descending=True",
            partial(distribution_by, fault="ascending"),
        ),
        Mistake(
            "one token too many is kept by top_k",
            partial(distribution_by, fault="one more"),
        ),
        Mistake("top_k is left out", partial(distribution_by, fault="no top-k")),
        Mistake("top_p is left out", partial(distribution_by, fault="no top-p")),
        Mistake(
            "top_p counts shares of all tokens: it counts shares of what top_k has left",
            partial(distribution_by, fault="nucleus of all"),
        ),
        Mistake(
            "top_p counts probabilities before the temperature: the temperature comes first",
            partial(distribution_by, fault="unscaled nucleus"),
        ),
        Mistake(
            "a small temperature makes exp overflow: take the maximum away first",
            unguarded_distribution,
        ),
    ],
)


# 9. cache

CONFIG = ModelConfig(n_head=2, d_model=8, positions="rotary")
Step = Callable[[Tensor, CausalSelfAttention, Callable, object], tuple[Tensor, object]]


def rotation_of(positions: Tensor) -> Rotation:
    return RotaryPositions(CONFIG).rotation(positions)


def read_in_pieces(function: Step, pieces: list[int], count: bool = False) -> Tensor:
    """Outputs of a layer that reads a text piece by piece; or how many tokens passed through its
    keys' projection.
    """
    layer = CausalSelfAttention(CONFIG, explicit_attention)
    fill(layer)
    seen: list[int] = []
    layer.key.register_forward_hook(lambda module, given, out: seen.append(given[0].shape[1]))
    outputs, past = [], None
    for x_BTD in numbers(2, sum(pieces), 8).split(pieces, dim=1):
        out, past = function(x_BTD, layer, rotation_of, past)
        outputs.append(out)
    return torch.tensor(float(sum(seen))) if count else torch.cat(outputs, dim=1)


def product_step(
    x: Tensor, layer: CausalSelfAttention, rotation_of: Callable, past: KVCache | None
) -> tuple[Tensor, KVCache]:
    """The product's cache around the product's layer."""
    cache = KVCache(len(x), 64) if past is None else past
    positions, mask = cache.place(x[:, :, 0].long(), Mask())
    out = layer(x, mask, rotation_of(positions), partial(cache.write, 0))
    cache.advance()
    return out, cache


Pair = tuple[Tensor, Tensor]


def step_by(
    x: Tensor,
    layer: CausalSelfAttention,
    rotation_of: Callable,
    past: Pair | None,
    fault: str = "",
) -> tuple[Tensor, Pair | None]:
    """One that works, but for its fault."""
    q, k, v = layer.projections(x)
    n_past = 0 if past is None else past[0].shape[2]
    start = 0 if fault == "from 0" else n_past
    here = rotation_of(torch.arange(x.shape[1])[None] + start)
    q = q if fault == "still query" else rotate(q, *here)
    if fault != "still keys":
        k = rotate(k, *here)
    if past is not None and fault != "forgets":
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
    kept = (k, v)
    if fault == "first alone" and past is not None:
        kept = past
    mask = Mask(causal=fault != "no mask")
    weights = attention_weights(q, k, mask)
    if fault == "upper left":
        allowed = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return layer.project((weights @ v).transpose(1, 2).flatten(-2)), kept


def read_anew(
    x: Tensor, layer: CausalSelfAttention, rotation_of: Callable, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    text = x if past is None else torch.cat((past, x), 1)
    out = layer(text, Mask(), rotation_of(torch.arange(text.shape[1])[None]))
    return out[:, -x.shape[1] :], text


def cache_case(words: str, pieces: list[int], hint: str) -> Case:
    return Case(words, lambda f: read_in_pieces(f, pieces), hint)


CACHE = Exercise(
    9,
    "cache",
    "step",
    product_step,
    [
        cache_case("four tokens at once", [4], "without a past this is the layer itself"),
        cache_case(
            "four tokens one by one",
            [1, 1, 1, 1],
            "a query sees the keys and values kept and its own; its position is how many were kept",
        ),
        cache_case(
            "a prompt of three, then one, one and two",
            [3, 1, 1, 2],
            "of several new tokens the first must not see the second: the mask is aligned at the "
            "last key",
        ),
        Case(
            "tokens whose keys were computed, reading three and then four, one by one",
            lambda f: read_in_pieces(f, [3, 1, 1, 1, 1], count=True),
            "each token's key is computed once, when it is new",
        ),
    ],
    [
        Mistake(
            "the positions of new tokens start at 0 again: they start at the number of tokens kept",
            partial(step_by, fault="from 0"),
        ),
        Mistake(
            "the mask is aligned at the first key, so that new queries see the oldest tokens "
            "alone: the last query stands at the last key",
            partial(step_by, fault="upper left"),
        ),
        Mistake(
            "new tokens see those that come after them in the same piece: the mask is causal",
            partial(step_by, fault="no mask"),
        ),
        Mistake(
            "the past is not used: give back all keys and values, and put those kept before the "
            "new ones",
            partial(step_by, fault="forgets"),
        ),
        Mistake(
            "only the first piece is kept: what is given back has the new keys and values too",
            partial(step_by, fault="first alone"),
        ),
        Mistake("the keys are not turned", partial(step_by, fault="still keys")),
        Mistake("the queries are not turned", partial(step_by, fault="still query")),
        Mistake(
            "the outputs are right, but the whole text is read anew at each step: keep keys and "
            "values, and compute those of new tokens only",
            read_anew,
        ),
    ],
)


# 10. schedule


def product_rate(step: int, lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """The product's, with the cosine."""
    optim = OptimConfig(
        lr=lr, min_lr=min_lr, warmup_steps=warmup_steps, max_steps=max_steps, schedule="cosine"
    )
    return learning_rate(step, optim)


def rate_by(
    step: int, lr: float, min_lr: float, warmup_steps: int, max_steps: int, fault: str = ""
) -> float:
    """One that works, but for its fault."""
    if step < warmup_steps and fault != "no warm-up":
        if fault == "from 0":
            return lr * step / warmup_steps
        return lr * (step + 1) / (warmup_steps + (fault != "too early"))
    start = 0 if fault in ("whole run", "no warm-up") else warmup_steps
    end = max_steps - 1 if fault == "last step" else max_steps
    done = (step - start) / max(1, end - start)
    done = done if fault == "swings" else min(1.0, done)
    share = 1 - done if fault == "line" else 0.5 * (1 + math.cos(math.pi * done))
    if fault == "whole cosine":
        share = math.cos(math.pi * done)
    if fault == "to 0":
        return share * lr
    if fault == "on top":
        return min_lr + share * lr
    if fault == "floor":
        return max(min_lr, share * lr)
    return min_lr + share * (lr - min_lr)


def rate_case(words: str, settings: tuple[float, float, int, int], hint: str, steps: range) -> Case:
    lr, min_lr, warmup, end = settings
    told = f"{words}: lr {lr:g}, min_lr {min_lr:g}, warmup_steps {warmup}, max_steps {end}"

    def run(function: Callable) -> Tensor | None:
        rates = [function(step, lr, min_lr, warmup, end) for step in steps]
        return None if None in rates else torch.tensor([float(rate) for rate in rates])

    return Case(told, run, hint)


SCHEDULE = Exercise(
    10,
    "schedule",
    "learning_rate",
    product_rate,
    [
        rate_case(
            "steps 0 to 3, a warm-up",
            (1.0, 0.2, 4, 12),
            "step s of the warm-up has lr (s + 1) / (warmup_steps + 1)",
            range(4),
        ),
        rate_case(
            "steps 4 to 11, the fall",
            (1.0, 0.2, 4, 12),
            "min_lr + (lr - min_lr) (1 + cos(pi done)) / 2, done being 0 where the warm-up ends",
            range(4, 12),
        ),
        rate_case(
            "steps 0 to 4, no warm-up", (1.0, 0.0, 0, 4), "step 0 then has the rate lr", range(5)
        ),
        rate_case(
            "steps 12 to 20, behind the last",
            (1.0, 0.2, 4, 12),
            "the rate stays at min_lr: done is at most 1",
            range(12, 21),
        ),
    ],
    [
        Mistake(
            "the warm-up starts at 0, so that the first update does nothing: step s has "
            "lr (s + 1) / (warmup_steps + 1)",
            partial(rate_by, fault="from 0"),
        ),
        Mistake(
            "the warm-up reaches lr one step early: step s has lr (s + 1) / (warmup_steps + 1), "
            "and step warmup_steps has lr itself",
            partial(rate_by, fault="too early"),
        ),
        Mistake("the warm-up is left out", partial(rate_by, fault="no warm-up")),
        Mistake(
            "the cosine runs over the whole run: it starts where the warm-up ends, done = "
            "(step - warmup_steps) / (max_steps - warmup_steps)",
            partial(rate_by, fault="whole run"),
        ),
        Mistake(
            "the rate falls to 0: it falls to min_lr, min_lr + share (lr - min_lr)",
            partial(rate_by, fault="to 0"),
        ),
        Mistake(
            "min_lr is added to the whole fall, so that the rate starts above lr: min_lr + share "
            "(lr - min_lr)",
            partial(rate_by, fault="on top"),
        ),
        Mistake(
            "the curve falls to 0 and is cut off at min_lr: it is to reach min_lr at max_steps, "
            "min_lr + share (lr - min_lr)",
            partial(rate_by, fault="floor"),
        ),
        Mistake(
            "it falls on a line: here along half a cosine, share = (1 + cos(pi done)) / 2",
            partial(rate_by, fault="line"),
        ),
        Mistake(
            "share is the cosine itself, which goes down to -1: share = (1 + cos(pi done)) / 2",
            partial(rate_by, fault="whole cosine"),
        ),
        Mistake(
            "behind the last step the cosine rises again: done is at most 1",
            partial(rate_by, fault="swings"),
        ),
        Mistake(
            "min_lr is reached one step early: the update behind the last, max_steps, has it",
            partial(rate_by, fault="last step"),
        ),
    ],
)

EXERCISES = [BLOCK, LOSS, SAMPLER, CACHE, SCHEDULE]
