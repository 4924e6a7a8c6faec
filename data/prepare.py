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
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedRandom
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro

from data.command_line import parse_options
from data.locking import FolderLock
from data.names import CORPORA, SHAKESPEARE, PatternName, TokenizerName
from data.prompts import read_escapes
from data.split import (
    Split,
    by_line,
    cut_end,
    dropped_event,
    plan_split,
    separator_bytes,
    split_on,
)
from errors import MachineError, UserError, run_command

if TYPE_CHECKING:
    import numpy as np

    from data.documents import Corpus
    from data.order import LineSample
    from data.tokenizer import Alphabet, Tokenizer
    from data.vocabulary import UnknownCharacters

LATER_OPTIONS = {
    "pattern": "gpt4",
    "lines": False,
    "split_on": None,
    "borrowed": False,
    "unknown": "error",
    "format": "auto",
    "skip_broken": False,
}
"""What dataset.json leaves out at these values, so that it reads as it did before there were
such options.
"""
USUAL_DELIMITER = "<|endoftext|>"  # of TinyStories, web dumps and others
PRESET_OF = {
    "data/prepared/shakespeare-char": "shakespeare-char",
    "data/prepared/induction-char": "induction",
}
"""Folders that a preset trains on unless told otherwise."""
BATCH = 256  # texts that the cores share out among themselves, where encoding needs them all
CORPUS_HELP = (
    f"{', '.join(CORPORA)}, or paths: text, JSON Lines, JSON, Parquet, CSV (with --field), any of "
    "them gzipped, folders, - for standard input, hf:OWNER/NAME[/CONFIGURATION][:SPLIT] for a "
    "dataset of huggingface.co (with the package datasets; split train unless named)"
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
    pattern: PatternName = "gpt4"
    """bpe only: how text is cut into pieces before pairs are merged, as by GPT-4 (digits in threes)
    or as by GPT-2
    """
    val_fraction: float = 0.1
    """share of the text kept for validation"""
    out: Path | None = None
    """folder to write (data/prepared/CORPUS-TOKENIZER unless given)"""
    separator: bool = False
    """put a separator id between documents with char and byte too, as bpe and gpt2 always do"""
    field: Annotated[str | None, tyro.conf.arg(aliases=["--column"])] = None
    """the field of JSON or column of Parquet or CSV that holds the text (unless given: text; CSV is
    read only if it is given)
    """
    format: Literal["auto", "text", "jsonl", "csv", "tsv"] = "auto"
    """auto: files are recognised by their content; text: each is plain text, whatever it looks
    like; jsonl, csv: each is that; tsv: tabs between cells, and quotes are ordinary characters
    """
    skip_broken: bool = False
    """skip broken rows of JSON, CSV and Parquet, and count them, in place of stopping at the first
    """
    encoding: str | None = None
    """encoding of the text, where it is not UTF-8"""
    seed: int = 1337
    """draws the documents kept for validation"""
    overwrite: bool = False
    """replace a prepared folder"""
    lines: bool = False
    """each line is a document, as in a list of names: validation is lines drawn at random"""
    split_on: str | None = None
    r"""text that stands between two documents, such as '<|endoftext|>': it is dropped and counted;
    \n, \t and \\ are read as newline, tab and backslash
    """
    tokenizer_from: Path | None = None
    """take the vocabulary of a run, a prepared folder or a checkpoint, to fine-tune that run, or of
    a tokenizer.json of the library tokenizers
    """
    unknown: Literal["error", "drop"] = "error"
    """with --tokenizer-from: refuse characters that the vocabulary lacks, or leave them out"""
    check: Path | None = None
    """prepare nothing: read a prepared folder through, compare its digests and look at every id"""

    def recorded(self) -> dict:
        """The options that decide the content of the files, as dataset.json keeps them. What is
        left at its default and came later is not among them.
        """
        names = ("tokenizer", "separator", "encoding")
        is_trained = self.tokenizer == "bpe" and self.tokenizer_from is None
        vocab_size = self.vocab_size if is_trained else None
        kept = {"vocab_size": vocab_size, **{name: getattr(self, name) for name in names}}
        kept["field"] = self.field or "text"
        later = {
            "pattern": self.pattern,
            "lines": self.lines,
            "split_on": self.split_on,
            "borrowed": self.tokenizer_from is not None,
            "unknown": self.unknown,
            "format": self.format,
            "skip_broken": self.skip_broken,
        }
        for name, value in later.items():
            if value != LATER_OPTIONS[name]:
                kept[name] = value
        return kept


# --- the first pass: count ---


def delimiter(options: Options) -> str:
    """What --split-on means, with line ends as the text has them once it is read; "" without."""
    text = read_escapes(options.split_on or "")
    return text.replace("\r\n", "\n").replace("\r", "\n")


class Count:
    """What the first pass learns of the documents, a chunk of text at a time."""

    def __init__(self, alphabet: Alphabet | None, lines: LineSample | None = None):
        from data.characters import Survey

        self.characters = array("Q")
        """Of each document."""
        self.alphabet = alphabet
        """The characters there are; None where nobody asks for them, as that takes time."""
        self.lines = lines
        """Tells a list in an order; None where lines are documents anyway."""
        self.survey = Survey()
        """Of characters that hint at a fault."""
        self.blank = True
        """True as long as there was white space only."""
        self.n_spelled = 0
        """How often the text spells what usually stands between documents."""

    def add(self, document: int, text: str) -> None:
        if document == len(self.characters):
            self.characters.append(0)
        self.characters[document] += len(text)
        self.blank = self.blank and text.isspace()
        self.survey.add(text)
        self.n_spelled += text.count(USUAL_DELIMITER)
        if self.alphabet is not None:
            self.alphabet.add(text)
        if self.lines is not None:
            self.lines.add(document, text)

    def watch(self, texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Hand on (document, chunk of its text), and count what passes."""
        for document, text in texts:
            self.add(document, text)
            yield document, text


def read_documents(
    options: Options,
    corpus: Corpus,
    progress: Callable[[int], object],
    unknown: UnknownCharacters | None,
) -> Iterator[tuple[int, str]]:
    """Yield (document, chunk of its text) as the options have it: the same in both passes."""
    texts = corpus.documents(progress)
    if options.lines:
        texts = by_line(texts, corpus.events)
    if options.split_on:
        texts = split_on(texts, delimiter(options), corpus.events)
    return texts if unknown is None else unknown.leave_out(texts)


def count(
    options: Options, corpus: Corpus, borrowed: Tokenizer | None = None
) -> tuple[Count, Tokenizer]:
    """The first pass: what there is, and the tokenizer for it, which may be `borrowed`. UserError
    for a corpus without text.

    A BPE is trained in the same pass, so that a large corpus is not read three times.
    """
    from data import order, tokenizer as tk, vocabulary

    tokenizer: Tokenizer = borrowed or tk.ByteTokenizer(options.separator)
    if options.tokenizer == "gpt2" and not borrowed:
        tokenizer = tk.load_gpt2()  # before the reading, which takes time: this may fail
    is_new = options.tokenizer == "char" and not borrowed
    counted = Count(
        tk.Alphabet() if is_new else None, None if options.lines else order.LineSample()
    )
    unknown = vocabulary.UnknownCharacters(borrowed) if borrowed else None
    with _progress(corpus, "survey") as bar:
        documents = read_documents(options, corpus, bar.update, unknown)
        if options.tokenizer == "bpe" and not borrowed:
            short = tk.safe_chunks(counted.watch(documents), 1 << 16)
            tokenizer = tk.train_bpe(
                (text for _, text in short), options.vocab_size, options.pattern
            )
        else:
            for document, text in documents:
                counted.add(document, text)
    if unknown and options.unknown == "error":
        n_symbols = tokenizer.vocab_size - (tokenizer.separator is not None)
        unknown.check(corpus.name, str(options.tokenizer_from), n_symbols)
    if counted.blank:
        raise UserError(_no_text(corpus, counted, unknown))
    if options.split_on and not corpus.events[dropped_event(delimiter(options))]:
        raise UserError(
            f"--split-on {options.split_on!r}: {corpus.name} never says that in "
            f"{sum(counted.characters):,} characters; spell it as the text does, or leave it out"
        )
    if counted.alphabet is not None:
        tokenizer = tk.CharTokenizer(counted.alphabet.symbols(), options.separator)
    return counted, tokenizer


def _no_text(corpus: Corpus, counted: Count, unknown: UnknownCharacters | None) -> str:
    n_characters = sum(counted.characters)
    found = f"only white space ({n_characters:,} characters)" if n_characters else "no text"
    if unknown and unknown.counts:
        found += f", without the {unknown.counts.total():,} characters that the vocabulary lacks,"
    return f"{corpus.name}: {found} in {corpus.size():,} bytes; give a text to learn from"


# --- the second pass: encode ---


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
    between = separator_bytes(tokenizer)
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
            split.starts.append(split.tokens)
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


def encode(
    folder: Path,
    options: Options,
    corpus: Corpus,
    tokenizer: Tokenizer,
    counted: Count,
) -> dict:
    """Write train.bin, val.bin and dataset.json; return what the last holds. UserError for a corpus
    too small or not at rest.
    """
    from data.dataset import FORMAT

    n_documents = len(counted.characters)
    n_characters = sum(counted.characters)
    in_val, is_cut = plan_split(counted.characters, options.val_fraction, options.seed)
    train_path = folder / "train.bin"
    val_path = folder / "val.bin"
    with train_path.open("w+b") as train_file, val_path.open("w+b") as val_file:
        train = Split(train_file)
        val = Split(val_file)
        n_separators = _encode_again(options, corpus, tokenizer, in_val.tolist(), train, val)
        n_cut = 0
        if is_cut:
            n_cut, more = cut_end(tokenizer, options.val_fraction, train, val)
            n_separators += more
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
            "sources": corpus.records,
            "seed": options.seed,
            "val_fraction": options.val_fraction,
            "options": options.recorded(),
            "inputs": list(options.corpus),
        }
        if n_documents > 1 and n_cut:
            dataset["tokens_cut_off"] = n_cut
    (folder / "dataset.json").write_text(json.dumps(dataset, indent=1) + "\n", encoding="utf-8")
    return dataset


def _encode_again(
    options: Options,
    corpus: Corpus,
    tokenizer: Tokenizer,
    in_val: Sequence[bool],
    train: Split,
    val: Split,
) -> int:
    """`write_tokens` of what the first pass has read. UserError where it is another text by now."""
    from data.vocabulary import UnknownCharacters

    counted_records = corpus.records
    unknown = UnknownCharacters(tokenizer) if options.unknown == "drop" else None
    try:
        with _progress(corpus, "encode") as bar:
            texts = read_documents(options, corpus, bar.update, unknown)
            n_separators = write_tokens(texts, tokenizer, in_val, train, val)
        changed = corpus.records != counted_records
    except (UserError, IndexError):
        # The first pass met no unreadable text, no unknown character and no further document.
        changed = True
    if changed:
        raise UserError(f"{corpus.name} changed while it was read; start again when it is at rest")
    if unknown and unknown.counts:
        event = f"characters left out, as the vocabulary lacks them: {unknown.listed()}; in all"
        corpus.events[event] = unknown.counts.total()
    return n_separators


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

    if options.check is not None:
        if options.corpus != Options.corpus:
            raise UserError(
                f"--check reads a prepared folder and prepares nothing: leave out "
                f"{' '.join(options.corpus)}"
            )
        return check(options.check)
    _check(options)
    borrowed = None
    if options.tokenizer_from is not None:
        from data.vocabulary import borrow_tokenizer

        borrowed = borrow_tokenizer(options.tokenizer_from)
        options = _like(options, borrowed)
    corpus = open_corpus(
        options.corpus, options.field, options.encoding, options.format, options.skip_broken
    )
    name = f"{corpus.name}-{options.tokenizer}"
    if options.tokenizer_from is not None:
        name = f"{corpus.name}-for-{options.tokenizer_from.resolve().stem}"
    out = options.out or Path("data", "prepared", name)
    if _is_prepared(out, options, corpus, borrowed):
        print(f"already prepared: {out}")
        _note_old_split(out, options.val_fraction)
        _print_next_command(out, options)
        return 0
    with contextlib.closing(FolderLock(out, out.with_name(f".{out.name}.lock"))) as lock:
        lock.take()
        return _prepare_into(out, options, corpus, borrowed)


def check(folder: Path) -> int:
    """Read a prepared folder through and say what was found. UserError where it is damaged."""
    from data.dataset import Dataset
    from data.tokenizer import load_tokenizer

    began = time.perf_counter()
    dataset = Dataset(folder)
    vocab_size = load_tokenizer(dataset.tokenizer_spec).vocab_size
    dataset.check_content(vocab_size, with_digests=True)
    seconds = time.perf_counter() - began
    for name, tokens in dataset.tokens.items():
        is_recorded = bool(dataset.info["splits"][name]["sha256"])
        print(
            f"{folder / name}.bin: {len(tokens):,} tokens, all ids below {vocab_size:,}, SHA-256 "
            f"{'as recorded' if is_recorded else 'not recorded'}"
        )
    megabytes = sum(tokens.nbytes for tokens in dataset.tokens.values()) / 1e6
    print(f"read through in {seconds:.1f} s ({megabytes / seconds:,.0f} MB a second)")
    return 0


def _note_old_split(out: Path, val_fraction: float) -> None:
    """Say so where a folder of several documents is from before the end of one could be cut."""
    from data.dataset import Dataset

    info = Dataset(out).info
    n_val = info["splits"]["val"]["tokens"]
    share = n_val / (n_val + info["splits"]["train"]["tokens"])
    if info["documents"] > 1 and "tokens_cut_off" not in info and abs(share - val_fraction) > 0.03:
        print(
            f"note: {share:.1%} of its tokens are for validation; --overwrite comes nearer to "
            f"--val-fraction {val_fraction} where that is because of one large document",
            file=sys.stderr,
        )


def _like(options: Options, borrowed: Tokenizer) -> Options:
    """The options with the tokenizer that was borrowed. UserError where they ask for another."""
    kind = cast(TokenizerName, borrowed.kind)
    has_separator = borrowed.separator is not None and borrowed.cuts_anywhere
    if options.tokenizer not in (Options.tokenizer, kind):
        raise UserError(
            f"--tokenizer {options.tokenizer}: the vocabulary of {options.tokenizer_from} is of "
            f"kind {kind}; leave --tokenizer out"
        )
    if options.separator and borrowed.separator is None:
        raise UserError(
            f"--separator: the vocabulary of {options.tokenizer_from} has no separator; leave it "
            "out, as one more id would fit no weights of that run"
        )
    return replace(options, tokenizer=kind, separator=has_separator)


def _prepare_into(
    out: Path, options: Options, corpus: Corpus, borrowed: Tokenizer | None = None
) -> int:
    """Prepare into a folder that no one else is preparing into."""
    began = time.perf_counter()
    counted, tokenizer = count(options, corpus, borrowed)
    for path in out.parent.glob(f"{out.name}.partial-*"):
        print(f"in use by another run, or left by one that was killed: {path}")
    with publish(out) as folder:
        dataset = encode(folder, options, corpus, tokenizer, counted)
    _report(dataset, tokenizer, options)
    for line in [*corpus.report(), *counted.survey.report()]:
        print(line)
    _note_order(dataset, counted, options)
    if counted.n_spelled > 1:  # once may be a mention
        print(
            f"note: the text spells {USUAL_DELIMITER} {counted.n_spelled:,} times, which is "
            f"ordinary text here: --split-on '{USUAL_DELIMITER}' makes documents of what stands "
            "between",
            file=sys.stderr,
        )
    if tokenizer.has_cut_runs:
        print(
            "note: runs of characters without a break, as in a genome, were cut into pieces before "
            "they were encoded; --tokenizer byte or char needs no breaks",
            file=sys.stderr,
        )
    seconds = time.perf_counter() - began
    megabytes = sum(split["bytes"] for split in dataset["splits"].values()) / 1e6
    rate = megabytes / seconds
    print(f"written to {out} in {seconds:.1f} s ({rate:,.0f} MB of text a second)")
    _print_next_command(out, options)
    return 0


def _note_order(dataset: dict, counted: Count, options: Options) -> None:
    """Say so where the end of a list was taken for validation, and the list is in an order."""
    is_cut = dataset["documents"] == 1 or "tokens_cut_off" in dataset
    if counted.lines is not None and is_cut:
        reason = counted.lines.why_uneven(options.val_fraction)
        if reason:
            print(
                f"note: {reason}, and validation is the last of them: --lines makes each line a "
                "document, and validation lines drawn at random",
                file=sys.stderr,
            )


def _check(options: Options) -> None:
    """UserError for options that nothing can be made of."""
    if not 0 < options.val_fraction < 1:
        raise UserError(
            f"--val-fraction {options.val_fraction} must lie between 0 and 1, as 0.1 does"
        )
    _check_of_bpe(options, "vocab_size", "the size")
    _check_of_bpe(options, "pattern", "the pattern")
    if options.split_on is not None and not options.split_on:
        raise UserError(
            "--split-on is empty: name the text between two documents, as '<|endoftext|>', or "
            "leave it out"
        )
    if options.split_on and options.lines:
        raise UserError(
            "--split-on and --lines both say where documents end: leave one of them out"
        )
    if options.tokenizer_from is None and options.unknown == "drop":
        raise UserError(
            "--unknown drop is for --tokenizer-from alone: "
            "a vocabulary made of the text lacks nothing of it"
        )


def _check_of_bpe(options: Options, name: str, what: str) -> None:
    """UserError where an option is given that is for training a BPE, and none is trained."""
    value = getattr(options, name)
    if value == getattr(Options, name):
        return
    flag = f"--{name.replace('_', '-')}"
    if options.tokenizer_from is not None:
        raise UserError(f"{flag} {value}: leave it out, as --tokenizer-from decides it")
    if options.tokenizer != "bpe":
        raise UserError(
            f"{flag} is for --tokenizer bpe alone: {what} of {options.tokenizer} follows from what "
            "it is"
        )


def _is_prepared(
    out: Path, options: Options, corpus: Corpus, borrowed: Tokenizer | None = None
) -> bool:
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
    from data.tokenizer import load_tokenizer

    dataset = Dataset(out)  # UserError for a damaged folder, or one of another format
    found = dataset.info
    given = {"seed": options.seed, "val_fraction": options.val_fraction}
    wanted = LATER_OPTIONS | options.recorded() | given
    there = LATER_OPTIONS | found.get("options", {})
    there |= {key: found.get(key) for key in given}
    differences = [
        f"{key} {there.get(key)!r}, not {value!r}"
        for key, value in wanted.items()
        if there.get(key) != value
    ]
    if borrowed is not None and borrowed.spec() != found["tokenizer"]:
        differences.append("another vocabulary")
    if not differences:
        with _progress(corpus, "compare") as bar:
            for _ in corpus.documents(bar.update):
                pass  # reading it all is what fills `records`
        if corpus.records != found.get("sources"):
            differences.append("other source text")
    if differences:
        raise UserError(
            f"{out} holds {'; '.join(differences)}\n"
            "--overwrite replaces it, --out DIR leaves it alone"
        )
    dataset.check_content(load_tokenizer(dataset.tokenizer_spec).vocab_size, with_digests=True)
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
    if options.tokenizer_from is not None:
        print(f"  taken from {options.tokenizer_from}")
    elif options.tokenizer == "bpe" and n_ids < options.vocab_size:
        asked = f"{options.vocab_size:,}"
        print(f"  fewer than the {asked} asked for: the corpus has no more pairs to merge")
    for name, split in dataset["splits"].items():
        share = f"{split['tokens'] / n_tokens:.1%}"
        print(f"{name}: {split['tokens']:,} tokens ({share}), documents: {split['documents']:,}")
    if n_cut := dataset.get("tokens_cut_off"):
        print(
            f"  the last {n_cut:,} tokens of training's documents went to validation, as whole "
            f"documents come no nearer than a point to --val-fraction {options.val_fraction}"
        )
    none = " (none asked for)" if tokenizer.separator is None else ""
    print(f"separators inserted: {dataset['separators']:,}{none}")


def _print_next_command(out: Path, options: Options) -> None:
    data = shlex.quote(out.as_posix())
    run = shlex.quote(f"runs/{out.name}")
    preset = PRESET_OF.get(out.as_posix())
    command = f"python train.py {preset or 'shakespeare-char'}"
    source = options.tokenizer_from
    if source is not None and (tuning := _fine_tuning(source)):
        command = f"{tuning} --data {data} --out {run}"
    elif preset is None:
        command += f" --data {data} --out {run}"
    print(f"next: {command}")


def _fine_tuning(source: Path) -> str:
    """The beginning of the command that fine-tunes the run whose vocabulary was taken; "" where it
    was not a run's.
    """
    from data.vocabulary import run_folder

    folder = run_folder(source)
    if folder is None:
        return ""
    weights = folder if source.name == "config.json" else source
    config = shlex.quote((folder / "config.json").as_posix())
    return f"python train.py {config} --init-from {shlex.quote(weights.as_posix())}"


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
