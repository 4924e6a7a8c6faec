"""Prepared tokens, and the batches of a run: a pure function of (seed, step), so there is no loader
and no state to save.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from errors import UserError

FORMAT = 1
"""Version of dataset.json that this code reads."""


class Dataset:
    """A folder written by `data.prepare`: the splits "train" and "val" as memory-mapped token
    arrays, and dataset.json.

    Raises UserError where the folder is missing, incomplete or of another format.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.info = json.loads((self.folder / "dataset.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.folder} holds no prepared data ({error}); prepare it with `python -m data.prepare`"
            ) from None
        found = self.info.get("format") if isinstance(self.info, dict) else None
        if found != FORMAT:
            raise UserError(
                f"{self.folder} is in format {found}, this version reads {FORMAT}: prepare it again with --overwrite"
            )
        self.tokens = {split: self._map(split) for split in ("train", "val")}
        self.tokenizer_spec = self.info["tokenizer"]

    def _map(self, split: str) -> np.ndarray:
        path, expected = self.folder / f"{split}.bin", self.info["splits"][split]["tokens"]
        dtype = np.dtype(self.info["dtype"]).newbyteorder("<")
        size = path.stat().st_size if path.exists() else 0
        if size != expected * dtype.itemsize:
            wanted = expected * dtype.itemsize
            raise UserError(
                f"{path} has {size:,} bytes, dataset.json says {wanted:,}: prepare it again with --overwrite"
            )
        return np.memmap(path, dtype=dtype, mode="r")

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer and both splits: the same data, wherever it lies."""
        parts = [
            self.tokenizer_spec,
            self.info["splits"]["train"]["sha256"],
            self.info["splits"]["val"]["sha256"],
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text a token of the split stands for, on average."""
        return self.info["splits"][split]["bytes"] / self.info["splits"][split]["tokens"]


def n_windows(n_token: int, context_length: int) -> int:
    """Windows of an epoch: as many, less one to leave room for the offset, as fit side by side; a
    text of one window has one.
    """
    return max(1, n_token // context_length - 1)


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n_token: int, context_length: int) -> tuple[int, np.ndarray]:
    """The offset of the epoch's first window and the order in which its windows are visited."""
    random = np.random.default_rng([seed, epoch])
    windows = n_windows(n_token, context_length)
    slack = (
        n_token - 1 - windows * context_length
    )  # the windows may start this far in and still end within the text
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

    An epoch visits non-overlapping windows, each once, from a seeded offset and in a seeded order;
    the batches of all steps run through the epochs end to end. What a process takes is a slice of
    the global batch, so the batch does not depend on how many share it.
    """
    first = step * batch_size
    windows = n_windows(len(tokens), context_length)
    inputs = np.empty((len(rows or range(batch_size)), context_length + 1), dtype=np.int64)
    for line, row in enumerate(rows or range(batch_size)):
        epoch, index = divmod(first + row, windows)
        offset, order = _epoch(seed, epoch, len(tokens), context_length)
        start = offset + int(order[index]) * context_length
        inputs[line] = tokens[start : start + context_length + 1]
    batch = torch.from_numpy(inputs)
    return batch[:, :-1], batch[:, 1:]


def split_windows(tokens: np.ndarray, context_length: int) -> list[tuple[int, int]]:
    """(start, end) of consecutive windows that predict each token of a split, but the first,
    exactly once; the last may be short.

    Window inputs are tokens[start:end], its targets tokens[start + 1 : end + 1].
    """
    return [
        (start, min(start + context_length, len(tokens) - 1))
        for start in range(0, len(tokens) - 1, context_length)
    ]
