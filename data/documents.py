"""Files read as a stream of documents: one policy for all text, reported when it acts.

* What a file is, its first bytes say, not its name: compressed text (`data.compression`) and
  Parquet are read, other containers named and refused (`data.containers`), JSON and CSV recognised
  (`data.rows`). `--format` overrules that.
* UTF-8, strictly, whatever the locale; `--encoding` says otherwise. A byte-order mark is dropped,
  and tells UTF-16 and UTF-32. Bytes that do not decode end the reading, with file, offset, byte and
  the encodings it may be (`data.encodings`): nothing is replaced or skipped in silence.
* CRLF and lone CR become "\\n".
* A file named by the user may not hold NUL characters. (In a folder, `data.sources` takes such
  files for binary and skips them.)
* A text file is one document; so is a row of JSON Lines, JSON, CSV and Parquet. A row without text
  (null, "", an empty object) is an empty document, and those are skipped and counted. A row that is
  broken (no JSON, no such field, no text in it) ends the reading, with file and line, unless
  `--skip-broken` is given: then it is skipped and counted too.
"""

from __future__ import annotations

import codecs
import hashlib
import lzma
import re
import shlex
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from data.compression import Peeked, Readable, unpacked, without_suffix
from data.containers import HEAD_BYTES, PARQUET, recognise, refuse
from data.encodings import SAMPLE_BYTES, Reading, damaged_utf8, is_utf8, likely_encodings
from data.rows import (
    TEXT,
    Broken,
    Row,
    Syntax,
    csv_rows,
    json_lines,
    json_rows,
    parquet_rows,
    recognise_syntax,
)
from errors import UserError

# A chunk of this size stays in the processor's cache, with all that becomes of it: three times as
# fast as chunks of 1 << 20.
CHUNK_BYTES = 1 << 18
DEFAULT_FIELD = "text"
LONE_OBJECT = Syntax("text", is_lone_object=True)
MARKUP = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|html|\?xml|mediawiki)", re.IGNORECASE)
HASHED_AT_ONCE = 1 << 18  # bytes that are worth a thread's attention
BOMS = {  # UTF-32 before UTF-16: its little-endian mark begins with UTF-16's
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}


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
    is_named: bool = True
    """by the user, not found in a folder"""
    is_jsonl: bool = False
    """known to be JSON Lines, whatever `--format` says: it was written here"""


@dataclass(frozen=True)
class Source:
    """One argument of the command line: its files in the order of reading, and how many were
    skipped as binary.
    """

    name: str
    files: list[File]
    n_binary: int = 0
    packed: Mapping[str, int] = field(default_factory=dict)
    """Of those, how many were which kind of container."""


class Corpus:
    """The documents of one or several sources. Each pass over `documents()` reads them anew, a
    chunk at a time.
    """

    def __init__(
        self,
        sources: list[Source],
        field: str | None = None,
        encoding: str | None = None,
        format: str = "auto",
        skip_broken: bool = False,
    ):
        self.sources = sources
        self.asked_field = field
        """The field that the user named; there must be a source with fields then."""
        self.field = field or DEFAULT_FIELD
        self.format = format
        """auto: by content; text, jsonl, csv or tsv: all but Parquet is that."""
        self.skip_broken = skip_broken
        self.first_broken = ""
        """Where the first broken row was that the latest pass skipped, and what was wrong."""
        self.encoding = encoding or "utf-8"
        stems = (Path(without_suffix(source.name)).stem for source in sources)
        self.name = "+".join(stems).replace(":", "-")[:80]  # of a dataset's split
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
        self._check_field()
        self.events.clear()
        self.first_broken = ""
        records = []
        n_documents = 0
        for source in self.sources:
            self.events["binary files skipped"] += source.n_binary
            for kind, n in source.packed.items():
                self.events[f"of these, {kind}"] += n
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

    def report(self) -> list[str]:
        """What the policy did in the latest pass, a line each."""
        lines = [f"{event}: {n:,}" for event, n in self.events.items() if n]
        if self.first_broken:
            lines.append(f"  the first: {self.first_broken}")
        return lines

    def _check_field(self) -> None:
        """UserError where a field is asked for and no source has fields."""
        if self.asked_field is None:
            return
        files = [file for source in self.sources for file in source.files]
        for file in files:
            with reading(file.name), file.open() as raw:
                stream = unpacked(file.name, raw)[0]
                if self._has_fields(file, stream):
                    return
        raise UserError(
            f"--field {self.asked_field} is given, and {files[0].name} is plain text"
            f"{', as are the others' if len(files) > 1 else ''}: there are no fields\n"
            "leave --field out, or give JSON Lines, JSON, CSV (--format csv) or Parquet"
        )

    def _has_fields(self, file: File, stream: Peeked) -> bool:
        head = stream.peek(HEAD_BYTES)
        if recognise(head) or is_parquet(file, head):
            return True  # what is refused is refused when it is read
        return self._syntax(file, head).kind != "text"

    def _read(self, file: File, raw: Readable) -> Iterable[Iterable[str]]:
        """Yield each document of a file as its chunks."""
        stream, layers = unpacked(file.name, raw)
        head = stream.peek(HEAD_BYTES)
        container = recognise(head)
        if container and not (container.is_text and self.format == "text"):
            raise refuse(file.name, container, [(one.name, one.command) for one in layers])
        if is_parquet(file, head):
            return self._rows(file, "row", parquet_rows(stream, self.field, file.name))
        syntax = self._syntax(file, head)
        self._count_syntax(file, syntax, head)
        if syntax.kind == "text":
            return [self._decode(file, stream)]
        texts = self._decode(file, stream, has_rows=True)
        if syntax.kind == "jsonl":
            rows = json_lines(texts, self.field)
        elif syntax.kind == "json":
            rows = json_rows(texts, self.field, file.name)
        else:
            rows = csv_rows(texts, self.field, file.name, syntax)
        return self._rows(file, "line", rows)

    def _syntax(self, file: File, head: bytes) -> Syntax:
        """How the text of a file is written. UserError for CSV without --field."""
        if file.is_jsonl:
            return Syntax("jsonl")
        if self.format == "text":
            return TEXT
        bom, encoding = self._encoding_of(head)
        try:
            text = head[len(bom) :].decode(encoding, "ignore")
        except UnicodeError:  # some codecs can't ignore; the reading will say
            return TEXT
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        is_whole = len(head) < HEAD_BYTES
        suffix = f".{self.format}" if self.format != "auto" else suffix_of(file)
        syntax = recognise_syntax(text, is_whole, suffix, self.asked_field)
        if self.format == "tsv" and syntax.kind == "csv":
            syntax = replace(syntax, has_quotes=False)
        if syntax.kind == "csv" and self.asked_field is None:
            columns = ", ".join(syntax.columns)[:200]
            raise UserError(
                f"{file.name} is CSV with the columns {columns}\n"
                f"--field {shlex.quote(syntax.longest)} (or another column) reads the text in it, "
                "--format text takes it as plain text"
            )
        if syntax.is_lone_object and not file.is_named and self.field not in syntax.columns:
            return LONE_OBJECT  # the settings of a program among its sources, most likely
        return syntax

    def _count_syntax(self, file: File, syntax: Syntax, head: bytes) -> None:
        """Note what a file's name does not say."""
        if file.is_jsonl:
            return
        if syntax.kind in ("json", "jsonl") and suffix_of(file) not in (".jsonl", ".ndjson"):
            name = "JSON" if syntax.kind == "json" else "JSON Lines"
            self.events[f"files recognised as {name}, of which {self.field!r} is read"] += 1
        elif syntax.kind == "csv":
            self.events[f"files read as CSV, column {self.field!r}"] += 1
        elif syntax is LONE_OBJECT:
            self.events[f"files of one JSON object without {self.field!r} read as plain text"] += 1
        elif syntax.kind == "text" and MARKUP.match(head):
            self.events["files of HTML or XML read as plain text, tags and all"] += 1

    def _rows(self, file: File, unit: str, rows: Iterable[Row]) -> Iterator[list[str]]:
        """Yield the text of each row; "" for an empty one. UserError for a broken one, unless those
        are skipped, and for a file of broken ones alone.
        """
        n_rows = 0
        n_broken = 0
        first = ""
        for number, text in rows:
            n_rows += 1
            if not isinstance(text, Broken):
                yield [self._newlines(text or "")]
                continue
            where = f"{file.name}, {unit} {number:,}: {text}"
            if not self.skip_broken:
                raise UserError(
                    f"{where}\n--skip-broken goes on without such {unit}s, "
                    "--format text takes it all as plain text"
                )
            n_broken += 1
            first = first or where
            self.events["broken rows skipped"] += 1
        self.first_broken = self.first_broken or first
        if n_broken and n_broken == n_rows:
            raise UserError(f"all {n_rows:,} {unit}s are broken; {first}")

    def _decode(self, file: File, stream: Peeked, has_rows: bool = False) -> Iterator[str]:
        """Yield the text of a byte stream according to the policy above; exact wherever the chunks
        happen to be cut.

        Where broken rows are skipped, bytes that do not decode become halves of surrogate pairs,
        and the rows that hold them are broken.
        """
        is_lenient = has_rows and self.skip_broken
        chunk = stream.read(max(CHUNK_BYTES, 4))  # 4: the longest byte-order mark
        bom, encoding = self._encoding_of(chunk)
        self._count_encoding(bom, encoding, chunk)
        errors = "surrogateescape" if is_lenient else "strict"
        decoder = codecs.getincrementaldecoder(encoding)(errors)
        place = Place(file.name, encoding, stream, len(bom))
        chunk = chunk[len(bom) :] or stream.read(CHUNK_BYTES)
        held = ""
        last = False
        while not last:
            last = not chunk
            try:
                text = held + decoder.decode(chunk, last)
            except UnicodeError as error:
                raise place.undecodable(error, chunk) from None
            if "\0" in text and not is_lenient:
                raise place.binary(chunk)
            held = ""
            if text.endswith("\r") and not last:  # a "\n" may follow in the next chunk
                held = "\r"
                text = text[:-1]
            text = self._newlines(text)
            yield text
            place.passed(chunk, text)
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
        return bom, encoding

    def _count_encoding(self, bom: bytes, encoding: str, chunk: bytes) -> None:
        if bom:
            self.events["byte-order marks dropped"] += 1
        if encoding != "utf-8":
            self.events[f"files read as {encoding}"] += 1
            if not bom and is_utf8(chunk, beyond_ascii=True):
                self.events[
                    f"of these, utf-8 by their content (is --encoding {encoding} right?)"
                ] += 1

    def _newlines(self, text: str) -> str:
        if "\r" not in text:
            return text
        self.events["line ends (CRLF or CR) made \\n"] += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")


def suffix_of(file: File) -> str:
    """The end of a file's name, in lower case, without that of a compression."""
    return Path(without_suffix(file.name).lower()).suffix


def is_parquet(file: File, head: bytes) -> bool:
    """Whether a file is Parquet, by its first bytes or its name."""
    return PARQUET.match(head) is not None or suffix_of(file) == ".parquet"


class Place:
    """Where a file is being decoded, for the messages that end the reading."""

    def __init__(self, name: str, encoding: str, stream: Readable, offset: int):
        self._name = name
        self._encoding = encoding
        self._stream = stream
        self._offset = offset  # of the next chunk
        self._line = 1
        self._before = b""  # the bytes before the next chunk, no more than are looked at

    def passed(self, chunk: bytes, text: str) -> None:
        """A chunk was decoded."""
        self._offset += len(chunk)
        self._line += text.count("\n")
        self._before = (self._before + chunk)[-SAMPLE_BYTES // 2 :]

    def undecodable(self, error: UnicodeError, chunk: bytes) -> UserError:
        """The error for a chunk that does not decode, with the encodings it may be in."""
        found = str(error)
        place = 0
        if isinstance(error, UnicodeDecodeError):
            # The object that failed begins with bytes the decoder had held back.
            place = len(chunk) - len(error.object) + error.start
            byte = error.object[error.start]
            line = self._line + error.object.count(b"\n", 0, error.start)
            where = f"offset {self._offset + place:,} in line {line:,}"
            found = f"byte 0x{byte:02x} at {where} ({error.reason})"
        return UserError(
            f"{self._name} is not {self._encoding}: {found}\n{self._way(chunk, place)}"
        )

    def binary(self, chunk: bytes) -> UserError:
        """The error for a chunk with a NUL byte."""
        place = max(chunk.find(0), 0)
        where = f"offset {self._offset + place:,}"
        readings = self._readings(chunk, place)
        wide = [reading for reading in readings if reading.encoding.startswith("utf-")]
        way = (
            "if it is UTF-16 without a byte-order mark, say --encoding utf-16-le (or -be); "
            "if it is a damaged text, tr -d '\\\\000' drops the byte"
        )
        if wide:
            way = f"it looks like --encoding {wide[0].encoding} ({wide[0].shown!r})"
        return UserError(
            f"{self._name} holds a NUL byte at {where}, so it is not plain text\n{way}"
        )

    def _sample(self, chunk: bytes, place: int) -> tuple[bytes, int]:
        """The bytes around a place in a chunk, and where in them it is. They begin where UTF-32
        may.
        """
        behind = chunk
        while len(behind) < place + SAMPLE_BYTES // 2:
            more = self._stream.read(SAMPLE_BYTES)
            if not more:
                break
            behind += more
        start = max(place - SAMPLE_BYTES // 2, -len(self._before))
        start += -(self._offset + start) % 4 if self._offset + start > 4 else 0
        before = self._before[len(self._before) + start :] if start < 0 else b""
        end = place + SAMPLE_BYTES // 2
        return before + behind[max(start, 0) : end], place - start

    def _readings(self, chunk: bytes, place: int) -> list[Reading]:
        sample, at = self._sample(chunk, place)
        offset = self._offset + place - at
        return [
            reading
            for reading in likely_encodings(sample, at, offset)
            if reading.encoding != self._encoding
        ]

    def _way(self, chunk: bytes, place: int) -> str:
        """What to do about a byte that does not decode."""
        sample = self._sample(chunk, place)[0]
        if self._encoding == "utf-8":
            n_bad = damaged_utf8(sample)
            if n_bad:
                return (
                    f"the rest around it is utf-8, so {n_bad:,} place(s) are damaged or pasted: "
                    "mend them, or drop them: iconv -c -f utf-8 -t utf-8 FILE > NEW"
                )
        elif is_utf8(sample) and b"\0" not in sample:
            return "it reads as utf-8: leave --encoding out"
        readings = self._readings(chunk, place)
        if not readings:
            return (
                "if you know how it is encoded, say so, as in --encoding gbk or --encoding cp1252"
            )
        shown = [f"--encoding {reading.encoding} ({reading.shown!r})" for reading in readings]
        return f"it may be {', or '.join(shown)}"


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
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {name}: {reason}") from None
