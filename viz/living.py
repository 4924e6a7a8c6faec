"""The model inside the attention page: its weights in few bits, its tokenizer, what the bits cost.

The JavaScript that runs it lies in viz/web/, beside the Python it mirrors.
"""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from data.dataset import Dataset
from data.patterns import PATTERNS
from data.prompts import empty_prompt
from data.tokenizer import Tokenizer
from errors import UserError
from model.config import ModelConfig
from model.gpt import GPT

BITS = (8, 10, 12, 14, 16)
"""A weight may be held in so many."""
GOOD = 5e-4
"""Half a unit of the last digit of a probability as the page shows it (0.1 %): so many bits are
enough where none is off by more.
"""
KNOWN = {
    "positions": ("learned", "sinusoidal", "rotary", "none"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu", "gelu_exact", "relu2", "swiglu"),
}
"""Choices that the page's script computes; a fork's own it can't know."""
OTHERS = {
    *("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "context_length", "rope_base"),
    *("norm_eps", "qk_norm", "zero_init", "tie_embeddings", "bias", "dropout", "window", "bigrams"),
}
"""The other fields of a ModelConfig that it minds."""
WORST = 0.01
"""Nats that the loss may change by, at most, even where more bits don't fit."""


@dataclass(frozen=True)
class Living:
    """A model that goes into a page."""

    told: dict
    """What the page's data says of it (JSON types): configuration, tokenizer, what lies where in
    the block, what the bits cost, the text to begin with.
    """
    block: bytes
    """Its weights."""

    @property
    def fact(self) -> str:
        """What stands of it under the page's title."""
        moved = math.ceil(1e5 * self.told["cost"]["probability"]) / 1e3
        return (
            f"the model in {self.told['bits']} bits a weight, "
            f"which moves no probability by more than {moved:g} %"
        )

    @property
    def size(self) -> int:
        """Bytes that it takes in the page."""
        return 4 * (len(self.block) + 2) // 3 + len(json.dumps(self.told))


def put_into_page(
    model: GPT,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    max_bytes: int,
    beside: int = 0,
    examples: Sequence[str] = (),
) -> Living:
    """The model as it travels in a page of at most `max_bytes`, of which `beside` are needed for
    other things, and that begins with the text `ids`. `examples` are other texts to begin with.

    The weights take the fewest of BITS that are GOOD on that text, else the most that fit. Raises
    ValueError, in words, where the model can't be in the page.
    """
    _check_shape(model.config)
    spec = tokenizer.spec()
    if spec.get("pattern", "") not in ["", *PATTERNS]:
        raise ValueError("the page can't cut text by this tokenizer's pattern")
    if spec["kind"] not in ("char", "byte", "bpe", "gpt2"):
        raise ValueError(f"the page can't run a tokenizer of kind {spec['kind']}")
    weights = matrices_and_vectors(model)
    # What is told of each token, a long text's labels and predictions among it, is a guess.
    rest = beside + len(json.dumps(spec)) + len(json.dumps(list(examples))) + 400 * len(ids)
    fitting = [bits for bits in BITS if _packed_size(weights, bits) + rest <= max_bytes]
    if not fitting:
        size = _packed_size(weights, BITS[0]) + rest
        raise ValueError(
            f"with the model, in {BITS[0]} bits a weight, it takes {size / 1e6:.1f} MB, "
            f"{(size - max_bytes) / 1e6:.1f} MB more than --max-mb {max_bytes / 1e6:g}"
        )
    for bits in fitting:
        cost = what_bits_cost(model, as_held(model, bits), ids)
        if cost["probability"] <= GOOD and cost["loss"] <= WORST:
            break
    if cost["loss"] > WORST:
        raise ValueError(
            f"{bits} bits a weight, the most that --max-mb {max_bytes / 1e6:g} holds, "
            f"change the loss by {cost['loss']:.3f}"
        )
    tensors, block = pack(weights, bits)
    told = {
        "config": asdict(model.config),
        "vocabSize": model.vocab_size,
        "tokenizer": spec,
        "tensors": tensors,
        "bits": bits,
        "cost": cost,
        "ids": [int(i) for i in ids],
        "start": [int(i) for i in empty_prompt(tokenizer)],
        "examples": list(examples),
    }
    return Living(told, block)


def _check_shape(config: ModelConfig) -> None:
    """Raise ValueError where the page's script doesn't know what the model computes."""
    for name, value in asdict(config).items():
        if name in KNOWN and value not in KNOWN[name]:
            raise ValueError(f"its script (viz/web/) doesn't know {name} {value}")
        if name not in KNOWN and name not in OTHERS and value != getattr(type(config), name):
            raise ValueError(f"its script (viz/web/) doesn't know {name}")


@torch.no_grad()
def what_bits_cost(model: GPT, held: GPT, ids: Sequence[int]) -> dict[str, float]:
    """How far the logits of `held` are from the model's on a text, at most; likewise its
    probabilities; and its loss, in nats (0 for a single token).
    """
    tokens = torch.tensor([list(ids)], device=model.embed.weight.device)
    wanted = model(tokens)[0].double()
    found = held(tokens)[0].double()
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]).item() if len(ids) > 1 else 0
        for logits in (wanted, found)
    ]
    return {
        "logits": (found - wanted).abs().max().item(),
        "probability": (found.softmax(-1) - wanted.softmax(-1)).abs().max().item(),
        "loss": abs(losses[1] - losses[0]),
        "tokens": len(ids),
    }


def _packed_size(weights: dict[str, np.ndarray], bits: int) -> int:
    """Bytes of base64 that `pack` makes of them, or a few more."""
    n_bit = 0
    for weight in weights.values():
        n_bit += 32 * weight.size if weight.ndim == 1 else bits * weight.size + 32 * len(weight)
        n_bit += 32  # the gap to a multiple of 4 bytes
    return n_bit // 6


def example_texts(folder: Path, tokenizer: Tokenizer, n_token: int, n: int = 4) -> list[str]:
    """`n` passages of at most `n_token` tokens, spread over the validation split of the prepared
    data in `folder`; none where it isn't there in these tokens.

    Each starts with a paragraph, else with a line, where one begins near.
    """
    if not (folder / "dataset.json").exists():
        return []
    try:
        dataset = Dataset(folder)
        tokens = dataset.tokens["val"]
        if dataset.tokenizer_spec != tokenizer.spec():
            return []
        places = np.linspace(0, max(0, len(tokens) - 3 * n_token), n).astype(int)
        texts = [_passage(tokens[at : at + 3 * n_token], tokenizer, n_token) for at in places]
    except (UserError, OSError, IndexError):  # damaged data: not what the page is about
        return []
    return list(dict.fromkeys(text for text in texts if text))


def _passage(tokens: np.ndarray, tokenizer: Tokenizer, n_token: int) -> str:
    text = tokenizer.decode_bytes(tokens.tolist()).decode("utf-8", "ignore")
    near = text[: len(text) // 2]
    starts = [near.index(mark) + len(mark) for mark in ("\n\n", "\n") if mark in near]
    kept = tokenizer.encode(text[starts[0] if starts else 0 :])[:n_token]
    return tokenizer.decode_bytes(kept.tolist()).decode("utf-8", "ignore")


def matrices_and_vectors(model: GPT) -> dict[str, np.ndarray]:
    """The float32 weights that must travel, by name: a tied matrix does so once."""
    weights = {name: tensor.float().cpu().numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights["unembed.weight"]
    return weights


def pack(weights: dict[str, np.ndarray], bits: int) -> tuple[list[dict], bytes]:
    """Matrices as whole numbers of `bits` with a float32 scale a row, vectors as float32: what lies
    where, and the bytes. viz/web/weights.js reads them.
    """
    told = []
    parts = []
    offset = 0
    for name, weight in weights.items():
        if weight.ndim == 2:
            part = _pack_matrix(weight, bits)
        else:
            part = weight.astype("<f4").tobytes()
        n_bit = bits if weight.ndim == 2 else 32
        told.append({"name": name, "shape": list(weight.shape), "bits": n_bit, "offset": offset})
        parts.append(part + bytes(-len(part) % 4))  # float32 begins at a multiple of 4
        offset += len(parts[-1])
    return told, b"".join(parts)


def _whole_numbers(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """scales (rows, 1) float32 and int16 (rows, columns), whose product is nearest the weights."""
    largest = np.abs(weight).max(axis=1, keepdims=True)
    scales = (np.where(largest > 0, largest, 1) / (2 ** (bits - 1) - 1)).astype(np.float32)
    return scales, np.round(weight / scales).astype("<i2")


def _pack_matrix(weight: np.ndarray, bits: int) -> bytes:
    scales, whole = _whole_numbers(weight, bits)
    each = np.unpackbits(whole.reshape(-1, 1).view(np.uint8), axis=1, bitorder="little")
    return scales.astype("<f4").tobytes() + np.packbits(each[:, :bits], bitorder="little").tobytes()


def as_held(model: GPT, bits: int) -> GPT:
    """The model as the page computes it: each matrix rounded to `bits` a weight."""
    held = copy.deepcopy(model)
    with torch.no_grad():
        for weight in held.parameters():
            if weight.ndim == 2:
                scales, whole = _whole_numbers(weight.float().cpu().numpy(), bits)
                weight.copy_(torch.from_numpy(scales * whole.astype(np.float32)))
    return held
