"""The key-value cache: what was read once is not computed again.

Keys and values of a token depend on the tokens before it alone, so a model that writes one token
at a time keeps them, and computes queries, keys and values for the new token only.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Mask
from model.transfer import on_device


class KVCache:
    """Keys and values of the tokens already read, one pair of (B, G, capacity, K) tensors a layer,
    and a length per row.

    Each row writes at its own position, so rows of unequal length need no padding on the left. One
    forward is three calls: `place` says where the new tokens stand, each layer's `write` keeps
    their keys and values, `advance` counts them in.
    """

    def __init__(self, n_row: int, capacity: int):
        self.capacity = capacity
        self.lengths = [0] * n_row
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.last_tokens: Tensor | None = None  # (B,), where the model has to know them
        self.ends = self.lengths  # the lengths once the tokens in hand are read
        self.places: Tensor | None = None  # their positions, (B or 1, T)

    def place(self, tokens_BT: Tensor, mask: Mask) -> tuple[Tensor, Mask]:
        """positions_BT of T new tokens a row, behind those held, and the mask over all of them.

        `mask.lengths`, where given, counts all tokens of a row: those held and its new ones. Raises
        ValueError where that is impossible, and where the new tokens do not fit.
        """
        n_new, device = tokens_BT.shape[1], tokens_BT.device
        longest, is_ragged = max(self.lengths), len(set(self.lengths)) > 1
        if longest + n_new > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens a row: "
                f"{n_new} more do not fit behind {longest}"
            )
        if mask.lengths is None and is_ragged:
            mask = replace(mask, lengths=tuple(n + n_new for n in self.lengths))
        self.ends = list(mask.lengths or [length + n_new for length in self.lengths])
        if [max(end - n_new, 0) for end in self.ends] != self.lengths:
            raise ValueError(
                f"rows of {self.lengths} tokens cannot end at {self.ends}: "
                f"{n_new} new ones stand behind a filled cache"
            )
        start = on_device(self.lengths, device)[:, None] if is_ragged else longest
        self.places = torch.arange(n_new, device=device)[None] + start
        return self.places, mask

    def tokens_before(self, tokens_BT: Tensor) -> Tensor:
        """The token before each of the placed ones, (B, T): 0 before a row's first. The last of
        each row are kept for the next call.
        """
        before_BT = F.pad(tokens_BT[:, :-1], (1, 0))
        if self.last_tokens is not None:
            before_BT[:, 0] = self.last_tokens
        n_new = [end - length for end, length in zip(self.ends, self.lengths, strict=True)]
        index = on_device(n_new, tokens_BT.device)[:, None] - 1
        self.last_tokens = tokens_BT.gather(1, index)[:, 0]
        return before_BT

    def write(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Put T new positions behind each row's own; the (B, G, S, K) keys and values up to the end
        of the longest row.

        What lies behind a row's own end is unspecified but finite.
        """
        n_new = k_BGTK.shape[2]
        self.make_layers(layer + 1, k_BGTK)
        first, longest = min(self.lengths), max(self.lengths)
        for store, new in zip(self.layers[layer], (k_BGTK, v_BGTK), strict=True):
            if first == longest:
                store.narrow(2, first, n_new).copy_(new)
            else:
                row = torch.arange(len(self.lengths), device=new.device)[:, None]
                store[row, :, self.places] = new.transpose(1, 2)
        keys, values = self.layers[layer]
        return keys.narrow(2, 0, longest + n_new), values.narrow(2, 0, longest + n_new)

    def advance(self) -> None:
        """Count the placed tokens in, once every layer has written them."""
        self.lengths = self.ends

    def make_layers(self, n_layer: int, like: Tensor) -> None:
        """Have room for `n_layer` layers of keys such as `like`, (B, G, T, K)."""
        _, n_head, _, d_head = like.shape
        while len(self.layers) < n_layer:
            empty = like.new_zeros(len(self.lengths), n_head, self.capacity, d_head)
            self.layers.append((empty, empty.clone()))

    def forget(self, row: int) -> None:
        """Empty a row."""
        self.lengths[row] = 0
        if self.last_tokens is not None:
            self.last_tokens[row] = 0

    def replace(self, rows: list[int], other: "KVCache") -> None:
        """Put the rows of `other`, in order, in the place of the rows named."""
        self.make_layers(len(other.layers), other.layers[0][0])
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for store, new in zip(mine, theirs, strict=True):
                store[rows] = new
        for row, length in zip(rows, other.lengths, strict=True):
            self.lengths[row] = length
        if other.last_tokens is not None:
            if self.last_tokens is None:
                self.last_tokens = other.last_tokens.new_zeros(len(self.lengths))
            self.last_tokens[rows] = other.last_tokens
