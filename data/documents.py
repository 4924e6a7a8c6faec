"""Files read as a stream of documents: one policy for all text, reported when it acts.

* UTF-8, strictly, whatever the locale; `--encoding` says otherwise. A byte-order mark is dropped,
  and tells UTF-16 and UTF-32. Bytes that do not decode end the reading, with file, offset and byte:
  nothing is replaced or skipped in silence.
* CRLF and lone CR become "\\n".
* A file named by the user may not hold NUL characters. (In a folder, `data.sources` takes such
  files for binary and skips them.)
* A text file is one document; so is a line of JSON Lines and a row of Parquet. Empty documents are
  skipped.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import shutil
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from errors import UserError

# A chunk of this size stays in the processor's cache, with all that becomes of it: three times as
# fast as chunks of 1 << 20.
CHUNK_BYTES = 1 << 18
HASHED_AT_ONCE = 1 << 18  # bytes that are worth a thread's attention
BOMS = {  # UTF-32 before UTF-16: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


class Readable(Protocol):
    """What a document is read from: anything with `read`."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; all that are left if it is negative."""
        ...


@dataclass(frozen=True)
class File:
    """One file of a source."""

    name: str
    """in messages"""
    key: str
    """its name within the source"""
    size: int
    """bytes on disk"""
    open: Callable[[], IO[bytes]]
    """opens it for a pass"""


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
        self.sources = sources
        self.field = field
        self.encoding = encoding or "utf-8"
        self.name = "+".join(Path(source.name.removesuffix(".gz")).stem for source in sources)[:80]
        self.events: Counter[str] = Counter()
        """What the policy did in the latest pass, in words, and how often."""
        self.records: list[dict] = []
        """Name, bytes and SHA-256 of each source as the latest pass read it."""
        try:
            "a".encode(self.encoding)
        except (LookupError, UnicodeError):  # "hex" and the like are no text encodings either
            raise UserError(
                f"--encoding {encoding}: Python knows no text encoding of that name"
            ) from None

    def size(self) -> int:
        """Bytes that a pass reads (of a compressed file: its bytes on disk)."""
        return sum(file.size for source in self.sources for file in source.files)

    def documents(
        self, progress: Callable[[int], object] = lambda n_bytes: None
    ) -> Iterator[tuple[int, str]]:
        """Yield (number of the document, chunk of its text), counted from 0; no chunk is empty.

        `progress` is told of bytes as they are read. UserError for what cannot be read as text.
        """
        self.events.clear()
        records = []
        n_documents = 0
        for source in self.sources:
            self.events["binary files skipped"] += source.n_binary
            with ThreadPoolExecutor(1) as pool:
                digest = Digest(pool)
                for file in source.files:
                    if len(source.files) > 1:  # their names go into the hash too
                        digest.update(file.key.encode(errors="surrogateescape"))
                    with reading(file.name), file.open() as raw:
                        for chunks in self._read(file, Tally(raw, digest, progress)):
                            empty = True
                            for text in filter(None, chunks):
                                empty = False
                                yield n_documents, text
                            if empty:
                                self.events["empty documents skipped"] += 1
                            else:
                                n_documents += 1
                sha256 = digest.hexdigest()
            n_bytes = sum(file.size for file in source.files)
            records.append({"name": source.name, "bytes": n_bytes, "sha256": sha256})
        self.records = records

    def _read(self, file: File, stream: Readable) -> Iterable[Iterable[str]]:
        """Yield each document of a file as its chunks."""
        name = file.name.lower()
        if name.endswith(".gz"):
            file_object: Any = stream  # gzip needs no more of it than `read`
            stream = gzip.GzipFile(fileobj=file_object)
        kind = Path(name.removesuffix(".gz")).suffix
        if kind == ".parquet":
            return self._parquet(file, stream)
        if kind in (".jsonl", ".ndjson"):
            return self._json_lines(file, stream)
        return [self._decode(file, stream)]

    def _decode(self, file: File, stream: Readable) -> Iterator[str]:
        """Yield the text of a byte stream according to the policy above; exact wherever the chunks
        happen to be cut.
        """
        chunk = stream.read(max(CHUNK_BYTES, 4))  # 4: the longest byte-order mark
        bom, encoding = self._encoding_of(chunk)
        decoder = codecs.getincrementaldecoder(encoding)("strict")
        offset = len(bom)
        chunk = chunk[offset:] or stream.read(CHUNK_BYTES)
        held = ""
        last = False
        while not last:
            last = not chunk
            try:
                text = held + decoder.decode(chunk, last)
            except UnicodeError as error:
                found = str(error)
                if isinstance(error, UnicodeDecodeError):
                    # The object that failed begins with bytes the decoder had held back.
                    position = offset + len(chunk) - len(error.object) + error.start
                    byte = error.object[error.start]
                    found = f"byte 0x{byte:02x} at offset {position:,} ({error.reason})"
                raise UserError(
                    f"{file.name} is not {encoding}: {found}\n"
                    "if you know how it is encoded, say so, "
                    "as in --encoding gbk or --encoding latin-1"
                ) from None
            if "\0" in text:
                raise UserError(
                    f"{file.name} holds a NUL byte at offset {offset + chunk.find(0):,}, "
                    "so it is not plain text\n"
                    "if it is UTF-16 without a byte-order mark, say --encoding utf-16-le (or -be)"
                )
            held = ""
            if text.endswith("\r") and not last:  # a "\n" may follow in the next chunk
                held = "\r"
                text = text[:-1]
            yield self._newlines(text)
            offset += len(chunk)
            chunk = stream.read(CHUNK_BYTES)

    def _encoding_of(self, beginning: bytes) -> tuple[bytes, str]:
        """The byte-order mark that a file begins with, or b"", and the encoding to read it in. A
        mark counts only where UTF-8 is expected.
        """
        bom = b""
        encoding = self.encoding
        if codecs.lookup(encoding).name == "utf-8":
            encoding = "utf-8"
            for mark, marked in BOMS.items():
                if beginning.startswith(mark):
                    bom = mark
                    encoding = marked
                    break
        if bom:
            self.events["byte-order marks dropped"] += 1
        if encoding != "utf-8":
            self.events[f"files read as {encoding}"] += 1
        return bom, encoding

    def _newlines(self, text: str) -> str:
        if "\r" not in text:
            return text
        self.events["line ends (CRLF or CR) made \\n"] += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _json_lines(self, file: File, stream: Readable) -> Iterator[list[str]]:
        for number, line in enumerate(_lines(self._decode(file, stream)), start=1):
            if line.strip():
                yield [self._newlines(self._json_text(line, f"{file.name}, line {number:,}"))]

    def _json_text(self, line: str, where: str) -> str:
        try:
            record = json.loads(line)
            text = record[self.field]
            text.encode()  # JSON can spell half a surrogate pair, which is not a character
        except KeyError:
            fields = ", ".join(record)[:200] or "none"
            what = f"no field {self.field!r}; fields found: {fields} (--field)"
        except (TypeError, AttributeError):
            what = f"no object with text in the field {self.field!r} (--field)"
        except (ValueError, RecursionError) as error:
            what = f"not JSON, or not text ({error})"
        else:
            return text
        raise UserError(f"{where}: {what}")

    def _parquet(self, file: File, stream: Readable) -> Iterator[list[str]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(
                f"{file.name}: reading Parquet needs pyarrow: pip install pyarrow"
            ) from None
        # Parquet is read from its end and hashed from its beginning, so it is read from a copy.
        with tempfile.TemporaryFile() as content:
            shutil.copyfileobj(stream, content)
            try:
                table = pyarrow.parquet.ParquetFile(content)
                if self.field not in table.schema_arrow.names:
                    columns = ", ".join(table.schema_arrow.names)[:200]
                    raise UserError(
                        f"{file.name}: no column {self.field!r}; columns found: {columns} (--field)"
                    )
                for batch in table.iter_batches(batch_size=1024, columns=[self.field]):
                    for text in batch.column(0).to_pylist():
                        if not isinstance(text, str | None):
                            found = type(text).__name__
                            raise UserError(
                                f"{file.name}: column {self.field!r} holds {found}, not text"
                            )
                        yield [self._newlines(text or "")]
            except pyarrow.ArrowException as error:
                raise UserError(f"cannot read {file.name}: {error}") from None


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in chunks, without their ends; "\\n" alone ends a line."""
    held: list[str] = []  # the beginning of a line that is not over yet
    for text in itertools.chain(texts, ["\n"]):  # the last line may lack its end
        *lines, rest = text.split("\n")
        for line in lines:
            held.append(line)
            yield "".join(held)
            held.clear()
        held.append(rest)


class Digest:
    """SHA-256, computed in a thread beside, as hashlib lets go of the interpreter's lock; small
    chunks are gathered first.
    """

    def __init__(self, pool: ThreadPoolExecutor):
        self._hash = hashlib.sha256()
        self._pool = pool
        self._held = bytearray()
        self._pending: deque[Future] = deque()

    def update(self, chunk: bytes) -> None:
        """Hash `chunk` soon, behind those before it; only a few chunks ever wait."""
        self._held += chunk
        if len(self._held) >= HASHED_AT_ONCE:
            self._submit()
        if len(self._pending) > 8:
            self._pending.popleft().result()

    def hexdigest(self) -> str:
        """Of all chunks so far."""
        self._submit()
        while self._pending:
            self._pending.popleft().result()
        return self._hash.hexdigest()

    def _submit(self) -> None:
        self._pending.append(self._pool.submit(self._hash.update, self._held))
        self._held = bytearray()


class Tally:
    """Reads a binary file; hashes and reports what passes."""

    def __init__(self, raw: IO[bytes], digest: Digest, progress: Callable[[int], object]):
        self._raw = raw
        self._digest = digest
        self._progress = progress

    def read(self, size: int = -1) -> bytes:
        chunk = self._raw.read(size)
        self._digest.update(chunk)
        self._progress(len(chunk))
        return chunk


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns the errors of reading `name` into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {name}: {reason}") from None
