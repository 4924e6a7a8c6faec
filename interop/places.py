"""Where each of a model's tensors stands in another program's format."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from interop.keys import Keys
from model.config import ModelConfig


@dataclass(frozen=True)
class Place:
    """A tensor of the other format, or the part of it, that one of ours is."""

    name: str
    transposed: bool = False
    """Whether it is kept as inputs x outputs (GPT-2's Conv1D)."""
    part: int = 0
    """Which of its `n_part` equal parts, along the outputs."""
    n_part: int = 1


Places = dict[str, Place]
"""Name of a tensor here -> its place."""


class Format(Protocol):
    """A module that knows a format: `interop.gpt2`, `interop.llama`."""

    NAME: str
    PREFIX: str

    def read_config(self, keys: Keys) -> tuple[ModelConfig, list[str]]: ...

    def places(self, config: ModelConfig) -> Places: ...

    def obstacles(self, config: ModelConfig) -> list[str]: ...

    def write_config(self, config: ModelConfig, vocab_size: int) -> dict[str, Any]: ...


def by_source(places: Places) -> dict[str, list[tuple[str, Place]]]:
    """Name of a tensor there -> the tensors here that are parts of it, in order."""
    groups: dict[str, list[tuple[str, Place]]] = defaultdict(list)
    for ours, place in places.items():
        groups[place.name].append((ours, place))
    return {name: sorted(group, key=lambda item: item[1].part) for name, group in groups.items()}


def shape_there(shape: tuple[int, ...], place: Place) -> tuple[int, ...]:
    """The shape that a tensor of ours, `shape`, asks of its place."""
    whole = (place.n_part * shape[0], *shape[1:])
    return whole[::-1] if place.transposed else whole


def split(tensor: Tensor, group: list[tuple[str, Place]]) -> dict[str, Tensor]:
    """Our tensors of one of theirs, each in memory of its own."""
    place = group[0][1]
    parts = (tensor.mT if place.transposed else tensor).chunk(place.n_part)
    return {
        ours: parts[place.part].clone(memory_format=torch.contiguous_format)
        for ours, place in group
    }


def join(tensors: list[Tensor], place: Place) -> Tensor:
    """Their tensor of the parts that are ours, in order."""
    whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return (whole.mT if place.transposed else whole).contiguous()
