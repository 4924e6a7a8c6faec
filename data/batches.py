"""The batches of a run: a pure function of (seed, step), so there is no loader and no state to
save.

The tokens of a split are one long array. A window is `context_length` of them and the one that
follows: its inputs are all but the last, its targets all but the first.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def n_windows(n_token: int, context_length: int) -> int:
    """Windows of an epoch: as many as fit side by side, less one to leave room for the offset; a
    text of one window has one.
    """
    return max(1, n_token // context_length - 1)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n_token: int, context_length: int) -> tuple[int, np.ndarray]:
    """The offset of the epoch's first window and the order in which its windows are visited."""
    random = np.random.default_rng([seed, epoch])
    windows = n_windows(n_token, context_length)
    slack = n_token - 1 - windows * context_length  # room behind the last window
    return int(random.integers(slack + 1)), random.permutation(windows)


def training_batch(
    tokens: np.ndarray,
    context_length: int,
    batch_size: int,
    seed: int,
    step: int,
    rows: range | None = None,
) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one update, int64 (rows, context_length): the `rows` (default all) of
    the global batch of `step`.

    An epoch visits non-overlapping windows, each once, from a seeded offset and in a seeded order.
    The batches of all steps run through the epochs end to end. What a process takes is a slice of
    the global batch, so the batch does not depend on how many share it.
    """
    rows = rows or range(batch_size)
    windows = n_windows(len(tokens), context_length)
    texts = np.empty((len(rows), context_length + 1), dtype=np.int64)
    for line, row in enumerate(rows):
        epoch, index = divmod(step * batch_size + row, windows)
        offset, order = _epoch(seed, epoch, len(tokens), context_length)
        start = offset + int(order[index]) * context_length
        texts[line] = tokens[start : start + context_length + 1]
    batch = torch.from_numpy(texts)
    return batch[:, :-1], batch[:, 1:]


def split_windows(tokens: np.ndarray, context_length: int) -> list[tuple[int, int]]:
    """(start, end) of consecutive windows that predict each token of a split, but the first,
    exactly once; the last may be short.

    Window inputs are tokens[start:end], its targets tokens[start + 1 : end + 1].
    """
    last = len(tokens) - 1
    starts = range(0, last, context_length)
    return [(start, min(start + context_length, last)) for start in starts]


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """A seed for the dropout of one micro-batch: a function of the run's seed, the step and the
    micro-batch's number in the global batch.
    """
    sequence = np.random.SeedSequence([seed, step, micro_batch])
    return int(sequence.generate_state(1, np.uint64)[0])
