"""From another program's files to a run folder, one tensor at a time."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from configs import Config, DataConfig
from data.json_file import read_json
from data.tokenizer import Tokenizer
from errors import UserError
from interop import gpt2, llama, nanogpt
from interop.find_tokenizer import find_tokenizer
from interop.folder import whole_folder
from interop.keys import Keys
from interop.places import Format, Place, Places, by_source, shape_there, split
from interop.weights import InMemory, Plain, find_weights, open_weights
from model.config import ModelConfig
from model.gpt import GPT
from ops.checkpoint import LATEST, Checkpoint, save, unpack

FORMATS: dict[str, Format] = {"gpt2": gpt2, "llama": llama}
"""model_type of a config.json -> what reads it."""
HEAD = "lm_head.weight"


@dataclass
class Source:
    """A model of another program, its weights still in their files."""

    folder: Path
    config: ModelConfig
    weights: Plain
    places: Places
    kind: str
    end: int | None = None
    """The id that ends a document, and the one that begins a text, where the source says so."""
    begin: int | None = None
    step: int = 0
    loss: float = float("inf")
    notes: list[str] = field(default_factory=list)


def take_in(name: str, out: Path, tokenizer_from: str = "") -> list[str]:
    """Write the model of `name` to the run folder `out`; lines about it. Raises UserError, with
    nothing written, where it can't be read or is of another kind.
    """
    source = open_source(name)
    n_row = count_rows(source)
    is_gpt2 = source.kind != "llama"
    tokenizer = find_tokenizer(source.folder, tokenizer_from, is_gpt2, n_row, source.end)
    if n_row < tokenizer.vocab_size:
        raise UserError(
            f"{name} has {n_row:,} embeddings, its tokenizer ({tokenizer.kind}) "
            f"{tokenizer.vocab_size:,} ids: name another with --tokenizer-from"
        )
    weights = read_weights(source, n_row, tokenizer.vocab_size)
    config = Config(model=source.config, data=DataConfig(data=""))
    checkpoint = Checkpoint(
        step=source.step,
        model=weights,
        config=config.to_dict(),
        tokenizer=tokenizer.spec(),
        dataset="",
        best_val_loss=source.loss,
        counters=_start(source, tokenizer),
    )
    with whole_folder(out) as folder:
        save(checkpoint, folder / LATEST)
        text = json.dumps(config.to_dict(), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
    if n_row > tokenizer.vocab_size:
        source.notes.append(
            f"note: of {n_row:,} embeddings the first {tokenizer.vocab_size:,} are taken: the "
            f"tokenizer ({tokenizer.kind}) has no more ids"
        )
    return [*source.notes, _summary(source, tokenizer, weights, out)]


def count_rows(source: Source) -> int:
    """Of the embeddings. Raises UserError where there are none."""
    name = source.places["embed.weight"].name
    if name not in source.weights.names():
        raise UserError(f"{source.folder}: {name} is missing among the weights")
    shape = source.weights.shape(name)
    if len(shape) != 2 or not shape[0]:
        raise UserError(f"{source.folder}: {name} is no table of embeddings, its shape is {shape}")
    return shape[0]


def _start(source: Source, tokenizer: Tokenizer) -> dict[str, int]:
    """What a checkpoint's counters say of the id that a text begins with."""
    start = tokenizer.separator if source.begin is None else source.begin
    return {} if start is None or start >= tokenizer.vocab_size else {"start": start}


def _summary(source: Source, tokenizer: Tokenizer, weights: dict[str, Tensor], out: Path) -> str:
    n_weight = sum(t.numel() for name, t in weights.items() if name in source.places)
    config = source.config
    return (
        f"wrote {out}: {n_weight:,} weights of {source.kind}'s shape, {config.n_layer} layers, "
        f"{config.n_head} heads, width {config.d_model}, context {config.context_length}; "
        f"{tokenizer.vocab_size:,} ids ({tokenizer.kind})"
    )


def open_source(name: str) -> Source:
    """The model of a folder, a file or a name. Raises UserError."""
    path = Path(name).expanduser()
    if not path.exists():
        path = fetch(name)
    if path.suffix in (".pt", ".pth", ".ckpt"):
        return _open_checkpoint(path)
    if path.is_dir() and not (path / "config.json").is_file() and (path / "ckpt.pt").is_file():
        return _open_checkpoint(path / "ckpt.pt")
    return _open_published(path)


def fetch(name: str) -> Path:
    """The folder to which huggingface_hub downloads a model. Raises UserError."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise UserError(f"there is no {name}: give a folder or file, or a name on huggingface.co")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no folder or file {name}; as a name on huggingface.co it asks for the "
            "package huggingface_hub: pip install huggingface_hub"
        ) from None
    files = ["config.json", "tokenizer.json", "vocab.json", "merges.txt"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*files, "*.safetensors*"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*files, "pytorch_model*"]))
    except Exception as error:  # of the network, of the library, of the model's owner
        why = " ".join(str(error).split())[:120]
        raise UserError(
            f"there is no folder or file {name}, and huggingface.co gave no model of that name "
            f"({type(error).__name__}: {why})"
        ) from None
    return folder


def _open_published(path: Path) -> Source:
    """A model as transformers keeps it: a folder, or a file of weights beside its config.json."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json, which says how the weights are used")
    keys = Keys(read_json(folder / "config.json"), str(folder / "config.json"))
    kind = keys.take("model_type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise keys.refuse("model_type", f"models here are of the kinds {', '.join(FORMATS)}")
    begin, end = (_first(keys.take(name)) for name in ("bos_token_id", "eos_token_id"))
    try:
        config, notes = FORMATS[kind].read_config(keys)
    except ValueError as error:
        raise UserError(f"{keys.origin}: {error}") from None
    keys.finish()
    weights = Plain(find_weights(path) if path.is_dir() else open_weights(path))
    check_depth(config, weights)
    places = FORMATS[kind].places(config)
    return Source(folder, config, weights, places, kind, end, begin, notes=notes)


def _first(ids: object) -> int | None:
    """An id, or the first of several."""
    found = ids[0] if isinstance(ids, list) and ids else ids
    return found if type(found) is int and found >= 0 else None


def _open_checkpoint(path: Path) -> Source:
    """A checkpoint of nanoGPT."""
    state = unpack(path)
    if not nanogpt.is_checkpoint(state):
        raise UserError(
            f"{path} is no checkpoint of nanoGPT: it holds no `model` with `model_args`; a run of "
            "this program needs no loading, give its folder to sample.py or --init-from"
        )
    if not isinstance(state["model"], dict) or not isinstance(state["model_args"], dict):
        raise UserError(f"{path} is no checkpoint of nanoGPT: `model` or `model_args` is damaged")
    weights = Plain(InMemory(state["model"], path))
    try:
        config = nanogpt.read_config(
            Keys(state["model_args"], f"{path}, model_args"), is_tied=_is_tied(weights)
        )
    except ValueError as error:
        raise UserError(f"{path}, model_args: {error}") from None
    check_depth(config, weights)
    step, loss = nanogpt.step_and_loss(state)
    places = gpt2.places(config, linear=True)
    return Source(path.parent, config, weights, places, "nanoGPT", step=step, loss=loss)


def _is_tied(weights: Plain) -> bool:
    """Whether tokens are read and predicted with one matrix, by the numbers themselves."""
    if HEAD not in weights.names() or "wte.weight" not in weights.names():
        return True
    same_shape = weights.shape(HEAD) == weights.shape("wte.weight")
    return same_shape and torch.equal(weights.read(HEAD), weights.read("wte.weight"))


def read_weights(source: Source, n_row: int, n_kept: int) -> dict[str, Tensor]:
    """Our tensors of a source, of whose `n_row` embeddings `n_kept` are kept. Raises UserError for
    a tensor that is missing, too many, of another shape, or not finite; shapes are compared before
    anything is read.
    """
    groups = by_source(source.places)
    check_shapes(source, groups, n_row)
    weights: dict[str, Tensor] = {}
    for name, group in groups.items():
        tensor = source.weights.read(name)
        if n_bad := int((~tensor.isfinite()).sum()):
            raise UserError(
                f"{name}: {n_bad:,} of its {tensor.numel():,} numbers are NaN or infinite: the "
                "file is damaged, or training had diverged"
            )
        if name in (source.places["embed.weight"].name, HEAD) and n_kept < n_row:
            tensor = tensor[:n_kept]
        weights |= split(tensor, group)
    if source.config.tie_embeddings:
        weights["unembed.weight"] = weights["embed.weight"]
    return weights


def check_shapes(source: Source, groups: dict[str, list[tuple[str, Place]]], n_row: int) -> None:
    """Raise UserError unless the source has just the tensors that its configuration asks for, each
    of its shape. Nothing is read or allocated.
    """
    found = set(source.weights.names())
    wanted = our_shapes(source.config, n_row)
    for name, group in groups.items():
        ours, place = group[0]
        if name not in found:
            raise UserError(f"{source.folder}: {name} is missing among the weights")
        expected = shape_there(wanted[ours], place)
        if source.weights.shape(name) != expected:
            there = " x ".join(f"{n:,}" for n in source.weights.shape(name)) or "a number"
            here = " x ".join(f"{n:,}" for n in expected)
            raise UserError(
                f"{source.folder}: {name} is {there}, by the configuration it must be {here}"
            )
    others = found - groups.keys()
    if not source.config.bias:
        others -= {name for name in others if name.endswith(".bias") and _is_zero(source, name)}
    if HEAD in others and source.config.tie_embeddings:
        if not _is_tied_by(source):
            raise UserError(
                f"{source.folder}: {HEAD} differs from the embeddings, though the configuration "
                "says that they are one (tie_word_embeddings)"
            )
        others.discard(HEAD)
    if others:
        raise UserError(f"{source.folder}: there is no place for {sorted(others)[0][:80]!r}")


def _is_tied_by(source: Source) -> bool:
    name = source.places["embed.weight"].name
    same_shape = source.weights.shape(name) == source.weights.shape(HEAD)
    return same_shape and torch.equal(source.weights.read(name), source.weights.read(HEAD))


def _is_zero(source: Source, name: str) -> bool:
    """Whether a tensor is all zeros: a bias that the format has and the model has not."""
    return not source.weights.read(name).any()


def check_depth(config: ModelConfig, weights: Plain) -> None:
    """Raise UserError for more layers than there are tensors, before any are counted through."""
    n_tensor = len(weights.actual)
    if config.n_layer > n_tensor:
        raise UserError(
            f"the configuration names {config.n_layer:,} layers, there are {n_tensor:,} tensors"
        )


def our_shapes(config: ModelConfig, n_row: int) -> dict[str, tuple[int, ...]]:
    """The shape of each of our tensors. Raises UserError for sizes beyond any memory."""
    try:
        with torch.device("meta"):
            shallow = GPT(dataclasses.replace(config, n_layer=1), n_row).state_dict()
    except (RuntimeError, OverflowError, TypeError):
        raise UserError("the configuration names sizes beyond any memory") from None
    shapes = {}
    for name, tensor in shallow.items():
        for layer in range(config.n_layer if name.startswith("blocks.0.") else 1):
            shapes[name.replace("blocks.0.", f"blocks.{layer}.")] = tuple(tensor.shape)
    return shapes
