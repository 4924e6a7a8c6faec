"""How well a model foretells a text: a loss for each token, and what two models differ by."""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def scored_windows(
    n_token: int, context_length: int, stride: int
) -> Iterator[tuple[int, int, int]]:
    """(start, end, first) of windows of inputs tokens[start:end], of which the targets behind
    `first`, `first` + 1 ... are scored: each token but the text's first once.

    Windows begin `stride` tokens apart. Behind the first window, a scored token has at least
    `context_length - stride` + 1 tokens before it in its window. The last alone may be short.

    >>> list(scored_windows(8, 4, 2))
    [(0, 4, 0), (2, 6, 4), (4, 7, 6)]
    """
    first = 0
    for start in range(0, n_token - 1, stride):
        end = min(start + context_length, n_token - 1)
        yield start, end, first
        first = end
        if end == n_token - 1:
            return


@torch.no_grad()
def token_losses(
    model: GPT, tokens: np.ndarray, stride: int, batch_size: int
) -> Iterator[np.ndarray]:
    """-log p of each token but the first given those before it in its window, nats, float64, part
    by part: (n,) for the next n tokens. `model` is in eval mode; `batch_size` windows are read at
    once.
    """
    device = next(model.parameters()).device
    windows = scored_windows(len(tokens), model.config.context_length, stride)
    for _, alike in itertools.groupby(windows, lambda window: window[1] - window[0]):
        while batch := list(itertools.islice(alike, batch_size)):
            rows = np.stack([tokens[start : end + 1] for start, end, _ in batch]).astype(np.int64)
            both = on_device(torch.from_numpy(rows), device)
            found = _losses(model(both[:, :-1]), both[:, 1:]).cpu().double().numpy()
            yield np.concatenate(
                [row[first - start :] for (start, _, first), row in zip(batch, found, strict=True)]
            )


def _losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """losses_BT, float32."""
    log_p = torch.log_softmax(logits_BTV.float(), dim=-1)
    return -log_p.gather(-1, targets_BT[..., None])[..., 0]


class Places:
    """Where in a text of `n_byte` bytes its tokens begin, told part by part.

    The tokens of some tokenizers do not add up to the text: SentencePiece's put a space in front,
    and what they don't know is no text. The places are then stretched to fit.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: np.ndarray, n_byte: int):
        self.lengths = tokenizer.byte_lengths()
        self.n_byte = n_byte
        self.passed = 0
        parts = (tokens[i : i + AT_ONCE] for i in range(0, len(tokens), AT_ONCE))
        self.total = sum(int(self.lengths[part].sum()) for part in parts)

    def next(self, tokens: np.ndarray) -> np.ndarray:
        """Of the next tokens, (n,) int64."""
        ends = self.passed + np.cumsum(self.lengths[tokens])
        begins = ends - self.lengths[tokens]
        self.passed = int(ends[-1])
        if self.total != self.n_byte:
            begins = (begins * (self.n_byte / max(1, self.total))).astype(np.int64)
        return np.minimum(begins, self.n_byte - 1)


class Pieces:
    """The bits that each piece of a text takes: its tokens' losses, each in the piece where the
    token begins. The pieces are equal to a byte, of `PIECE_BYTES` or more where the text has so
    many: a larger one among them would look like a larger difference.
    """

    def __init__(self, n_byte: int):
        self.n_byte = n_byte
        self.bits = np.zeros(max(1, n_byte // PIECE_BYTES))

    def add(self, losses: np.ndarray, begins: np.ndarray) -> None:
        """Count tokens in, with their losses in nats and where they begin, in order, (n,) each."""
        piece = begins * len(self.bits) // self.n_byte
        found = np.bincount(piece - piece[0], weights=losses / math.log(2))
        self.bits[piece[0] : piece[-1] + 1] += found

    def sizes(self) -> np.ndarray:
        """Bytes of each."""
        return np.full(len(self.bits), self.n_byte / len(self.bits))


@dataclass(frozen=True)
class Score:
    """What a model makes of one text, or of several together."""

    tokens: int
    """Scored: all but the first of each text, before which there is nothing."""
    bytes: float
    """That they stand for, the first token taken for one of average length, as training's
    evaluations do.
    """
    nats: float
    """Their losses in all."""
    pieces: np.ndarray
    """Bits of each piece, and its bytes."""
    sizes: np.ndarray

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Which can be compared across tokenizers."""
        return self.nats / math.log(2) / self.bytes


def score(
    model: GPT, tokenizer: Tokenizer, tokens: np.ndarray, n_byte: int, stride: int, batch_size: int
) -> Score:
    """Of the tokens of a text of `n_byte` bytes; nothing is kept for each token. Raises
    FloatingPointError where a loss is no number.
    """
    places, pieces = Places(tokenizer, tokens, n_byte), Pieces(n_byte)
    places.next(tokens[:1])
    nats, n_scored = 0.0, 0
    for losses in token_losses(model, tokens, stride, batch_size):
        first = 1 + n_scored
        pieces.add(losses, places.next(tokens[first : first + len(losses)]))
        nats += float(losses.sum())
        n_scored += len(losses)
    if not math.isfinite(nats):
        raise FloatingPointError("the model's loss is not finite")
    share = n_byte * n_scored / len(tokens)
    return Score(n_scored, share, nats, pieces.bits, pieces.sizes())


def pooled(scores: Sequence[Score]) -> Score:
    """Several texts as one."""
    return Score(
        sum(one.tokens for one in scores),
        sum(one.bytes for one in scores),
        sum(one.nats for one in scores),
        np.concatenate([one.pieces for one in scores]),
        np.concatenate([one.sizes for one in scores]),
    )


def text_digest(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """SHA-256 of the text of these tokens, a part at a time, as a split may be large."""
    digest = hashlib.sha256()
    for first in range(0, len(tokens), AT_ONCE):
        digest.update(tokenizer.decode_bytes(tokens[first : first + AT_ONCE].tolist()))
    return digest.hexdigest()


def paired_difference(
    one: np.ndarray, other: np.ndarray, sizes: np.ndarray
) -> tuple[float, float | None]:
    """By how many bits per byte `one` is above `other`, and the standard error of that; both are
    the bits of the same n pieces, of `sizes` bytes.

    With d = one - other the difference is r = sum(d) / sum(sizes), and its standard error
    sqrt(n / (n - 1) sum((d - r sizes)^2)) / sum(sizes), that of a ratio of n independent draws
    (Cochran 1977, "Sampling Techniques", section 6.3). Pieces of one text are not quite
    independent, so that it is rather too small; it is far smaller than those of the two losses, as
    what is hard for one model is hard for the other. None for fewer than two pieces.
    """
    d, n_piece = one - other, len(one)
    difference = float(d.sum() / sizes.sum())
    if n_piece < 2:
        return difference, None
    squares = float(np.square(d - difference * sizes).sum())
    return difference, math.sqrt(n_piece / (n_piece - 1) * squares) / float(sizes.sum())
