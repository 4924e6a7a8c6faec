"""Exercise 2, mask: see 02_mask.md. Check with `make exercise N=2`."""

import torch  # noqa: F401
from torch import Tensor


def allowed(n_query: int, n_key: int, window: int) -> Tensor:
    """Boolean (n_query, n_key), True where query t may look at key s; a window of 0 is none."""
    raise NotImplementedError
