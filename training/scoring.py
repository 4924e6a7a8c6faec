"""How well a model foretells a text: a loss for each token, and what two models differ by."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from model.gpt import GPT
from model.transfer import on_device

PIECE_BYTES = 1024
"""Bytes of a piece of text, at least, over which the losses of two models are compared."""
AT_ONCE = 1 << 20
"""Tokens that are turned into text at once."""


def scored_windows(n_token: int, context_length: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, first) of windows of inputs tokens[start:end], of which the targets behind
    `first`, `first` + 1 ... are scored: each token but the text's first once.

    Windows begin `stride` tokens apart. Behind the first window, a scored token has at least
    `context_length - stride` + 1 tokens before it in its window.

    >>> scored_windows(8, 4, 2)
    [(0, 4, 0), (2, 6, 4), (4, 7, 6)]
    """
    windows, first = [], 0
    for start in range(0, n_token - 1, stride):
        end = min(start + context_length, n_token - 1)
        if end > first:
            windows.append((start, end, first))
            first = end
    return windows


@torch.no_grad()
def token_losses(model: GPT, tokens: np.ndarray, stride: int, batch_size: int) -> np.ndarray:
    """-log p of each token but the first given those before it in its window, nats, float64
    (n_token - 1,). `model` is in eval mode; `batch_size` windows are read at once.
    """
    device = next(model.parameters()).device
    windows = scored_windows(len(tokens), model.config.context_length, stride)
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    if len({end - start for start, end, _ in batches[-1]}) > 1:  # the last may be short
        batches[-1:] = [batches[-1][:-1], batches[-1][-1:]]
    losses = np.empty(len(tokens) - 1)
    for batch in batches:
        rows = np.stack([tokens[start : end + 1] for start, end, _ in batch]).astype(np.int64)
        both = on_device(torch.from_numpy(rows), device)
        found = _losses(model(both[:, :-1]), both[:, 1:]).cpu().double().numpy()
        for (start, end, first), row in zip(batch, found, strict=True):
            losses[first:end] = row[first - start :]
    return losses


def _losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """losses_BT, float32."""
    log_p = torch.log_softmax(logits_BTV.float(), dim=-1)
    return -log_p.gather(-1, targets_BT[..., None])[..., 0]


def first_bytes(tokenizer: Tokenizer, tokens: np.ndarray, n_byte: int) -> np.ndarray:
    """Where in a text of `n_byte` bytes each of its tokens begins, (n_token,) int64.

    The tokens of some tokenizers do not add up to the text: SentencePiece's put a space in front,
    and what they don't know is no text. The places are then stretched to fit.
    """
    ends = np.cumsum(tokenizer.byte_lengths()[tokens])
    begins = np.concatenate([[0], ends[:-1]])
    if ends[-1] != n_byte:
        begins = (begins * (n_byte / max(1, int(ends[-1])))).astype(np.int64)
    return np.minimum(begins, n_byte - 1)


def bits_of_pieces(losses: np.ndarray, begins: np.ndarray, n_byte: int) -> np.ndarray:
    """The bits that each piece of a text takes: its tokens' losses, each in the piece where the
    token begins. The pieces are equal to a byte, of `PIECE_BYTES` or more where the text has so
    many: a larger one among them would look like a larger difference.

    `begins` is where each token begins, (n_token,); `losses` are of all but the first, in nats.
    """
    n_piece = max(1, n_byte // PIECE_BYTES)
    piece = begins * n_piece // n_byte
    return np.bincount(piece[1:], weights=losses / math.log(2), minlength=n_piece)


def text_digest(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """SHA-256 of the text of these tokens, a part at a time, as a split may be large."""
    digest = hashlib.sha256()
    for first in range(0, len(tokens), AT_ONCE):
        digest.update(tokenizer.decode_bytes(tokens[first : first + AT_ONCE].tolist()))
    return digest.hexdigest()


def paired_difference(
    one: np.ndarray, other: np.ndarray, n_byte: int
) -> tuple[float, float | None]:
    """By how many bits per byte `one` is above `other`, and the standard error of that; both are
    the bits of the same n equal pieces of a text of `n_byte` bytes.

    The difference is sum(d) / n_byte with d = one - other, and its standard error
    sqrt(n var(d)) / n_byte, var with n - 1 below: that of a sum of n independent draws. Pieces of
    one text are not quite independent, so that it is rather too small; it is far smaller than those
    of the two losses, as what is hard for one model is hard for the other. None for fewer than two
    pieces.
    """
    d = one - other
    error = math.sqrt(len(d) * d.var(ddof=1)) / n_byte if len(d) > 1 else None
    return float(d.sum()) / n_byte, error
