"""The attention of one text: what every head was given, from which scores, weights and every number
shown are computed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from model.attention import Mask, attention_scores, softmax
from model.gpt import GPT
from viz.labels import label
from viz.record import LayerRecord, record_attention

N_PREDICTION = 5
Decode = Callable[[Iterable[int]], bytes]
"""Bytes of some token ids, as a tokenizer's `decode_bytes`."""


@dataclass(frozen=True)
class AttentionMaps:
    """Queries, keys and values of T tokens as they met in the heads of some layers.

    Layers and heads are counted from 0, as in the papers. `viz.notebook` has maps that show
    themselves as the page.
    """

    q: np.ndarray
    """(L, H, T, K) float32, normed and rotated where the model does so; likewise k and v."""
    k: np.ndarray
    v: np.ndarray
    causal: bool
    window: int
    """Positions a query may look back on, itself included; 0: all of them."""
    tokens: list[int]
    pieces: list[bytes]
    """The bytes of each token, which may be half a character."""
    layers: list[int]
    """The numbers of the L layers and H heads kept."""
    heads: list[int]
    whole: bool = True
    """Whether these are all layers and heads of the model."""
    predictions: list[list[tuple[bytes, float]]] = field(default_factory=list)
    """What the model held most likely to follow each token, most likely first: bytes and
    probability.
    """
    losses: list[float] = field(default_factory=list)
    """-ln probability of the token that did follow, in nats; T - 1 of them."""

    @classmethod
    def from_record(
        cls,
        record: Sequence[LayerRecord],
        tokens: Sequence[int] | Tensor,
        labels: Sequence[str | bytes] | None = None,
        logits: Tensor | None = None,
        decode: Decode | None = None,
        row: int = 0,
    ) -> Self:
        """Maps of one row of what `record_attention` kept during one forward over `tokens`, (T,) or
        (B, T).

        `labels` are the tokens' texts or bytes; without them `decode` gives them, else the ids are
        shown. `logits` (B, T, V) add predictions and losses. Padding is left out. Raises ValueError
        where the record isn't one whole forward over these tokens.
        """
        if not record or any(layer.q.shape[-2] != layer.k.shape[-2] for layer in record):
            raise ValueError("maps are made from the record of one whole forward, without a cache")
        mask = record[0].mask
        n_token = record[0].q.shape[-2] if mask.lengths is None else int(mask.lengths[row])
        ids = torch.as_tensor(tokens)
        ids = (ids[row] if ids.ndim == 2 else ids).tolist()[:n_token]
        if decode is None:
            decode = _ids_as_text
        if labels is None:
            labels = [decode([i]) for i in ids]
        pieces = [x if isinstance(x, bytes) else x.encode() for x in labels][:n_token]
        if len(ids) != n_token or len(pieces) != n_token:
            raise ValueError(
                f"{n_token} tokens were recorded; given were {len(ids)} tokens "
                f"and {len(pieces)} labels"
            )

        def stack(name: str) -> np.ndarray:
            layers = [getattr(layer, name)[row, :, :n_token] for layer in record]
            return torch.stack(layers).float().cpu().numpy()

        predictions = []
        losses = []
        if logits is not None:
            predictions, losses = _predictions(logits[row, :n_token], ids, decode)
        q = stack("q")
        return cls(
            q=q,
            k=stack("k"),
            v=stack("v"),
            causal=mask.causal,
            window=mask.window,
            tokens=ids,
            pieces=pieces,
            layers=list(range(q.shape[0])),
            heads=list(range(q.shape[1])),
            predictions=predictions,
            losses=losses,
        )

    def select(self, layers: Sequence[int] = (), heads: Sequence[int] = ()) -> Self:
        """The maps of some layers and heads, by number; none given: all. Raises ValueError for a
        number that isn't there.
        """
        layers = list(layers or self.layers)
        heads = list(heads or self.heads)
        for name, wanted, found in (("layer", layers, self.layers), ("head", heads, self.heads)):
            if missing := sorted(set(wanted) - set(found)):
                raise ValueError(
                    f"there is no {name} {missing[0]}; "
                    f"{name}s are counted from 0 and end at {found[-1]}"
                )
        pick = np.ix_([self.layers.index(i) for i in layers], [self.heads.index(i) for i in heads])
        return replace(
            self,
            q=self.q[pick],
            k=self.k[pick],
            v=self.v[pick],
            layers=layers,
            heads=heads,
            whole=self.whole and layers == self.layers and heads == self.heads,
        )

    @property
    def labels(self) -> list[str]:
        """A printable label for each token."""
        return [label(piece) for piece in self.pieces]

    def allowed(self) -> np.ndarray:
        """Boolean (T, T): whether query t may look at key s."""
        n_token = len(self.tokens)
        return Mask(self.causal, self.window).allowed(n_token, n_token)[0, 0].numpy()

    def scores(self, layer: int) -> np.ndarray:
        """Scores before the softmax of the heads kept of a layer, (H, T, T), with -inf where a
        query may not look.
        """
        index = self.layers.index(layer)
        q = torch.from_numpy(self.q[index][None])
        k = torch.from_numpy(self.k[index][None])
        return attention_scores(q, k, Mask(self.causal, self.window))[0].numpy()

    def weights(self, layer: int) -> np.ndarray:
        """Weights after the softmax of the heads kept of a layer, (H, T, T)."""
        return softmax(torch.from_numpy(self.scores(layer))).numpy()

    def bertviz(self) -> tuple[list[Tensor], list[str]]:
        """Weights as bertviz's head_view and model_view take them, a (1, H, T, T) tensor a layer,
        and the tokens' labels.
        """
        return [torch.from_numpy(self.weights(layer))[None] for layer in self.layers], self.labels


def _ids_as_text(ids: Iterable[int]) -> bytes:
    """Stands in for a tokenizer's `decode_bytes` where there is none."""
    return " ".join(map(str, ids)).encode()


def _predictions(
    logits_TV: Tensor, ids: list[int], decode: Decode
) -> tuple[list[list[tuple[bytes, float]]], list[float]]:
    """The most likely next tokens at each position with their probabilities, and the loss of the
    true one at all but the last.
    """
    log_p_TV = torch.log_softmax(logits_TV.detach().float().cpu(), dim=-1)
    top = log_p_TV.exp().topk(min(N_PREDICTION, log_p_TV.shape[-1]), dim=-1)
    predictions = []
    for likeliest, probabilities in zip(top.indices.tolist(), top.values.tolist(), strict=True):
        pieces = [decode([i]) for i in likeliest]
        predictions.append(list(zip(pieces, probabilities, strict=True)))
    losses = [-log_p_TV[t, i].item() for t, i in enumerate(ids[1:])]
    return predictions, losses


@torch.no_grad()
def read_text(
    model: GPT,
    tokens: Sequence[int],
    decode: Decode,
    kind: type[AttentionMaps] = AttentionMaps,
    must_be_finite: bool = False,
) -> AttentionMaps:
    """Run `model` (in eval mode) over one text of token ids and keep its attention and predictions,
    as maps of the `kind` given.

    With `must_be_finite` raises FloatingPointError for logits that are no finite numbers; else they
    are shown as they are, as in a run that has lost its way.
    """
    with record_attention(model) as record:
        logits = model(torch.tensor([list(tokens)], device=model.embed.weight.device))
    if must_be_finite and not logits.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    return kind.from_record(record, list(tokens), logits=logits, decode=decode)
