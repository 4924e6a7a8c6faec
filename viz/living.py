"""The model inside the attention page: its weights in few bits, its tokenizer, what the bits cost.

The JavaScript that runs it lies in viz/web/, beside the Python it mirrors.
"""

import numpy as np
import torch

from model.gpt import GPT

BITS = (8, 10, 12, 14, 16)
"""A weight may be held in so many."""


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
    held = GPT(model.config, model.vocab_size, model.blocks[0].attention.attend)
    weights = {}
    for name, weight in matrices_and_vectors(model).items():
        if weight.ndim == 2:
            scales, whole = _whole_numbers(weight, bits)
            weight = scales * whole.astype(np.float32)
        weights[name] = torch.from_numpy(weight)
    if model.config.tie_embeddings:
        weights["unembed.weight"] = weights["embed.weight"]
    held.load_state_dict(weights)
    return held.eval()
