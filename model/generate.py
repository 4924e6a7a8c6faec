"""Autoregressive sampling: draw a token, append it, go on."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.attention import softmax
from model.cache import KVCache
from model.gpt import GPT
from model.sampling import Sampling
from model.static_decoding import StaticCache, decoding_cache
from model.transfer import on_device, where_drawn

Generators = Sequence[torch.Generator | None]


def next_distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """probabilities_BV from which the next token is drawn, float64, where the logits are; rows sum
    to about 1 before top-k and top-p take their share away.

    `temperature`, above 0, divides the logits. `top_k` keeps the k most likely. `top_p` keeps the
    fewest most likely whose probabilities reach p, at least one ("nucleus", Holtzman et al. 2020).
    """
    logits_BV = logits_BV.double()
    highest = logits_BV.amax(dim=-1, keepdim=True)
    scaled = (logits_BV - highest) / sampling.temperature  # no overflow, however small it is
    probabilities_BV = softmax(scaled)
    n_token = probabilities_BV.shape[-1]
    if sampling.top_k == 0 and sampling.top_p == 1:
        return probabilities_BV
    n_kept = min(sampling.top_k or n_token, n_token)
    kept, order = probabilities_BV.topk(n_kept, dim=-1)  # (B, k), the most likely first
    before = kept.cumsum(dim=-1) - kept
    before[:, 0] = -1.0  # the most likely stays
    kept = kept.masked_fill(before >= sampling.top_p * kept.sum(dim=-1, keepdim=True), 0.0)
    return torch.zeros_like(probabilities_BV).scatter(-1, order, kept)


def next_token(
    logits_BV: Tensor, sampling: Sampling, generators: Generators | None = None
) -> list[int]:
    """Draw one token per row, each from its own (CPU) generator, or from torch's where none is
    given. Raises FloatingPointError for logits that are no finite numbers.

    At temperature 0 the most likely token is taken. Else it is the first at which the running sum
    of probabilities passes a uniform number. Where that is done says `where_drawn`: CUDA sums in
    another order, so a token may differ from the CPU's where the two meet within some 1e-14.
    """
    logits_BV = where_drawn(logits_BV)
    if sampling.temperature == 0:
        drawn = logits_BV.argmax(dim=-1)
    else:
        running_BV = next_distribution(logits_BV, sampling).cumsum(dim=-1)
        each = generators or [None] * len(logits_BV)
        draws = [
            torch.rand(1, generator=generator, dtype=torch.float64)
            for _, generator in zip(logits_BV, each, strict=True)
        ]
        thresholds = on_device(torch.stack(draws), logits_BV.device) * running_BV[:, -1:]
        drawn = (running_BV > thresholds).int().argmax(dim=-1)
    tokens = drawn.where(logits_BV.isfinite().all(dim=-1), -1).tolist()  # all is read in one copy
    if -1 in tokens:
        raise FloatingPointError("the model's logits are not finite")
    return tokens


def _pad(rows: list[list[int]], device: torch.device) -> Tensor:
    """tokens_BT: the rows one under the other, padded at the right."""
    longest = max(map(len, rows))
    return on_device([row + [0] * (longest - len(row)) for row in rows], device)


def _logits(model: GPT, rows: list[list[int]]) -> Tensor:
    """logits_BV behind the last token of each row, everything computed anew."""
    device = model.embed.weight.device
    lengths = [len(row) for row in rows]
    mask = model.mask(lengths if len(set(lengths)) > 1 else None)
    features_BTD = model.features(_pad(rows, device), mask)
    last = on_device(lengths, device) - 1
    return model.unembed(features_BTD[torch.arange(len(rows), device=device), last])


def _logits_with_cache(model: GPT, rows: list[list[int]], cache: KVCache) -> Tensor:
    """The same, where `cache` may hold some of the tokens already: rows that it does not hold but
    for their last token are read first, then all rows take one step.
    """
    device = model.embed.weight.device
    behind = [row for row, tokens in enumerate(rows) if cache.lengths[row] < len(tokens) - 1]
    if behind:
        unread = [rows[row][:-1] for row in behind]
        lengths = [len(tokens) for tokens in unread]
        mask = model.mask(lengths if len(set(lengths)) > 1 else None)
        part = cache if len(behind) == len(rows) else KVCache(len(behind), cache.capacity)
        model.features(_pad(unread, device), mask, part)
        if part is not cache:
            cache.replace(behind, part)
    if isinstance(cache, StaticCache):
        return cache.step(model, rows)
    newest = on_device([tokens[-1:] for tokens in rows], device)
    return model.unembed(model.features(newest, cache=cache)[:, -1])


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generators: Generators | None = None,
    use_cache: bool = True,
) -> Iterator[list[int]]:
    """Continue each prompt (one token at least): yields every row's new token, `max_new_tokens`
    times. `model` is in eval mode.

    A row that has outgrown the context keeps its last `context_length // 2` tokens, reads them anew
    from position 0 and goes on. That is what it is conditioned on, whatever the kind of positions,
    with the cache or without. Rows do not touch each other.
    """
    sampling = sampling or Sampling()
    limit = model.config.context_length
    keep = max(1, limit // 2)
    rows = [list(prompt) for prompt in prompts]
    cache = decoding_cache(model, len(rows), min(limit, max(map(len, rows)) + max_new_tokens))
    for _ in range(max_new_tokens):
        for index, row in enumerate(rows):
            if len(row) > limit:
                del row[:-keep]
                cache.forget(index)
        logits_BV = _logits_with_cache(model, rows, cache) if use_cache else _logits(model, rows)
        tokens = next_token(logits_BV, sampling, generators)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        yield tokens
