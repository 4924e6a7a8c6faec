"""Prepare a corpus: python -m data.prepare [CORPUS or PATH ...] --tokenizer char|byte|bpe|gpt2

Two passes over the text, a chunk at a time: the first counts documents and characters and builds
the vocabulary, the second writes train.bin, val.bin and dataset.json into a folder beside the one
asked for, which takes its name only when it is whole.
"""

from __future__ import (
    annotations,
)  # numpy and the modules that need it are imported where they are used: `--help` is instant

import hashlib
import json
import os
import shlex
import signal
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import tyro

from errors import MachineError, UserError, run_command

if TYPE_CHECKING:
    import numpy as np

    from data.corpora import Corpus
    from data.tokenizer import Tokenizer

FORMAT = 1  # of dataset.json
BATCH = 256  # texts that the cores share out among themselves, where encoding needs them all


@dataclass(frozen=True)
class Options:
    """Turn text into token files for train.py."""

    corpus: Annotated[tuple[str, ...], tyro.conf.Positional] = ("shakespeare",)
    """shakespeare, tinyshakespeare, stdlib, or paths: text, .jsonl, .parquet, any of them .gz,
    folders, - for standard input
    """
    tokenizer: Literal["char", "byte", "bpe", "gpt2"] = "char"
    """char: one id per character; byte: UTF-8; bpe: trained on the corpus; gpt2: GPT-2's own"""
    vocab_size: int = 4096
    """bpe only: ids in all, the separator among them"""
    val_fraction: float = 0.1
    """share of the text kept for validation"""
    out: Path | None = None
    """folder to write (data/prepared/CORPUS-TOKENIZER unless given)"""
    separator: bool = False
    """put a separator id between documents with char and byte too, as bpe and gpt2 always do"""
    field: str = "text"
    """the field of JSON Lines or column of Parquet that holds the text"""
    encoding: str | None = None
    """encoding of the text, where it is not UTF-8"""
    seed: int = 1337
    """draws the documents kept for validation"""
    overwrite: bool = False
    """replace a prepared folder"""

    def recorded(self) -> dict:
        """The options that decide the content of the files, as dataset.json keeps them."""
        names = ("tokenizer", "separator", "field", "encoding")
        vocab_size = self.vocab_size if self.tokenizer == "bpe" else None
        return {"vocab_size": vocab_size, **{name: getattr(self, name) for name in names}}


def make_tokenizer(options: Options, corpus: Corpus) -> tuple[Tokenizer, array]:
    """The first pass: the tokenizer, and the characters of each document. UserError for a corpus
    without text.
    """
    from data import tokenizer as tk

    tokenizer = (
        tk.load_gpt2() if options.tokenizer == "gpt2" else tk.ByteTokenizer(options.separator)
    )
    characters, alphabet, blank = array("Q"), tk.Alphabet(), True

    def survey() -> Iterator[tuple[int, str]]:
        nonlocal blank
        for document, text in corpus.documents(bar.update):
            if document == len(characters):
                characters.append(0)
            characters[document] += len(text)
            blank = blank and text.isspace()
            if options.tokenizer == "char":
                alphabet.add(text)
            yield document, text

    with _progress(corpus, "survey") as bar:
        texts = survey()
        if options.tokenizer == "bpe":
            tokenizer = tk.train_bpe(
                (text for _, text in tk.safe_chunks(texts, 1 << 16)), options.vocab_size
            )
        for _ in texts:
            pass
    if blank:
        found = f"only white space ({sum(characters):,} characters)" if characters else "no text"
        raise UserError(
            f"{corpus.name}: {found} in {corpus.size():,} bytes; give a text to learn from"
        )
    if options.tokenizer == "char":
        tokenizer = tk.CharTokenizer(alphabet.symbols(), options.separator)
    return tokenizer, characters


def choose_validation(characters: Sequence[int], val_fraction: float, seed: int) -> np.ndarray:
    """Which documents are for validation: a boolean per document, neither all nor none if there are
    two or more.

    In a seeded order, a document is taken where it still fits into `val_fraction` of the
    characters; one more is taken if that comes closer to it.
    """
    import numpy as np

    characters = np.array(characters, np.int64)
    chosen, missing = np.zeros(len(characters), bool), val_fraction * characters.sum()
    for document in np.random.default_rng(seed).permutation(len(characters)):
        if characters[document] <= missing:
            chosen[document] = True
            missing -= characters[document]
    distance = np.where(chosen, np.inf, abs(characters - missing))
    if (
        distance.min() < missing or not chosen.any()
    ):  # in the second case every document is too large: the smallest, then
        chosen[distance.argmin()] = True
    if chosen.all():
        chosen[characters.argmin()] = False
    return chosen


@dataclass
class Split:
    """One of the two token files, and what was written into it."""

    file: BinaryIO
    tokens: int = 0
    bytes: int = 0  # of text, as UTF-8
    documents: int = 0


def write_tokens(
    texts: Iterable[tuple[int, str]],
    tokenizer: Tokenizer,
    in_val: Sequence[bool],
    train: Split,
    val: Split,
) -> int:
    """The second pass: append each document's ids to its split. Returns the number of separators.

    A separator, where the tokenizer has one, stands between the documents of a split.
    """
    from data import tokenizer as tk

    between = (
        b""
        if tokenizer.separator is None
        else tokenizer.separator.to_bytes(tokenizer.dtype.itemsize, "little")
    )
    current, separators = -1, 0
    texts = iter(texts) if tokenizer.cuts_anywhere else tk.safe_chunks(texts, tk.CHUNK_CHARACTERS)
    while batch := list(islice(texts, 1 if tokenizer.cuts_anywhere else BATCH)):
        for (document, text), ids in zip(
            batch, tokenizer.encode_batch([text for _, text in batch]), strict=True
        ):
            split = val if in_val[document] else train
            if document != current:
                if between and split.documents:
                    split.file.write(between)
                    split.tokens += 1
                    separators += 1
                split.documents += 1
                current = document
            split.file.write(ids)
            split.tokens += len(ids)
            split.bytes += len(text) if text.isascii() else len(text.encode())
    return separators


def split_tokens(tokenizer: Tokenizer, val_fraction: float, train: Split, val: Split) -> None:
    """Move the last of one document's tokens from train to val.

    Of n tokens train keeps int((1 - val_fraction) * n), computed exactly: in floats, (1 - 0.9) * 10
    is less than 1.
    """
    import numpy as np

    n_train = int((1 - Fraction(str(val_fraction))) * train.tokens)
    lengths, end = tokenizer.byte_lengths(), n_train * tokenizer.dtype.itemsize
    train.file.seek(end)
    while chunk := train.file.read(1 << 18):
        val.file.write(chunk)
        val.bytes += int(lengths[np.frombuffer(chunk, tokenizer.dtype)].sum())
    train.file.truncate(end)
    train.tokens, val.tokens = n_train, train.tokens - n_train
    train.bytes -= val.bytes
    val.documents = 1


def write_folder(
    folder: Path, options: Options, corpus: Corpus, tokenizer: Tokenizer, characters: array
) -> dict:
    """Write train.bin, val.bin and dataset.json; return what the last holds. UserError for a corpus
    too small or not at rest.
    """
    records, n_documents = corpus.records, len(characters)
    in_val = (
        choose_validation(characters, options.val_fraction, options.seed).tolist()
        if n_documents > 1
        else [False]
    )
    with (
        (folder / "train.bin").open("w+b") as train_file,
        (folder / "val.bin").open("w+b") as val_file,
    ):
        train, val = Split(train_file), Split(val_file)
        try:
            with _progress(corpus, "encode") as bar:
                separators = write_tokens(
                    corpus.documents(bar.update), tokenizer, in_val, train, val
                )
            changed = corpus.records != records
        except (
            UserError,
            IndexError,
        ):  # the first pass met no unreadable text, no unknown character and no further document
            changed = True
        if changed:
            raise UserError(
                f"{corpus.name} changed while it was read; start again when it is at rest"
            )
        if n_documents == 1:
            split_tokens(tokenizer, options.val_fraction, train, val)
        if min(train.tokens, val.tokens) < 2:
            raise UserError(
                f"{corpus.name} is too small: {sum(characters):,} characters in {n_documents:,} document(s) make "
                f"{train.tokens:,} tokens for training and {val.tokens:,} for validation\n"
                "each needs 2, and more than one context to be of use"
            )
        dataset = {
            "format": FORMAT,
            "tokenizer": tokenizer.spec(),
            "dtype": tokenizer.dtype.name,
            "splits": {
                name: {
                    "tokens": split.tokens,
                    "bytes": split.bytes,
                    "documents": split.documents,
                    "sha256": _flush(split.file),
                }
                for name, split in (("train", train), ("val", val))
            },
            "documents": n_documents,
            "characters": sum(characters),
            "separators": separators,
            "sources": records,
            "seed": options.seed,
            "val_fraction": options.val_fraction,
            "options": options.recorded(),
        }
    (folder / "dataset.json").write_text(json.dumps(dataset, indent=1) + "\n", encoding="utf-8")
    return dataset


def _flush(file: BinaryIO) -> str:
    """Bring a file to the disk itself and return its SHA-256, the one while doing the other."""
    file.flush()
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(os.fsync, file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushed.result()  # an error comes out here
    return digest


def prepare(options: Options) -> int:
    """Prepare what `options` describe and print what was done. UserError as everywhere,
    MachineError if the disk fails.
    """
    from data.corpora import open_corpus

    if not 0 < options.val_fraction < 1:
        raise UserError(
            f"--val-fraction {options.val_fraction} must lie between 0 and 1, as 0.1 does"
        )
    if options.vocab_size != Options.vocab_size and options.tokenizer != "bpe":
        raise UserError(
            f"--vocab-size is for --tokenizer bpe alone: the size of {options.tokenizer} follows from what it is"
        )
    corpus = open_corpus(options.corpus, options.field, options.encoding)
    out = options.out or Path("data", "prepared", f"{corpus.name}-{options.tokenizer}")
    if _is_prepared(out, options, corpus):
        print(f"already prepared: {out}")
        return _next_command(out)
    began = time.perf_counter()
    tokenizer, characters = make_tokenizer(options, corpus)
    for path in out.parent.glob(f"{out.name}.partial-*"):
        print(f"in use by another run, or left by one that was killed: {path}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    try:
        with work:
            new, old = Path(work.name, "new"), Path(work.name, "old")
            new.mkdir()
            dataset = write_folder(new, options, corpus, tokenizer, characters)
            try:  # the old folder stands until the new one is whole, and comes back if that can't take its place
                if out.exists():
                    os.rename(out, old)
                os.rename(new, out)
            finally:
                if old.exists() and not out.exists():
                    os.rename(old, out)
    except OSError as error:  # a full disk, say; reading raises UserError
        raise MachineError(
            f"cannot write {out}: {error.strerror or error}; nothing was kept"
        ) from None
    _report(dataset, tokenizer, options)
    print(
        "".join(f"{event}: {count:,}\n" for event, count in corpus.events.items() if count), end=""
    )
    seconds, n_bytes = (
        time.perf_counter() - began,
        sum(split["bytes"] for split in dataset["splits"].values()),
    )
    print(
        f"written to {out} in {seconds:.1f} s ({n_bytes / seconds / 1e6:,.0f} MB of text a second)"
    )
    return _next_command(out)


def _is_prepared(out: Path, options: Options, corpus: Corpus) -> bool:
    """True if `out` holds what would be written; False if it is missing, empty or may be replaced;
    UserError otherwise.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir() or {path.name for path in out.iterdir()} != {
        "train.bin",
        "val.bin",
        "dataset.json",
    }:
        raise UserError(
            f"{out} exists and is not a prepared corpus alone, so it is left as it is; choose another --out"
        )
    if options.overwrite:
        return False
    from data.dataset import Dataset

    found = Dataset(out).info  # UserError for a damaged folder, or one of another format
    there = found | found["options"]
    wanted = options.recorded() | {"seed": options.seed, "val_fraction": options.val_fraction}
    differences = [
        f"{key} {there[key]!r}, not {value!r}"
        for key, value in wanted.items()
        if there[key] != value
    ]
    if not differences:
        with _progress(corpus, "compare") as bar:
            for _ in corpus.documents(bar.update):
                pass
        differences = ["other source text"] * (corpus.records != found["sources"])
    if differences:
        raise UserError(
            f"{out} holds {'; '.join(differences)}\n--overwrite replaces it, --out DIR leaves it alone"
        )
    return True


def _report(dataset: dict, tokenizer: Tokenizer, options: Options) -> None:
    n_tokens = sum(split["tokens"] for split in dataset["splits"].values())
    print(f"corpus: {', '.join(source['name'] for source in dataset['sources'][:5])}")
    print(
        f"documents: {dataset['documents']:,}, characters: {dataset['characters']:,}, tokens: {n_tokens:,}"
    )
    print(f"characters per token: {dataset['characters'] / n_tokens:.2f}")
    print(
        f"vocabulary: {tokenizer.vocab_size:,} ids ({tokenizer.kind}), stored as {dataset['dtype']}"
    )
    if options.tokenizer == "bpe" and tokenizer.vocab_size < options.vocab_size:
        print(
            f"  fewer than the {options.vocab_size:,} asked for: the corpus has no more pairs to merge"
        )
    for name, split in dataset["splits"].items():
        print(
            f"{name}: {split['tokens']:,} tokens ({split['tokens'] / n_tokens:.1%}), documents: {split['documents']:,}"
        )
    print(
        f"separators inserted: {dataset['separators']:,}"
        + ("" if tokenizer.separator is not None else " (none asked for)")
    )


def _next_command(out: Path) -> int:
    name = shlex.quote(out.as_posix())
    own = out == Path("data", "prepared", "shakespeare-char")
    print(
        "next: python train.py shakespeare-char"
        + ("" if own else f" --data {name} --out {shlex.quote(f'runs/{out.name}')}")
    )
    return 0


def _progress(corpus: Corpus, description: str):
    from tqdm import tqdm

    # None: silent where standard error is not a terminal
    return tqdm(
        total=corpus.size(), desc=description, unit="B", unit_scale=True, leave=False, disable=None
    )


def main() -> int:
    """Parse the command line and prepare."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)  # so that the unfinished folder is removed
    return prepare(options)


if __name__ == "__main__":
    run_command(main)
