"""Weights in files: read one tensor at a time, and written so.

safetensors' own library reads: it holds a file's header against its length and its tensors' sizes
before anything is believed. It writes only what is in memory whole, so files are written here, a
tensor at a time; the format is a length, a header in JSON, and the numbers.
"""

import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from data.json_file import read_json
from errors import UserError
from ops.checkpoint import unpack

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of safetensors: those that hold weights here."""
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
PREFIXES = ("_orig_mod.", "module.", "transformer.", "model.")
"""What torch.compile, DDP, GPT-2 and Llama put before a tensor's name."""
BUFFERS = re.compile(r"attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
"""Tensors that are masks and angles, made anew by every program."""


class Weights(Protocol):
    """Tensors by name, of which none need be in memory."""

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor:
        """In float32; it may lie in the file, mapped into memory."""
        ...


def plain_name(name: str) -> str:
    """A tensor's name without what surrounding programs put before it, in any order.

    >>> plain_name("module._orig_mod.transformer.h.0.ln_1.weight")
    'h.0.ln_1.weight'
    """
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


class Plain:
    """Weights by their plain names, buffers left out. Raises UserError where two names are one."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.actual: dict[str, str] = {}
        for name in weights.names():
            plain = plain_name(name)
            if BUFFERS.search(plain) and not (
                plain.endswith("attn.bias") and len(weights.shape(name)) == 1
            ):
                continue
            if plain in self.actual:
                raise UserError(f"{name[:80]!r} and {self.actual[plain][:80]!r} name one tensor")
            self.actual[plain] = name

    def names(self) -> Iterable[str]:
        return self.actual

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(self.actual[name])

    def read(self, name: str) -> Tensor:
        return self.weights.read(self.actual[name])


class InMemory:
    """Weights of a dictionary, such as torch has mapped into memory. Raises UserError unless all
    are dense tensors of floating point.
    """

    def __init__(self, tensors: dict[str, Tensor], origin: Path):
        self.tensors = tensors
        for name, tensor in tensors.items():
            is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided
            if not (isinstance(name, str) and is_plain and tensor.device.type == "cpu"):
                raise UserError(f"{origin} holds no weights: {str(name)[:60]!r} is no dense tensor")

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        if not self.tensors[name].is_floating_point():
            raise UserError(f"{name} holds {self.tensors[name].dtype}, not weights")
        return self.tensors[name].float()


class SafeTensors:
    """Weights of one or more safetensors files. Raises UserError where a file is none."""

    def __init__(self, paths: list[Path]):
        self.path_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            self._look(path)

    def _look(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dictionary)
                    piece = file.get_slice(name)
                    if piece.get_dtype() not in DTYPES:
                        raise UserError(
                            f"{path}: {name[:80]} holds numbers of type {piece.get_dtype()}; "
                            f"{', '.join(DTYPES)} can be read"
                        )
                    if name in self.path_of:
                        raise UserError(f"{path}: {name[:80]} is in {self.path_of[name]} too")
                    self.path_of[name] = path
                    self.shapes[name] = tuple(piece.get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            why = " ".join(str(error).split())[:120]
            raise UserError(
                f"{path} is no whole safetensors file ({why}): fetch it again"
            ) from None

    def names(self) -> Iterable[str]:
        return self.path_of

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def read(self, name: str) -> Tensor:
        from safetensors import safe_open

        # Opened anew for each tensor: what was read of the mapped file is given back.
        with safe_open(self.path_of[name], framework="pt") as file:
            return file.get_tensor(name).float()


def sharded(index: Path) -> list[Path]:
    """The files that an index names. Raises UserError where it names any outside its folder."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError(f"{index} names no files of weights: it is another file")
    names = sorted({str(name) for name in table.values()})
    for name in names:
        if not re.fullmatch(r"[\w][\w.-]*\.(safetensors|bin)", name):
            raise UserError(
                f"{index} names {name[:80]!r}, which is no file of its own folder: it is unsafe"
            )
        if not index.with_name(name).is_file():
            raise UserError(f"{index} names {name}, which is not there: fetch it too")
    return [index.with_name(name) for name in names]


def find_weights(folder: Path) -> Weights:
    """The weights of a Hugging Face folder: safetensors, whole or in parts, else torch's own format
    read as plain data. Raises UserError where there are none.
    """
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).is_file():
            return open_weights(folder / name)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return SafeTensors(others)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            return open_weights(folder / name)
    raise UserError(
        f"{folder} holds no model.safetensors, no model.safetensors.index.json and no "
        "pytorch_model.bin: name the folder that a model was downloaded to"
    )


def open_weights(path: Path) -> Weights:
    """The weights of a file, or of those that an index names. Raises UserError."""
    paths = sharded(path) if path.name.endswith(".index.json") else [path]
    if all(path.suffix == ".safetensors" for path in paths):
        return SafeTensors(paths)
    tensors: dict[str, Tensor] = {}
    for part in paths:
        found = unpack(part)
        if not isinstance(found, dict):
            raise UserError(f"{part} holds no weights by name")
        tensors |= found
    return InMemory(tensors, path)


def write_safetensors(
    file: BinaryIO,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterable[Tensor],
    dtype: torch.dtype,
) -> None:
    """Write tensors in order, each of its shape in `shapes`, as they come: one is in memory at a
    time.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # numbers begin at a multiple of 8
    file.write(struct.pack("<Q", len(raw)) + raw)
    for tensor in tensors:
        file.write(tensor.to(dtype).contiguous().view(torch.uint8).numpy().data)
