"""Autoregressive sampling: draw a token, append it, go on."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.attention import KVCache, softmax
from model.gpt import GPT

Generators = Sequence[torch.Generator] | None


def next_token(
    logits_BV: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generators: Generators = None,
) -> list[int]:
    """Draw one token per row, each from its own (CPU) generator, or from torch's where none is
    given.

    `temperature` divides the logits; at 0 the most likely token is taken. `top_k` keeps the k most
    likely (0: all). `top_p` keeps the fewest most likely whose probabilities reach p, at least one
    ("nucleus", Holtzman et al. 2020). What is left is drawn in proportion: the first token at which
    the running sum passes a uniform number.
    """
    if temperature == 0:
        return logits_BV.argmax(dim=-1).tolist()
    logits_BV = logits_BV.cpu().double()
    highest = logits_BV.amax(dim=-1, keepdim=True)
    probabilities_BV = softmax(
        (logits_BV - highest) / temperature
    )  # no overflow however small the temperature
    if top_k or top_p < 1:
        n_token = probabilities_BV.shape[-1]
        kept, order = probabilities_BV.topk(
            min(top_k or n_token, n_token), dim=-1
        )  # (B, k), the most likely first
        before = kept.cumsum(dim=-1) - kept
        before[:, 0] = -1.0  # the most likely stays
        kept = kept.masked_fill(before >= top_p * kept.sum(dim=-1, keepdim=True), 0.0)
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(-1, order, kept)
    running_BV = probabilities_BV.cumsum(dim=-1)
    each = zip(logits_BV, generators or [None] * len(logits_BV), strict=True)
    uniform = torch.stack(
        [torch.rand(1, generator=generator, dtype=torch.float64) for _, generator in each]
    )
    return (running_BV > uniform * running_BV[:, -1:]).int().argmax(dim=-1).tolist()


def _read(model: GPT, rows: list[list[int]], cache: KVCache | None = None) -> Tensor:
    """logits_BV behind the last token of each row; rows are read behind what the cache holds,
    padded at the right.
    """
    device = model.embed.weight.device
    lengths = [len(row) for row in rows]
    tokens_BT = torch.tensor([row + [0] * (max(lengths) - len(row)) for row in rows], device=device)
    totals = [
        length + read
        for length, read in zip(lengths, cache.lengths if cache else [0] * len(rows), strict=True)
    ]
    mask = model.mask(torch.tensor(totals, device=device) if len(set(totals)) > 1 else None)
    features_BTD = model.features(tokens_BT, mask, cache)
    if min(lengths) == max(lengths):
        return model.unembed(features_BTD[:, -1])
    return model.unembed(
        features_BTD[
            torch.arange(len(rows), device=device), torch.tensor(lengths, device=device) - 1
        ]
    )


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    use_cache: bool = True,
    **drawing: float | Generators,
) -> Iterator[list[int]]:
    """Continue each prompt (one token at least): yields every row's new token, `max_new_tokens`
    times; `model` is in eval mode.

    A row that has outgrown the context keeps its last `context_length // 2` tokens, reads them anew
    from position 0 and goes on. That is what it is conditioned on, whatever the kind of positions,
    with the cache or without. Rows do not touch each other. `drawing` is what `next_token` takes
    beside the logits.
    """
    limit, keep = model.config.context_length, max(1, model.config.context_length // 2)
    rows = [list(prompt) for prompt in prompts]
    cache = KVCache(len(rows), limit)
    for _ in range(max_new_tokens):
        for index, row in enumerate(rows):
            if len(row) > limit:
                del row[:-keep]
                cache.lengths[index] = 0
        unread = [index for index, row in enumerate(rows) if cache.lengths[index] != len(row) - 1]
        if not use_cache:
            logits_BV = _read(model, rows)
        elif len(unread) == len(rows):
            logits_BV = _read(model, rows, cache)
        else:
            logits_BV = _read(model, [row[-1:] for row in rows], cache)
            if unread:  # their line above is void: read them whole, and let that take its place
                part = KVCache(len(unread), limit)
                logits_BV[unread] = _read(model, [rows[index] for index in unread], part)
                cache.replace(unread, part)
        tokens = next_token(logits_BV, **drawing)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
        yield tokens
