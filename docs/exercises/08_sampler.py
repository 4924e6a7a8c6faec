"""Exercise 8, sampler: see 08_sampler.md. Check with `make exercise N=8`."""

import torch  # noqa: F401
from torch import Tensor


def next_distribution(logits_BV: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """probabilities_BV: temperature, then top-k, then top-p; rows sum to 1."""
    raise NotImplementedError
