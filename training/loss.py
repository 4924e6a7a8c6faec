"""The loss: how surprised the model is by the token that came."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[target] in nats per token, computed in float32: the mean over all
    targets, or with `reduction` "sum" the sum.

    A model that knows nothing gives each of V tokens probability 1/V, and its loss is ln V.
    """
    logits = logits_BTV.flatten(0, -2).float()
    return F.cross_entropy(logits, targets_BT.flatten(), reduction=reduction)
