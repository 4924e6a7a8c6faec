"""Prepare a corpus: python -m data.prepare [CORPUS or PATH ...] --tokenizer char|byte|bpe|gpt2

Two passes over the text, a chunk at a time: the first counts documents and characters and builds the vocabulary, the second
writes train.bin, val.bin and dataset.json into a folder beside the one asked for, which takes its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import time
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import tyro

from data import tokenizer as tk
from data.corpora import Corpus, open_corpus
from errors import MachineError, UserError, run_command

if TYPE_CHECKING:
    import numpy as np

FORMAT = 1  # of dataset.json
FILES = {"train.bin", "val.bin", "dataset.json"}
BATCH_CHARACTERS = 1 << 20  # text encoded at once, per core


@dataclass(frozen=True)
class Options:
    """Turn text into token files for train.py."""

    corpus: Annotated[tuple[str, ...], tyro.conf.Positional] = ("shakespeare",)
    """shakespeare, tinyshakespeare, stdlib, or paths: text, .jsonl, .parquet, any of them .gz, folders, - for standard input"""
    tokenizer: Literal["char", "byte", "bpe", "gpt2"] = "char"
    """char: one id per character; byte: UTF-8; bpe: trained on the corpus; gpt2: GPT-2's own"""
    vocab_size: int | None = None
    """bpe only: ids in all, the separator among them (4,096 unless given)"""
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

    @property
    def bpe_size(self) -> int:
        """Ids of a BPE as asked for."""
        return 4096 if self.vocab_size is None else self.vocab_size

    def recorded(self) -> dict:
        """The options that decide the content of the files, as dataset.json keeps them."""
        vocab_size = self.bpe_size if self.tokenizer == "bpe" else None
        names = ("tokenizer", "separator", "field", "encoding")
        return {"vocab_size": vocab_size, **{name: getattr(self, name) for name in names}}


class Survey:
    """What the first pass learns: characters and UTF-8 bytes of each document, and the alphabet if one is asked for."""

    def __init__(self, alphabet: tk.Alphabet | None):
        self.alphabet = alphabet
        self.characters, self.bytes = array("Q"), array("Q")
        self.blank = True  # nothing but white space so far

    def watch(self, texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Pass (document, text) on and take note."""
        for document, text in texts:
            if document == len(self.characters):
                self.characters.append(0)
                self.bytes.append(0)
            self.characters[document] += len(text)
            self.bytes[document] += len(text) if text.isascii() else len(text.encode())
            self.blank = self.blank and text.isspace()
            if self.alphabet:
                self.alphabet.add(text)
            yield document, text


def make_tokenizer(options: Options, corpus: Corpus) -> tuple[tk.Tokenizer, Survey]:
    """The first pass. UserError for a corpus without text."""
    tokenizer: tk.Tokenizer | None = tk.load_gpt2() if options.tokenizer == "gpt2" else None  # fails before the reading
    survey = Survey(tk.Alphabet() if options.tokenizer == "char" else None)
    with _progress(corpus, "survey") as bar:
        texts = survey.watch(corpus.documents(bar.update))
        if options.tokenizer == "bpe":
            tokenizer = tk.train_bpe((text for _, text in tk.safe_chunks(texts, 1 << 16)), options.bpe_size)
        for _ in texts:
            pass
    if survey.blank:
        found = f"only white space ({sum(survey.characters):,} characters)" if survey.characters else "no text"
        raise UserError(f"{corpus.name}: {found} in {sum(s['bytes'] for s in corpus.records):,} bytes; give a text to learn from")
    if survey.alphabet:
        tokenizer = tk.CharTokenizer(survey.alphabet.symbols(), options.separator)
    return tokenizer or tk.ByteTokenizer(options.separator), survey


def choose_validation(characters: Iterable[int], val_fraction: float, seed: int) -> np.ndarray:
    """Which of two or more documents are for validation: a boolean per document, neither all nor none.

    In a seeded order, a document is taken where it still fits into `val_fraction` of the characters; one more is
    taken if that comes closer to it.
    """
    import numpy as np

    characters = np.array(characters, np.int64)
    chosen, missing = np.zeros(len(characters), bool), val_fraction * characters.sum()
    for document in np.random.default_rng(seed).permutation(len(characters)):
        if characters[document] <= missing:
            chosen[document] = True
            missing -= characters[document]
    distance = np.where(chosen, np.inf, abs(characters - missing))
    if distance.min() < missing or not chosen.any():  # in the second case every document is too large: the smallest, then
        chosen[distance.argmin()] = True
    if chosen.all():
        chosen[characters.argmin()] = False
    return chosen


def batches(texts: Iterable[tuple[int, str]], size: int) -> Iterator[list[tuple[int, str]]]:
    """Group (document, text) into lists of about `size` characters, and of at most 50,000 texts."""
    batch, n = [], 0
    for item in texts:
        batch.append(item)
        n += len(item[1])
        if n >= size or len(batch) == 50_000:
            yield batch
            batch, n = [], 0
    if batch:
        yield batch


def write_tokens(
    texts: Iterable[tuple[int, str]], tokenizer: tk.Tokenizer, in_val: Iterable[bool], files: tuple[BinaryIO, BinaryIO]
) -> tuple[list[int], int]:
    """The second pass: append each document's ids to the file of its split, (train, val). Returns tokens of each, separators.

    `in_val` says of each document whether it is for validation. A separator, where the tokenizer has one, stands
    between the documents of a split.
    """
    import numpy as np

    dtype = tk.dtype_for(tokenizer.vocab_size)
    between = b"" if tokenizer.separator is None else np.array([tokenizer.separator], dtype).tobytes()
    in_val, latest, tokens, separators = list(map(int, in_val)), [None, None], [0, 0], 0
    size = BATCH_CHARACTERS
    if not tokenizer.cuts_anywhere:
        texts, size = tk.safe_chunks(texts), min(BATCH_CHARACTERS * tk.cpu_cores(), 1 << 25)
    for batch in batches(texts, size):
        for (document, _), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
            split = in_val[document] if document < len(in_val) else 0  # more than were surveyed: `prepare` sees that and refuses
            if between and latest[split] not in (None, document):
                files[split].write(between)
                separators += 1
                tokens[split] += 1
            latest[split] = document
            files[split].write(ids)
            tokens[split] += len(ids)
    return tokens, separators


def split_tokens(tokenizer: tk.Tokenizer, n: int, val_fraction: float, files: tuple[BinaryIO, BinaryIO]) -> tuple[list[int], int]:
    """Move the last of one document's `n` tokens from train to val. Returns tokens of each, and the UTF-8 bytes of val.

    train keeps int((1 - val_fraction) * n), computed exactly: in floats, (1 - 0.9) * 10 is less than 1.
    """
    import numpy as np

    train, val = files
    n_train = int((1 - Fraction(str(val_fraction))) * n)
    dtype, lengths, n_bytes = np.dtype(tk.dtype_for(tokenizer.vocab_size)), tokenizer.byte_lengths(), 0
    train.seek(n_train * dtype.itemsize)
    while chunk := train.read(1 << 20):
        val.write(chunk)
        n_bytes += int(lengths[np.frombuffer(chunk, dtype)].sum())
    train.truncate(n_train * dtype.itemsize)
    return [n_train, n - n_train], n_bytes


def prepare(options: Options) -> int:
    """Prepare what `options` describe and print what was done. UserError as everywhere, MachineError if the disk fails."""
    if not 0 < options.val_fraction < 1:
        raise UserError(f"--val-fraction {options.val_fraction} must lie between 0 and 1, as 0.1 does")
    if options.vocab_size is not None and options.tokenizer != "bpe":
        raise UserError(f"--vocab-size is for --tokenizer bpe alone: the size of {options.tokenizer} follows from what it is")
    if options.tokenizer == "bpe" and not 257 <= options.bpe_size <= 1 << 24:
        raise UserError(f"--vocab-size {options.bpe_size} is not between 257 (256 bytes and a separator) and 16,777,216")
    corpus = open_corpus(options.corpus, options.field, options.encoding)
    out = options.out or Path("data", "prepared", f"{corpus.name}-{options.tokenizer}")
    if out.exists() and not _may_write(out, options, corpus):
        print(f"already prepared: {out}")
        return _next_command(out)
    began = time.perf_counter()
    tokenizer, survey = make_tokenizer(options, corpus)
    events, records = dict(corpus.events), corpus.records
    n_documents, n_characters = len(survey.characters), sum(survey.characters)
    in_val = choose_validation(survey.characters, options.val_fraction, options.seed) if n_documents > 1 else [False]

    _remove_leftovers(out)
    work = out.parent / f"{out.name}.partial-{os.getpid()}"
    fresh = work / "new"
    try:
        fresh.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    try:
        with (fresh / "train.bin").open("w+b") as train, (fresh / "val.bin").open("w+b") as val:
            try:
                with _progress(corpus, "encode") as bar:
                    tokens, separators = write_tokens(corpus.documents(bar.update), tokenizer, in_val, (train, val))
                changed = corpus.records != records
            except UserError:  # the first pass met neither unreadable text nor an unknown character
                changed = True
            if changed:
                raise UserError(f"{corpus.name} changed while it was read; start again when it is at rest")
            n_bytes = [sum(survey.bytes), 0]
            if n_documents == 1:
                tokens, n_bytes[1] = split_tokens(tokenizer, tokens[0], options.val_fraction, (train, val))
            else:
                n_bytes[1] = sum(n for n, chosen in zip(survey.bytes, in_val, strict=True) if chosen)
            n_bytes[0] -= n_bytes[1]
            if min(tokens) < 2:
                raise UserError(
                    f"{corpus.name} is too small: {n_characters:,} characters in {n_documents:,} document(s) make {tokens[0]:,} "
                    f"tokens for training and {tokens[1]:,} for validation\neach needs 2, and more than one context to be of use"
                )
            digests = [_flush(train), _flush(val)]
        in_split = [n_documents - sum(map(int, in_val)), sum(map(int, in_val)) or 1]  # one document lies in both
        dataset = {
            "format": FORMAT,
            "tokenizer": tokenizer.spec(),
            "dtype": {"<u2": "uint16", "<u4": "uint32"}[tk.dtype_for(tokenizer.vocab_size)],
            "splits": {
                name: {"tokens": tokens[i], "bytes": n_bytes[i], "documents": in_split[i], "sha256": digests[i]}
                for i, name in enumerate(("train", "val"))
            },
            "documents": n_documents,
            "characters": n_characters,
            "separators": separators,
            "sources": records,
            "seed": options.seed,
            "val_fraction": options.val_fraction,
            "options": options.recorded(),
        }
        with (fresh / "dataset.json").open("w+b") as file:
            file.write(json.dumps(dataset, indent=1).encode() + b"\n")
            _flush(file)
        _flush_folder(fresh)
        replaced = out.exists()
        if replaced:
            os.rename(out, work / "old")
        try:
            os.rename(fresh, out)
        except BaseException:
            if replaced:
                os.rename(work / "old", out)
            raise
        _flush_folder(out.parent)
    except OSError as error:  # a full disk, say; reading raises UserError
        raise MachineError(f"cannot write {out}: {error.strerror or error}; nothing was kept") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)

    _report(dataset, tokenizer, options)
    print("".join(f"{event}: {count:,}\n" for event, count in events.items() if count), end="")
    seconds = time.perf_counter() - began
    print(f"written to {out} in {seconds:.1f} s ({sum(n_bytes) / seconds / 1e6:,.0f} MB of text a second)")
    return _next_command(out)


def _report(dataset: dict, tokenizer: tk.Tokenizer, options: Options) -> None:
    n_tokens = sum(split["tokens"] for split in dataset["splits"].values())
    print(f"corpus: {', '.join(source['name'] for source in dataset['sources'][:5])}")
    print(f"documents: {dataset['documents']:,}, characters: {dataset['characters']:,}, tokens: {n_tokens:,}")
    print(f"characters per token: {dataset['characters'] / n_tokens:.2f}")
    print(f"vocabulary: {tokenizer.vocab_size:,} ids ({tokenizer.kind}), stored as {dataset['dtype']}")
    if options.tokenizer == "bpe" and tokenizer.vocab_size < options.bpe_size:
        print(f"  fewer than the {options.bpe_size:,} asked for: the corpus has no more pairs to merge")
    for name, split in dataset["splits"].items():
        print(f"{name}: {split['tokens']:,} tokens ({split['tokens'] / n_tokens:.1%}), documents: {split['documents']:,}")
    print(f"separators inserted: {dataset['separators']:,}" + ("" if tokenizer.separator is not None else " (none asked for)"))


def _next_command(out: Path) -> int:
    name = shlex.quote(out.as_posix())
    own = out == Path("data", "prepared", "shakespeare-char")
    print("next: python train.py shakespeare-char" + ("" if own else f" --data {name} --out {shlex.quote(f'runs/{out.name}')}"))
    return 0


def _progress(corpus: Corpus, description: str):
    from tqdm import tqdm

    # None: silent where standard error is not a terminal
    return tqdm(total=corpus.size(), desc=description, unit="B", unit_scale=True, leave=False, disable=None)


def _flush(file: BinaryIO) -> str:
    """Bring a file to the disk itself and return its SHA-256."""
    file.flush()
    with ThreadPoolExecutor(1) as pool:  # hashing while the disk works
        written = pool.submit(os.fsync, file.fileno())
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        written.result()
    return digest


def _flush_folder(folder: Path) -> None:
    """Bring names in `folder` to the disk itself, where the system can."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _may_write(out: Path, options: Options, corpus: Corpus) -> bool:
    """False if `out` holds what would be written; True if it is empty or may be replaced; UserError otherwise."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else {"?"}
    if not names:
        return True
    try:
        found = json.loads((out / "dataset.json").read_bytes())
        whole = names == FILES and found["splits"].keys() == {"train", "val"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{out} exists and is not a prepared corpus alone, so it is left as it is; choose another --out")
    if options.overwrite:
        return True
    wanted = {"format": FORMAT, **options.recorded(), "seed": options.seed, "val_fraction": options.val_fraction}
    there = {**found, **found.get("options", {})}
    there["tokenizer"] = found.get("options", {}).get("tokenizer")
    differences = [f"{key} {there.get(key)!r}, not {value!r}" for key, value in wanted.items() if there.get(key) != value]
    if not differences and found.get("sources") != corpus.hash_sources():  # reading comes last
        differences = ["other source text"]
    itemsize = {"uint16": 2, "uint32": 4}.get(found.get("dtype"), 0)
    for name, split in found["splits"].items():
        if not differences and (out / f"{name}.bin").stat().st_size != split["tokens"] * itemsize:
            differences = [f"a damaged {name}.bin"]
    if differences:
        raise UserError(f"{out} holds {'; '.join(differences)}\n--overwrite replaces it, --out DIR leaves it alone")
    return False


def _remove_leftovers(out: Path) -> None:
    """Remove what killed runs left beside `out`."""
    for path in out.parent.glob(f"{out.name}.partial-*"):
        try:
            if os.name == "posix":
                os.kill(int(path.name.rpartition("-")[2]), 0)  # signal 0 only asks whether the process lives
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except (ValueError, OSError):
            pass


def main() -> int:
    """Parse the command line and prepare."""
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))

    def stop(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)  # so that the unfinished folder is removed
    return prepare(options)


if __name__ == "__main__":
    run_command(main)
