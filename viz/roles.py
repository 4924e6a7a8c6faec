"""What a head does, measured: how much of its weight falls where a named role would put it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from unicodedata import category

import numpy as np
import torch
from torch import Tensor

from model.gpt import GPT
from viz.maps import AttentionMaps
from viz.record import record_attention

LOCAL = 8
"""Tokens of the local window, the query's own included."""
THRESHOLD = 0.4
"""Share of the way from uniform attention to a perfect head from which a head is called by a role;
a convention of ours.
"""
ROLES = {
    "previous": "the token just before (Voita et al. 2019, a positional head)",
    "first": "the first token, where a head rests that finds nothing to do: a sink "
    "(Xiao et al. 2023)",
    "self": "the token itself",
    "same": "earlier occurrences of the same token (Wang et al. 2022, a duplicate-token head)",
    "induction": "what followed the same token earlier, on random tokens said twice "
    "(Olsson et al. 2022)",
    "punctuation": "punctuation marks and newlines (Clark et al. 2019)",
    "local": f"the last {LOCAL} tokens, itself included",
}
"""Role -> where such a head looks. Voita et al., "Analyzing Multi-Head Self-Attention"; Xiao et
al., "Efficient Streaming Language Models with Attention Sinks"; Wang et al., "Interpretability in
the Wild"; Olsson et al., "In-context Learning and Induction Heads"; Clark et al., "What Does BERT
Look At?"."""


@dataclass(frozen=True)
class HeadRoles:
    """Measurements of L layers of H heads."""

    scores: np.ndarray
    """(L, H, roles) mean weight on each role's targets, in the order of ROLES; NaN where the text
    has none.
    """
    uniform: np.ndarray
    """(roles,) what a head that looks at all it may look at equally would score."""
    entropy: np.ndarray
    """(L, H) mean entropy of a row, in bits."""
    profile: np.ndarray
    """(L, H, T) mean weight at each distance, over the queries that can look so far back."""

    def names(self) -> np.ndarray:
        """(L, H) the role each head is called by, "mixed" where none fits."""
        return name_roles(self.scores, self.uniform)


def role_targets(tokens: Sequence[int], pieces: Sequence[bytes]) -> dict[str, np.ndarray]:
    """For each role, boolean (T, T): whether a head of that role would look from query t at key s.
    Sources are at ROLES.

    induction at s: the token before s is the same as t's, and s lies before t; Olsson et al.'s
    prefix matching.
    """
    ids, n_token = np.asarray(tokens), len(tokens)
    distance = np.arange(n_token)[:, None] - np.arange(n_token)
    same = ids[:, None] == ids
    follows = np.zeros_like(same)
    follows[:, 1:] = same[:, :-1]
    return {
        "previous": distance == 1,
        "first": np.broadcast_to(np.arange(n_token) == 0, same.shape),
        "self": distance == 0,
        "same": same & (distance > 0),
        "induction": follows & (distance > 0),
        "punctuation": np.broadcast_to([_is_mark(piece) for piece in pieces], same.shape),
        "local": (distance >= 0) & (distance < LOCAL),
    }


def _is_mark(piece: bytes) -> bool:
    """Whether a token is nothing but punctuation, symbols and newlines (spaces aside)."""
    text = piece.decode("utf-8", "replace").replace(" ", "")
    return bool(text) and all((category(c)[0] in "PS" and c != "\ufffd") or c == "\n" for c in text)


def target_weight(
    weights_HTS: np.ndarray, target_TS: np.ndarray, allowed_TS: np.ndarray
) -> tuple[np.ndarray, float]:
    """Mean over queries of the weight on their targets, (H,), and what uniform attention would
    score.

    Queries count that have a target and may also look elsewhere: the others say nothing about the
    head. NaN where there are none.
    """
    target = target_TS & allowed_TS
    n_target, n_allowed = target.sum(-1), allowed_TS.sum(-1)
    rows = (n_target > 0) & (n_target < n_allowed)
    if not rows.any():
        return np.full(len(weights_HTS), np.nan), float("nan")
    return (weights_HTS * target).sum(-1)[:, rows].mean(-1), float(
        (n_target / np.maximum(n_allowed, 1))[rows].mean()
    )


def mean_entropy(weights_HTS: np.ndarray) -> np.ndarray:
    """(H,) mean over queries of -sum w log2 w, in bits: 0 looks at one token, b bits as if evenly
    at 2^b.
    """
    return -(weights_HTS * np.log2(np.where(weights_HTS > 0, weights_HTS, 1))).sum(-1).mean(-1)


def distance_profile(weights_HTS: np.ndarray) -> np.ndarray:
    """(H, T) mean weight on the token d back, over the queries that have one, for d = 0 ... T -
    1.
    """
    return np.stack(
        [np.diagonal(weights_HTS, -d, 1, 2).mean(-1) for d in range(weights_HTS.shape[-1])], axis=-1
    )


def induction_scores(model: GPT, n_row: int = 4) -> tuple[np.ndarray, float]:
    """(L, H) induction scores on `n_row` rows of random tokens said twice, and the uniform
    baseline.

    A row is R R, R of up to 32 tokens, all different where the vocabulary allows: the second time,
    what comes next can be known only by looking back (Olsson et al. 2022, "prefix matching score").
    Draws from a generator of its own.
    """
    random, half = np.random.default_rng(0), max(1, min(32, model.config.context_length // 2))
    once = [
        random.choice(model.vocab_size, half, replace=model.vocab_size < half) for _ in range(n_row)
    ]
    rows = [np.tile(row, 2)[: model.config.context_length] for row in once]
    with torch.no_grad(), record_attention(model) as record:
        model(torch.from_numpy(np.stack(rows)).to(model.embed.weight.device))
    position = np.arange(len(rows[0]))
    distance = position[:, None] - position
    target = (distance == half - 1) & (distance > 0) & (position[:, None] >= half)
    allowed = record[0].mask.allowed(*distance.shape)[0, 0].numpy()
    measured = [
        target_weight(layer.weights().mean(0).cpu().numpy(), target, allowed) for layer in record
    ]
    return np.stack([scores for scores, _ in measured]), measured[0][1]


def measure_roles(
    maps: AttentionMaps, induction: tuple[np.ndarray, float] | None = None
) -> HeadRoles:
    """Roles of the heads in `maps`, on its text; `induction` is what `induction_scores` found for
    the model (NaN without it).
    """
    targets, allowed = role_targets(maps.tokens, maps.pieces), maps.allowed()
    scores = np.full((len(maps.layers), len(maps.heads), len(ROLES)), np.nan)
    uniform, entropy, profile = np.full(len(ROLES), np.nan), [], []
    for i, layer in enumerate(maps.layers):
        weights = maps.weights(layer)
        for j, role in enumerate(ROLES):
            if role != "induction":
                scores[i, :, j], uniform[j] = target_weight(weights, targets[role], allowed)
            elif induction is not None:
                scores[i, :, j], uniform[j] = induction[0][layer, maps.heads], induction[1]
        entropy.append(mean_entropy(weights))
        profile.append(distance_profile(weights))
    return HeadRoles(scores, uniform, np.stack(entropy), np.stack(profile))


def check_finite(roles: HeadRoles) -> None:
    """Raise FloatingPointError where a head's measurements are no numbers, though there was
    something to measure.
    """
    measured = roles.scores[..., ~np.isnan(roles.uniform)]
    if not (np.isfinite(measured).all() and np.isfinite(roles.entropy).all()):
        raise FloatingPointError("the model's attention is not finite")


def excess(scores: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """How far scores (..., roles) lie from uniform attention (0) towards a perfect head (1); NaN
    counts as 0.
    """
    return np.nan_to_num((scores - uniform) / (1 - uniform))


def name_roles(scores: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """The role of each head (...,): the one it is farthest in, from THRESHOLD up; "local" if no
    narrower fits; else "mixed".
    """
    roles, share = list(ROLES), excess(scores, uniform)
    narrow = share[..., :-1].argmax(-1)
    names = np.where(share[..., -1] >= THRESHOLD, "local", "mixed")
    return np.where(share[..., :-1].max(-1) >= THRESHOLD, np.array(roles)[narrow], names)


@contextmanager
def ablate_heads(model: GPT, heads: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Within the block each (layer, head) puts out zeros; the others go on (Michel et al. 2019,
    "Are Sixteen Heads Really Better than One?", section 2). Raises ValueError for a head that isn't
    there."""

    def silence(head: int):
        def before_project(_, inputs: tuple[Tensor]) -> Tensor:
            out_BTD = inputs[0].clone()
            out_BTD.unflatten(-1, (model.config.n_head, -1))[..., head, :] = 0
            return out_BTD

        return before_project

    hooks = []
    try:
        for layer, head in heads:
            if not (0 <= layer < model.config.n_layer and 0 <= head < model.config.n_head):
                last = f"{model.config.n_layer - 1}.{model.config.n_head - 1}"
                raise ValueError(
                    f"there is no head {layer}.{head}; "
                    f"layers and heads are counted from 0, the last is {last}"
                )
            hooks.append(
                model.blocks[layer].attention.project.register_forward_pre_hook(silence(head))
            )
        yield
    finally:
        for hook in hooks:
            hook.remove()


def report(roles: HeadRoles, layers: Sequence[int], heads: Sequence[int]) -> dict:
    """The measurements as plain containers for JSON, a dictionary a head; NaN becomes None."""

    def plain(values: np.ndarray) -> list:
        return [None if np.isnan(value) else round(float(value), 6) for value in values]

    measured, names = [], roles.names()
    for (i, layer), (j, head) in product(enumerate(layers), enumerate(heads)):
        scores = dict(zip(ROLES, plain(roles.scores[i, j]), strict=True))
        measured.append({"layer": layer, "head": head, "role": str(names[i, j]), "scores": scores})
        measured[-1] |= {
            "entropy_bits": plain(roles.entropy[i, j : j + 1])[0],
            "distance_profile": plain(roles.profile[i, j]),
        }
    return {
        "roles": ROLES,
        "uniform": dict(zip(ROLES, plain(roles.uniform), strict=True)),
        "heads": measured,
    }
