"""Compressed files read as what is in them: gzip, bzip2, xz and LZMA by the standard library, zstd
where this Python or an installed package reads it.

Which one it is, the first bytes say, not the name. A file that is cut off or damaged raises an
OSError, an EOFError or an error of its library, never a short text.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from data.containers import recognise

READ_AT_ONCE = 1 << 12  # compressed bytes of zstd: a few may stand for a thousand times as many
MOST_LAYERS = 3
LARGEST_WINDOW = 1 << 31  # that zstd may look back, as `zstd --long=31` asks for


class Readable(Protocol):
    """What a document is read from: anything with `read`."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; all that are left if it is negative."""
        ...


class Peeked:
    """A stream of which what comes next can be looked at before it is read."""

    def __init__(self, stream: Readable):
        self._stream = stream
        self._held = b""

    def peek(self, size: int) -> bytes:
        """The next `size` bytes; fewer at the end of the stream."""
        while len(self._held) < size:
            chunk = self._stream.read(size - len(self._held))
            if not chunk:
                break
            self._held += chunk
        return self._held[:size]

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; all that are left if it is negative."""
        if not self._held:
            return self._stream.read(size)
        if size < 0:
            size = len(self._held)
        chunk = self._held[:size]
        self._held = self._held[size:]
        return chunk


@dataclass(frozen=True)
class Compression:
    """A way of compressing one file."""

    name: str
    signature: re.Pattern[bytes]
    suffixes: tuple[str, ...]
    """of the names that such files have"""
    command: str
    """that writes what is in standard input to standard output"""
    open: Callable[[Any], Readable | None]
    """The content of a compressed stream; None where nothing is installed that reads it."""


class Frames:
    """The content of zstd frames, one after the other, read with the package zstandard. Its own
    reader ends at a cut as if that were the end.
    """

    def __init__(self, stream: Readable, new_decompressor: Callable[[], Any]):
        self._stream = stream
        self._new = new_decompressor
        self._frame: Any = None  # the decompressor of the frame in hand
        self._rest = b""  # compressed bytes behind the frame before
        self._held = b""

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; all that are left if it is negative."""
        chunks: list[bytes] = []
        while size < 0 or not chunks:
            if not self._held and not self._decompress():
                break
            end = len(self._held) if size < 0 else size
            chunks.append(self._held[:end])
            self._held = self._held[end:]
        return b"".join(chunks)

    def _decompress(self) -> bool:
        """Hold more of the content; False at its end."""
        while not self._held:
            chunk = self._rest or self._stream.read(READ_AT_ONCE)
            self._rest = b""
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the zstd frame is cut off before its end")
                return False
            if self._frame is None:
                self._frame = self._new()
            self._held = self._frame.decompress(chunk)
            if self._frame.eof:
                self._rest = self._frame.unused_data
                self._frame = None
        return True


class Zstd:
    """The content of a zstd stream; what its library raises becomes an OSError."""

    def __init__(self, content: Readable, error: type[Exception]):
        self._content = content
        self._error = error

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes; all that are left if it is negative."""
        try:
            return self._content.read(size)
        except self._error as error:
            raise OSError(f"its zstd is damaged ({error})") from None


def _open_zstd(stream: Readable) -> Readable | None:
    try:
        from compression import zstd  # Python 3.14

        options = {zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW.bit_length() - 1}
        return Zstd(zstd.ZstdFile(stream, options=options), zstd.ZstdError)
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        return None
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    return Zstd(Frames(stream, decompressor.decompressobj), zstandard.ZstdError)


GZIP = Compression(
    "gzip",
    re.compile(rb"\x1f\x8b"),
    (".gz",),
    "gzip -dc",
    lambda stream: gzip.GzipFile(fileobj=stream),
)
COMPRESSIONS = (
    GZIP,
    Compression(
        "bzip2",
        re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
        (".bz2",),
        "bzip2 -dc",
        bz2.BZ2File,
    ),
    Compression("xz", re.compile(rb"\xfd7zXZ\0"), (".xz",), "xz -dc", lzma.LZMAFile),
    Compression(
        "LZMA",
        re.compile(rb"\x5d\0\0.{2}[\0\xff]", re.DOTALL),
        (".lzma",),
        "xz -dc --format=lzma",
        lzma.LZMAFile,
    ),
    Compression(
        "zstd",
        re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
        (".zst", ".zstd"),
        "zstd -dc",
        _open_zstd,
    ),
)


def without_suffix(name: str) -> str:
    """A file's name without what its compression adds to it: a.txt of a.txt.gz."""
    for compression in COMPRESSIONS:
        for suffix in compression.suffixes:
            if name.lower().endswith(suffix):
                return name[: -len(suffix)]
    return name


def unpacked(name: str, raw: Readable) -> tuple[Peeked, list[Compression]]:
    """The content of a file that may be compressed, whatever its `name`, and how it was, outermost
    first. What nothing here reads stays as it is. Raises OSError where it is named as compressed
    and is something else.
    """
    stream = Peeked(raw)
    layers: list[Compression] = []
    while len(layers) < MOST_LAYERS:
        head = stream.peek(16)
        found = next((one for one in COMPRESSIONS if one.signature.match(head)), None)
        content = found.open(stream) if found else None
        if found is None or content is None:
            break
        layers.append(found)
        stream = Peeked(content)
    if not layers:
        _check_name(name, stream)
    return stream, layers


def _check_name(name: str, stream: Peeked) -> None:
    """OSError where a file that is not compressed is named so. Other containers are named for what
    they are by `data.containers`.
    """
    suffix = name[len(without_suffix(name)) :].lower()
    head = stream.peek(1 << 16) if suffix else b""
    if head and not recognise(head):
        compression = next(one for one in COMPRESSIONS if suffix in one.suffixes)
        raise OSError(
            f"it is named {suffix} and is not compressed with {compression.name}; rename it if it "
            "is text"
        )
