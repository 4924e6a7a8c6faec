"""A vocabulary that exists already, for another text: what fine-tuning a run needs.

It is taken from a run folder, a prepared folder, a checkpoint file or a tokenizer.json. A
character vocabulary may lack characters of the new text: they are counted, and refused or left out.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.dataset import Dataset
from data.names import CORPORA
from data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from data.tokenizer_in import read_tokenizer
from errors import UserError

CHECKPOINTS = ("checkpoint.pt", "best.pt")  # of a run folder; both hold its tokenizer
SHOWN = 20  # unknown characters that are listed


def borrow_tokenizer(name: str | Path, end: int | None = None) -> Tokenizer:
    """The tokenizer of a prepared folder, a run folder or a checkpoint file, or of a tokenizer.json
    of the library `tokenizers` (or its folder), where `end` is the id that ends a document.

    Raises UserError where there is none.
    """
    path = Path(name)
    if path.name in ("dataset.json", "config.json"):
        path = path.parent
    for file in (path, path / "tokenizer.json"):
        if file.suffix == ".json" and file.is_file():
            return read_tokenizer(file, end)
    if (path / "dataset.json").exists():
        return load_tokenizer(Dataset(path).tokenizer_spec)
    if path.is_file():
        return load_tokenizer(_checkpoint_spec(path))
    checkpoints = [path / name for name in CHECKPOINTS if (path / name).is_file()]
    if not checkpoints:
        found = "holds no run and no prepared data" if path.exists() else "does not exist"
        raise UserError(
            f"--tokenizer-from {name}: {found}; name a folder of train.py or data.prepare, "
            "a checkpoint, or a tokenizer.json"
        )
    return load_tokenizer(_checkpoint_spec(checkpoints[0]))


def _checkpoint_spec(path: Path) -> dict:
    """The description of the tokenizer that a checkpoint holds. Its weights are not read."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state["tokenizer"]
    except Exception:  # a damaged or foreign file can raise nearly anything
        raise UserError(
            f"--tokenizer-from {path}: no checkpoint of train.py, or a damaged one; "
            "name a folder of train.py or data.prepare, or a checkpoint"
        ) from None


def run_folder(name: str | Path) -> Path | None:
    """The run folder that `name`, as given to `borrow_tokenizer`, is or lies in, if any."""
    path = Path(name)
    folder = path if path.is_dir() else path.parent
    is_run = any((folder / checkpoint).is_file() for checkpoint in CHECKPOINTS)
    return folder if is_run and (folder / "config.json").is_file() else None


def preparing_again(dataset: Dataset, run: str | Path) -> tuple[str, Path]:
    """The command that prepares the text of `dataset` with the vocabulary of `run`, and the folder
    it writes.

    Where the text isn't found any more, YOUR_TEXT stands for it.
    """
    folder = dataset.folder.resolve()
    out = dataset.folder.with_name(f"{folder.name}-for-{Path(run).resolve().stem}")
    inputs = dataset.info.get("inputs", [])
    if not inputs or any(name not in CORPORA and not Path(name).exists() for name in inputs):
        inputs = ["YOUR_TEXT"]
    words = [*inputs, "--tokenizer-from", str(run), "--out", str(out)]
    options = dataset.info.get("options", {})
    for name, value in (
        ("field", "text"),
        ("encoding", None),
        ("lines", False),
        ("split_on", None),
    ):
        if (given := options.get(name, value)) != value:
            option = f"--{name.replace('_', '-')}"
            words += [option] if given is True else [option, str(given)]
    if options.get("skip_broken"):
        words.append("--skip-broken")
    return f"python -m data.prepare {shlex.join(words)}", out


class UnknownCharacters:
    """Counts the characters of a text that a tokenizer has no ids for, and leaves them out."""

    def __init__(self, tokenizer: Tokenizer):
        self.counts: Counter[str] = Counter()
        self._known: set[str] | None = None  # every character is known
        if isinstance(tokenizer, CharTokenizer):
            self._known = set(tokenizer.symbols)

    def leave_out(self, texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Yield (document, chunk of its text) without unknown characters. A document of which
        nothing is left is none: those after it count on.
        """
        number = -1
        latest = -1  # the document, as it was counted before
        for document, text in texts:
            text = self._known_part(text)
            if text:
                if document != latest:
                    number += 1
                    latest = document
                yield number, text

    def _known_part(self, text: str) -> str:
        if self._known is None:
            return text
        unknown = set(text) - self._known
        if not unknown:
            return text
        counts = Counter(text)
        self.counts.update({character: counts[character] for character in unknown})
        return text.translate({ord(character): None for character in unknown})

    def listed(self) -> str:
        """The commonest with their counts: "'é' (12), '—' (5)"."""
        most = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{character!r} ({n:,})" for character, n in most[:SHOWN])
        return shown + (f", and {len(most) - SHOWN:,} more" if len(most) > SHOWN else "")

    def check(self, name: str, vocabulary: str | Path, n_symbols: int) -> None:
        """Raise UserError where there were any. `name`: of the text."""
        if self.counts:
            raise UserError(
                f"{name} holds {self.counts.total():,} characters, {len(self.counts):,} different "
                f"ones, that are not among the {n_symbols:,} of {vocabulary}: {self.listed()}\n"
                "--unknown drop leaves them out; else replace them in the text"
            )
