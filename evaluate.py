"""Measure how well a trained model foretells a text.

python evaluate.py runs/shakespeare-char
python evaluate.py runs/one runs/two --text book.txt --stride 64
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from data.command_line import parse_options
from data.prompts import read_utf8, split_lines
from errors import UserError, run_command

if TYPE_CHECKING:
    from training.scoring import Score


@dataclass(frozen=True)
class Options:
    """Measure how well a trained model foretells a text: loss per token, perplexity, and bits per
    byte, which can be compared across tokenizers. With two runs also what they differ by.
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    """One or two run folders (best.pt, else checkpoint.pt) or checkpoint files."""
    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """File of a text, UTF-8; may be given several times, and is then measured each alone and all
    together; - reads standard input. Default: a split of the run's own data.
    """
    split: Literal["val", "train"] | None = None
    """Which split, where no text is given; default: val, whole."""
    stride: int = 0
    """Tokens between two windows, at most the context: with fewer, each token is foretold from more
    of the text before it, and more is computed. 0: windows side by side, as in training's
    evaluations.
    """
    batch_size: int = 16
    """Windows read at once."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matrix products. auto: what the run was trained in, where the device is of that kind."""
    json: bool = False
    """Print one JSON object, with nothing rounded."""

    def __post_init__(self):
        if not 1 <= len(self.runs) <= 2:
            raise ValueError(f"{len(self.runs)} runs are given; give one, or two to compare")
        if self.text and self.split:
            raise ValueError("--text and --split are given; take one of them")
        if self.stride < 0:
            raise ValueError(f"stride is {self.stride}; it must be at least 0")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")


def main() -> int:
    options = parse_options(Options, prog="evaluate.py", config=(tyro.conf.OmitArgPrefixes,))
    texts = [(name, read_text(name)) for name in options.text]
    from ops.drawing import explained  # only now: torch is slow to import

    results = []
    for run in options.runs:
        with explained(run, "use a smaller --batch-size"):
            results.append(measure(options, run, texts))
    differences = []
    if len(results) == 2:
        differences = [compare(*pair) for pair in zip(*results, strict=True)]
    if options.json:
        plain = [{k: v for k, v in row.items() if k != "score"} for r in results for row in r]
        print(json.dumps({"measured": plain, "differences": differences}, indent=2))
        return 0
    for row in (row for result in results for row in result):
        print(
            f"{row['run']}, {row['text']}: loss {row['loss']:.4f} a token, "
            f"perplexity {row['perplexity']:,.2f}, {row['bits_per_byte']:.4f} bits per byte "
            f"({row['tokens']:,} tokens, {row['bytes']:,.0f} bytes)"
        )
    for row in differences:
        print(difference_text(options.runs, row))
    return 0


def read_text(name: str) -> str:
    """A text with line ends as data.prepare reads them. Raises UserError where there is none."""
    text = "\n".join(split_lines(read_utf8(name, "text")))
    if not text:
        raise UserError(f"the text {name} is empty: give one with something to foretell")
    return text


def measure(options: Options, run: str, texts: list[tuple[str, str]]) -> list[dict]:
    """What `run` makes of each text, and of several together, or of a split of its data where there
    is none. Raises FloatingPointError where its losses are no numbers.
    """
    import torch

    from ops.checkpoint import find, open_run, what_is_read
    from ops.device import autocast, default_threads, resolve_device
    from training.scoring import pooled, score, text_digest

    device = resolve_device(options.device)
    torch.set_num_threads(default_threads())
    model, tokenizer, checkpoint = open_run(run, device)
    print(what_is_read(run, checkpoint), file=sys.stderr)
    limit = model.config.context_length
    if options.stride > limit:
        raise UserError(f"--stride is {options.stride}; {run} reads {limit:,} tokens at once")
    stride = options.stride or limit
    named = [(name, encode(text, name, run, tokenizer), len(text.encode())) for name, text in texts]
    split = options.split or "val"
    named = named or [(f"{split} split", *own_split(run, checkpoint, tokenizer, split))]
    about = {
        "run": run,
        "checkpoint": str(find(run)),
        "step": checkpoint.step,
        "stride": stride,
    }
    rows = []
    for name, tokens, n_byte in named:
        with autocast(device, precision_of(options.precision, checkpoint, device)):
            found = score(model, tokenizer, tokens, n_byte, stride, options.batch_size)
        rows.append({**about, "text": name, **_figures(found), "all_bytes": n_byte})
        if len(options.runs) > 1:
            # A text is the same for both runs, splits of their own need not be.
            rows[-1]["sha256"] = None if texts else text_digest(tokenizer, tokens)
    if len(rows) > 1:
        found = pooled([row["score"] for row in rows])
        n_byte = sum(row["all_bytes"] for row in rows)
        name = f"all {len(rows)} texts"
        rows.append({**about, "text": name, **_figures(found), "all_bytes": n_byte})
    return rows


def _figures(found: Score) -> dict:
    """What is told of a score, and the score."""
    return {
        "tokens": found.tokens,
        "bytes": found.bytes,
        "loss": found.loss,
        "perplexity": math.exp(min(found.loss, 700.0)),
        "bits_per_byte": found.bits_per_byte,
        "score": found,
    }


def precision_of(asked: str, checkpoint, device: str) -> str:
    """`auto` as the precision of the run, if it was made on a device of this kind; else float32."""
    if asked != "auto":
        return asked
    trained = checkpoint.config.get("run", {})
    same = str(trained.get("device", "")).partition(":")[0] == device.partition(":")[0]
    return trained.get("precision", "float32") if same else "float32"


def encode(text: str, name: str, run: str, tokenizer):
    """The text's ids. Raises UserError for characters that the model doesn't know, and for a text
    of one token, before which there is nothing.
    """
    from data.vocabulary import UnknownCharacters

    unknown = UnknownCharacters(tokenizer)
    for _ in unknown.leave_out([(0, text)]):
        pass
    if unknown.counts:
        raise UserError(
            f"{name} holds {unknown.counts.total():,} characters that {run} doesn't know: "
            f"{unknown.listed()}; replace them in the text"
        )
    tokens = tokenizer.encode(text)
    if len(tokens) < 2:
        raise UserError(f"{name} is {len(tokens)} token: two are needed, as the first is given")
    return tokens


def own_split(run: str, checkpoint, tokenizer, split: str):
    """The ids of a split of the run's data, and its bytes of text. Raises UserError where the data
    is not there, is not what the run has learned from, or is damaged.
    """
    from data.batches import split_windows
    from data.dataset import Dataset

    data = checkpoint.config["data"]["data"]
    if not data:
        raise UserError(f"{run} has no data of its own: give a text with --text")
    folder = Path(data)
    if not (folder / "dataset.json").exists():
        raise UserError(f"the data of {run}, {folder}, is not there: give a text with --text")
    dataset = Dataset(folder)
    if dataset.tokenizer_spec != checkpoint.tokenizer:
        raise UserError(f"{folder} is no longer in the tokens of {run}: give a text with --text")
    if dataset.fingerprint != checkpoint.dataset:
        raise UserError(f"{folder} no longer holds the data of {run}: give a text with --text")
    dataset.check_content(tokenizer.vocab_size)
    if n_batch := checkpoint.config.get("run", {}).get("eval_batches", 0):
        n_window = n_batch * checkpoint.config["optim"]["batch_size"]
        context_length = checkpoint.config["model"]["context_length"]
        if n_window < len(split_windows(dataset.tokens[split], context_length)):
            part = f"{n_window:,} windows of it"
            print(f"note: this is the whole split; the log's losses are of {part}", file=sys.stderr)
    return dataset.tokens[split], dataset.info["splits"][split]["bytes"]


def compare(one: dict, other: dict) -> dict:
    """The difference of two runs on a text, in bits per byte, and its standard error. Raises
    UserError where they were not measured on the same text.
    """
    from training.scoring import paired_difference

    if one.get("sha256") != other.get("sha256"):
        raise UserError(
            f"{one['run']} and {other['run']} have different data: compare them on one --text"
        )
    pieces, others = one["score"], other["score"]
    difference, error = paired_difference(pieces.pieces, others.pieces, pieces.sizes)
    return {"text": one["text"], "difference": difference, "standard_error": error}


def difference_text(runs: tuple[str, ...], row: dict) -> str:
    """The difference in words."""
    difference, error = row["difference"], row["standard_error"]
    better = runs[0] if difference < 0 else runs[1]
    if difference == 0:
        return f"{row['text']}: no difference"
    line = f"{row['text']}: {better} takes {abs(difference):.4f} bits per byte less"
    if error is None:
        return f"{line} (the text is too short for a standard error)"
    if abs(difference) > 2 * error:
        return f"{line}, more than two standard errors of {error:.4f}: clearly"
    return f"{line}, within two standard errors of {error:.4f}: which may be chance"


if __name__ == "__main__":
    run_command(main)
