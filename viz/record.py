"""Watching a model attend: what every layer's attention is given, from which scores and weights are
computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from model.attention import Attend, CausalSelfAttention, Mask, attention_scores, attention_weights


@dataclass(frozen=True)
class LayerRecord:
    """What one layer's attention was given: q_BHTK, k_BHSK, v_BHSK as they met (normed and
    rotated), and the mask.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask

    def scores(self) -> Tensor:
        """Scores before the softmax, shape (B, H, T, S), -inf where forbidden."""
        return attention_scores(self.q, self.k, self.mask)

    def weights(self) -> Tensor:
        """Weights after the softmax and before dropout, shape (B, H, T, S)."""
        return attention_weights(self.q, self.k, self.mask)


@contextmanager
def record_attention(model: nn.Module) -> Iterator[list[LayerRecord]]:
    """Keep what every attention layer of `model` is given, in the order of the calls, while the
    `with` block runs.

        with record_attention(model) as record:
            model(tokens)
        record[2].weights()  # (B, H, T, S) of the third layer

    Works with either attention, since weights are computed from the queries and keys. Outside the
    block nothing is kept or paid.
    """
    record: list[LayerRecord] = []
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    originals = [layer.attend for layer in layers]

    def recording(attend: Attend) -> Attend:
        def attend_and_record(
            q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float = 0.0
        ) -> Tensor:
            record.append(LayerRecord(q.detach(), k.detach().clone(), v.detach().clone(), mask))
            return attend(q, k, v, mask, dropout)

        return attend_and_record

    try:
        for layer in layers:
            layer.attend = recording(layer.attend)
        yield record
    finally:
        for layer, attend in zip(layers, originals, strict=True):
            layer.attend = attend
