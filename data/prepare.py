"""Prepare a corpus: python -m data.prepare [CORPUS or PATH ...] --tokenizer char|byte|bpe|gpt2

Two passes over the text, a chunk at a time: the first counts documents and characters and makes
the tokenizer, the second writes train.bin, val.bin and dataset.json into a folder beside the one
asked for, which takes its name only when it is whole.

numpy, and the modules that need it, are imported where they are used: `--help` is instant.
"""

from __future__ import annotations

import contextlib
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
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from io import BufferedRandom
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from data.command_line import parse_options
from data.locking import FolderLock
from data.names import CORPORA, SHAKESPEARE, TokenizerName
from errors import MachineError, UserError, run_command

if TYPE_CHECKING:
    import numpy as np

    from data.documents import Corpus
    from data.tokenizer import Alphabet, Tokenizer

BATCH = 256  # texts that the cores share out among themselves, where encoding needs them all
CORPUS_HELP = (
    f"{', '.join(CORPORA)}, or paths: text, .jsonl, .parquet, any of them .gz, folders, "
    "- for standard input"
)


@dataclass(frozen=True)
class Options:
    """Turn text into token files for train.py."""

    corpus: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(help=CORPUS_HELP)] = (
        SHAKESPEARE,
    )
    tokenizer: TokenizerName = "char"
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


# --- the first pass: count ---


class Count:
    """What the first pass learns of the documents, a chunk of text at a time."""

    def __init__(self, alphabet: Alphabet | None):
        self.characters = array("Q")
        """Of each document."""
        self.alphabet = alphabet
        """The characters there are; None where nobody asks for them, as that takes time."""
        self.blank = True
        """True as long as there was white space only."""

    def add(self, document: int, text: str) -> None:
        if document == len(self.characters):
            self.characters.append(0)
        self.characters[document] += len(text)
        self.blank = self.blank and text.isspace()
        if self.alphabet is not None:
            self.alphabet.add(text)

    def watch(self, texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Hand on (document, chunk of its text), and count what passes."""
        for document, text in texts:
            self.add(document, text)
            yield document, text


def count(options: Options, corpus: Corpus) -> tuple[Count, Tokenizer]:
    """The first pass: what there is, and the tokenizer for it. UserError for a corpus without text.

    A BPE is trained in the same pass, so that a large corpus is not read three times.
    """
    from data import tokenizer as tk

    tokenizer: Tokenizer = tk.ByteTokenizer(options.separator)
    if options.tokenizer == "gpt2":
        tokenizer = tk.load_gpt2()  # before the reading, which takes time: this may fail
    counted = Count(tk.Alphabet() if options.tokenizer == "char" else None)
    with _progress(corpus, "survey") as bar:
        documents = corpus.documents(bar.update)
        if options.tokenizer == "bpe":
            short = tk.safe_chunks(counted.watch(documents), 1 << 16)
            tokenizer = tk.train_bpe((text for _, text in short), options.vocab_size)
        else:
            for document, text in documents:
                counted.add(document, text)
    if counted.blank:
        n_characters = sum(counted.characters)
        found = f"only white space ({n_characters:,} characters)" if n_characters else "no text"
        raise UserError(
            f"{corpus.name}: {found} in {corpus.size():,} bytes; give a text to learn from"
        )
    if counted.alphabet is not None:
        tokenizer = tk.CharTokenizer(counted.alphabet.symbols(), options.separator)
    return counted, tokenizer


# --- which documents are for validation ---


def choose_validation(characters: Sequence[int], val_fraction: float, seed: int) -> np.ndarray:
    """Which documents are for validation: a boolean per document, neither all nor none if there are
    two or more; a single one is for training.

    In a seeded order, a document is taken where it still fits into `val_fraction` of the
    characters; one more is taken if that comes closer to it.
    """
    import numpy as np

    sizes = np.array(characters, np.int64)
    chosen = np.zeros(len(sizes), bool)
    if len(sizes) == 1:  # its end is for validation: `split_tokens`
        return chosen
    missing = val_fraction * sizes.sum()
    for document in np.random.default_rng(seed).permutation(len(sizes)):
        if sizes[document] <= missing:
            chosen[document] = True
            missing -= sizes[document]
    # What would remain or be exceeded if one more were taken. Where none is taken yet, every
    # document is too large, and it is the smallest.
    distance = np.where(chosen, np.inf, abs(sizes - missing))
    if distance.min() < missing or not chosen.any():
        chosen[distance.argmin()] = True
    if chosen.all():
        chosen[sizes.argmin()] = False
    return chosen


# --- the second pass: encode ---


@dataclass
class Split:
    """One of the two token files, and what was written into it."""

    file: BufferedRandom
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
    between = b""
    if tokenizer.separator is not None:
        between = tokenizer.separator.to_bytes(tokenizer.dtype.itemsize, "little")
    current = -1
    n_separators = 0
    for document, text, ids in _encoded(texts, tokenizer):
        split = val if in_val[document] else train
        if document != current:
            if between and split.documents:
                split.file.write(between)
                split.tokens += 1
                n_separators += 1
            split.documents += 1
            current = document
        split.file.write(ids.data)
        split.tokens += len(ids)
        split.bytes += len(text) if text.isascii() else len(text.encode())
    return n_separators


def _encoded(
    texts: Iterable[tuple[int, str]], tokenizer: Tokenizer
) -> Iterator[tuple[int, str, np.ndarray]]:
    """Yield (document, chunk of its text, ids of the chunk)."""
    from data import tokenizer as tk

    if tokenizer.cuts_anywhere:
        for document, text in texts:
            yield document, text, tokenizer.encode(text)
        return
    chunks = tk.safe_chunks(texts, tk.CHUNK_CHARACTERS)
    while batch := list(islice(chunks, BATCH)):
        batch_ids = tokenizer.encode_batch([text for _, text in batch])
        for (document, text), ids in zip(batch, batch_ids, strict=True):
            yield document, text, ids


def split_tokens(tokenizer: Tokenizer, val_fraction: float, train: Split, val: Split) -> None:
    """Move the last of one document's tokens from train to val.

    Of n tokens train keeps int((1 - val_fraction) * n), computed exactly: in floats, (1 - 0.9) * 10
    is less than 1.
    """
    import numpy as np

    n_tokens = train.tokens
    n_train = int((1 - Fraction(str(val_fraction))) * n_tokens)
    end = n_train * tokenizer.dtype.itemsize
    lengths = tokenizer.byte_lengths()
    train.file.seek(end)
    while chunk := train.file.read(1 << 18):
        val.file.write(chunk)
        val.bytes += int(lengths[np.frombuffer(chunk, tokenizer.dtype)].sum())
    train.file.truncate(end)
    train.tokens = n_train
    train.bytes -= val.bytes
    val.tokens = n_tokens - n_train
    val.documents = 1


def encode(
    folder: Path,
    options: Options,
    corpus: Corpus,
    tokenizer: Tokenizer,
    counted: Count,
    in_val: Sequence[bool],
) -> dict:
    """Write train.bin, val.bin and dataset.json; return what the last holds. UserError for a corpus
    too small or not at rest.
    """
    from data.dataset import FORMAT

    counted_records = corpus.records
    n_documents = len(counted.characters)
    n_characters = sum(counted.characters)
    train_path = folder / "train.bin"
    val_path = folder / "val.bin"
    with train_path.open("w+b") as train_file, val_path.open("w+b") as val_file:
        train = Split(train_file)
        val = Split(val_file)
        try:
            with _progress(corpus, "encode") as bar:
                texts = corpus.documents(bar.update)
                n_separators = write_tokens(texts, tokenizer, in_val, train, val)
            changed = corpus.records != counted_records
        except (UserError, IndexError):
            # The first pass met no unreadable text, no unknown character and no further document.
            changed = True
        if changed:
            raise UserError(
                f"{corpus.name} changed while it was read; start again when it is at rest"
            )
        if n_documents == 1:
            split_tokens(tokenizer, options.val_fraction, train, val)
        if min(train.tokens, val.tokens) < 2:
            raise UserError(
                f"{corpus.name} is too small: {n_characters:,} characters in {n_documents:,} "
                f"document(s) make {train.tokens:,} tokens for training and {val.tokens:,} for "
                "validation\n"
                "each needs 2, and more than one context to be of use"
            )
        dataset = {
            "format": FORMAT,
            "tokenizer": tokenizer.spec(),
            "dtype": tokenizer.dtype.name,
            "splits": {"train": _finished(train), "val": _finished(val)},
            "documents": n_documents,
            "characters": n_characters,
            "separators": n_separators,
            "sources": counted_records,
            "seed": options.seed,
            "val_fraction": options.val_fraction,
            "options": options.recorded(),
        }
    (folder / "dataset.json").write_text(json.dumps(dataset, indent=1) + "\n", encoding="utf-8")
    return dataset


def _finished(split: Split) -> dict:
    """What dataset.json says of a split, once it is on the disk itself."""
    return {
        "tokens": split.tokens,
        "bytes": split.bytes,
        "documents": split.documents,
        "sha256": _flush(split.file),
    }


def _flush(file: BufferedRandom) -> str:
    """Bring a file to the disk itself and return its SHA-256, the one while doing the other."""
    file.flush()
    with ThreadPoolExecutor(1) as pool:
        flushed = pool.submit(os.fsync, file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushed.result()  # an error comes out here
    return digest


# --- the folder takes its place ---


@contextmanager
def publish(out: Path) -> Iterator[Path]:
    """A new folder to write into. When the block ends without an error it takes the place of `out`.

    It is made beside `out`, so that taking its place is a renaming. Until then the old folder
    stands, and it comes back if the new one can't take its place. Nothing else is left behind.
    UserError where no folder can be made, MachineError if the disk fails later.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix=f"{out.name}.partial-", dir=out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    try:
        with work:
            new = Path(work.name, "new")
            old = Path(work.name, "old")
            new.mkdir()
            yield new
            try:
                if out.exists():
                    os.rename(out, old)
                os.rename(new, out)
            finally:
                if old.exists() and not out.exists():
                    os.rename(old, out)
    except OSError as error:  # a full disk, say; reading raises UserError
        reason = error.strerror or error
        raise MachineError(f"cannot write {out}: {reason}; nothing was kept") from None


# --- the command ---


def prepare(options: Options) -> int:
    """Prepare what `options` describe and print what was done. UserError as everywhere,
    MachineError if the disk fails.
    """
    from data.sources import open_corpus

    _check(options)
    corpus = open_corpus(options.corpus, options.field, options.encoding)
    out = options.out or Path("data", "prepared", f"{corpus.name}-{options.tokenizer}")
    if _is_prepared(out, options, corpus):
        print(f"already prepared: {out}")
        _print_next_command(out)
        return 0
    with contextlib.closing(FolderLock(out, out.with_name(f".{out.name}.lock"))) as lock:
        lock.take()
        return _prepare_into(out, options, corpus)


def _prepare_into(out: Path, options: Options, corpus: Corpus) -> int:
    """Prepare into a folder that no one else is preparing into."""
    began = time.perf_counter()
    counted, tokenizer = count(options, corpus)
    in_val = choose_validation(counted.characters, options.val_fraction, options.seed).tolist()
    for path in out.parent.glob(f"{out.name}.partial-*"):
        print(f"in use by another run, or left by one that was killed: {path}")
    with publish(out) as folder:
        dataset = encode(folder, options, corpus, tokenizer, counted, in_val)
    _report(dataset, tokenizer, options)
    for event, n in corpus.events.items():
        if n:
            print(f"{event}: {n:,}")
    seconds = time.perf_counter() - began
    megabytes = sum(split["bytes"] for split in dataset["splits"].values()) / 1e6
    rate = megabytes / seconds
    print(f"written to {out} in {seconds:.1f} s ({rate:,.0f} MB of text a second)")
    _print_next_command(out)
    return 0


def _check(options: Options) -> None:
    """UserError for options that nothing can be made of."""
    if not 0 < options.val_fraction < 1:
        raise UserError(
            f"--val-fraction {options.val_fraction} must lie between 0 and 1, as 0.1 does"
        )
    if options.vocab_size != Options.vocab_size and options.tokenizer != "bpe":
        raise UserError(
            "--vocab-size is for --tokenizer bpe alone: "
            f"the size of {options.tokenizer} follows from what it is"
        )


def _is_prepared(out: Path, options: Options, corpus: Corpus) -> bool:
    """True if `out` holds what would be written; False if it is missing, empty or may be replaced;
    UserError otherwise.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    own = {"train.bin", "val.bin", "dataset.json"}
    if not out.is_dir() or {path.name for path in out.iterdir()} != own:
        raise UserError(
            f"{out} exists and is not a prepared corpus alone, so it is left as it is; "
            "choose another --out"
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
                pass  # reading it all is what fills `records`
        if corpus.records != found["sources"]:
            differences.append("other source text")
    if differences:
        raise UserError(
            f"{out} holds {'; '.join(differences)}\n"
            "--overwrite replaces it, --out DIR leaves it alone"
        )
    return True


def _report(dataset: dict, tokenizer: Tokenizer, options: Options) -> None:
    n_documents = dataset["documents"]
    n_characters = dataset["characters"]
    n_tokens = sum(split["tokens"] for split in dataset["splits"].values())
    print(f"corpus: {', '.join(source['name'] for source in dataset['sources'][:5])}")
    print(f"documents: {n_documents:,}, characters: {n_characters:,}, tokens: {n_tokens:,}")
    print(f"characters per token: {n_characters / n_tokens:.2f}")
    n_ids = tokenizer.vocab_size
    print(f"vocabulary: {n_ids:,} ids ({tokenizer.kind}), stored as {dataset['dtype']}")
    if options.tokenizer == "bpe" and n_ids < options.vocab_size:
        asked = f"{options.vocab_size:,}"
        print(f"  fewer than the {asked} asked for: the corpus has no more pairs to merge")
    for name, split in dataset["splits"].items():
        share = f"{split['tokens'] / n_tokens:.1%}"
        print(f"{name}: {split['tokens']:,} tokens ({share}), documents: {split['documents']:,}")
    none = " (none asked for)" if tokenizer.separator is None else ""
    print(f"separators inserted: {dataset['separators']:,}{none}")


def _print_next_command(out: Path) -> None:
    command = "python train.py shakespeare-char"
    if out != Path("data", "prepared", "shakespeare-char"):  # the preset's own
        data = shlex.quote(out.as_posix())
        run = shlex.quote(f"runs/{out.name}")
        command += f" --data {data} --out {run}"
    print(f"next: {command}")


def _progress(corpus: Corpus, description: str):
    """A progress bar over the bytes of one pass."""
    from tqdm import tqdm

    return tqdm(
        desc=description,
        total=corpus.size(),
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None,  # silent where standard error is not a terminal
    )


def main() -> int:
    """Parse the command line and prepare."""
    options = parse_options(Options, config=(tyro.conf.FlagCreatePairsOff,))

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)  # so that the unfinished folder is removed
    return prepare(options)


if __name__ == "__main__":
    run_command(main)
