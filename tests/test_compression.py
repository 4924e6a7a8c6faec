"""Compressed text is read as the text, whatever its name and however its parts are joined; what is
cut off or damaged ends in a line, never in a shorter text.
"""

import bz2
import gzip
import lzma
import os
import re
import sys
import types
import zlib

import pytest
from reading import read, write

from data.compression import COMPRESSIONS, Frames, without_suffix
from errors import UserError

TEXT = "".join(f"line {n} of a text, {n * n}\n" for n in range(20_000))
BLOCKS = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "LZMA": lambda content: lzma.compress(content, lzma.FORMAT_ALONE),
}
MAGIC = b"\x28\xb5\x2f\xfd"


class FakeFrame:
    """As `zstandard.ZstdDecompressionObj`, of frames that are the magic number and zlib's."""

    def __init__(self):
        self._begun = b""
        self._zlib = zlib.decompressobj()

    def decompress(self, chunk):
        missing = len(MAGIC) - len(self._begun)
        self._begun += chunk[:missing]
        if not MAGIC.startswith(self._begun):
            raise FakeError("Unknown frame descriptor")
        try:
            return self._zlib.decompress(chunk[missing:])
        except zlib.error as error:
            raise FakeError(str(error)) from None

    @property
    def eof(self):
        return self._zlib.eof

    @property
    def unused_data(self):
        return self._zlib.unused_data


class FakeError(Exception):
    pass


def fake_zstd(content):
    return MAGIC + zlib.compress(content)


@pytest.fixture(params=["installed", "fake"])
def zstd(request, monkeypatch):
    """A function that compresses with zstd, as what reads it: what is installed, or a stand-in."""
    if request.param == "installed":
        zstandard = pytest.importorskip("zstandard")
        return zstandard.ZstdCompressor(write_checksum=True).compress  # as the command zstd does
    monkeypatch.setitem(sys.modules, "compression", None)
    fake = types.ModuleType("zstandard")
    fake.ZstdError = FakeError

    def decompressor(max_window_size):
        assert max_window_size == 1 << 31
        return types.SimpleNamespace(decompressobj=FakeFrame)

    fake.ZstdDecompressor = decompressor
    monkeypatch.setitem(sys.modules, "zstandard", fake)
    return fake_zstd


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.gz", "a.tar.xz", "a"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_compressed_text_is_read_whatever_its_name(kind, name, tmp_path):
    compress = BLOCKS[kind]
    assert read(write(tmp_path / name, compress(TEXT.encode())))[0] == [TEXT]
    twice = gzip.compress(compress(TEXT.encode()))
    assert read(write(tmp_path / name, twice))[0] == [TEXT]


def test_zstd_is_read_frame_by_frame(zstd, tmp_path):
    half = len(TEXT) // 2
    for content in (
        zstd(TEXT.encode()),
        zstd(TEXT[:half].encode()) + zstd(b"") + zstd(TEXT[half:].encode()),
        gzip.compress(zstd(TEXT.encode())),
    ):
        assert read(write(tmp_path / "a.zst", content))[0] == [TEXT]
    rows = b'{"text": "one"}\n{"text": "two"}\n'
    assert read(write(tmp_path / "a.jsonl.zst", zstd(rows)))[0] == ["one", "two"]


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz"])
def test_parts_joined_are_read_to_the_end(kind, tmp_path):
    half = len(TEXT) // 2
    content = BLOCKS[kind](TEXT[:half].encode()) + BLOCKS[kind](TEXT[half:].encode())
    assert read(write(tmp_path / "a", content))[0] == [TEXT]


@pytest.mark.parametrize("kind", [*BLOCKS, "zstd"])
def test_what_is_cut_off_or_damaged_is_refused(kind, tmp_path, zstd):
    noise = os.urandom(3000).hex().encode()
    whole = (BLOCKS | {"zstd": zstd})[kind](noise)
    for n in (20, len(whole) // 2, len(whole) - 1):
        with pytest.raises(UserError, match=r"cannot read .*a\.txt: ") as caught:
            read(write(tmp_path / "a.txt", whole[:n]))
        assert len(str(caught.value).splitlines()) == 1
    damaged = bytearray(whole)
    for place in range(len(whole) // 2, len(whole) // 2 + 300):
        damaged[place] ^= 0x5A
    with pytest.raises(UserError):
        assert read(write(tmp_path / "a.txt", bytes(damaged)))[0] == [noise.decode()]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".lzma", ".zst", ".ZSTD"])
def test_a_text_that_is_named_as_compressed_is_refused(suffix, tmp_path):
    message = rf"it is named {re.escape(suffix.lower())} and is not compressed with \w+; rename"
    with pytest.raises(UserError, match=message):
        read(write(tmp_path / f"a.txt{suffix}", b"a text\n"))


def test_no_compressed_file_is_taken_for_another():
    for kind, compress in [*BLOCKS.items(), ("zstd", fake_zstd)]:
        head = compress(b"hello")[:16]
        assert [one.name for one in COMPRESSIONS if one.signature.match(head)] == [kind]


def test_names_without_what_compression_adds():
    names = {"a.txt.gz": "a.txt", "b.JSONL.ZST": "b.JSONL", "c.tar": "c.tar", "d.xz.bz2": "d.xz"}
    assert {name: without_suffix(name) for name in names} == names


def test_frames_give_what_is_asked_for():
    class Slowly:
        """A stream that gives three bytes at once."""

        def __init__(self, content):
            self.content = content

        def read(self, size=-1):
            chunk = self.content[: min(size, 3)]
            self.content = self.content[len(chunk) :]
            return chunk

    content = fake_zstd(b"hello ") + fake_zstd(b"") + fake_zstd(b"world")
    assert Frames(Slowly(content), FakeFrame).read() == b"hello world"
    frames = Frames(Slowly(content), FakeFrame)
    chunks = list(iter(lambda: frames.read(4), b""))
    assert b"".join(chunks) == b"hello world"
    assert max(map(len, chunks)) <= 4
    with pytest.raises(EOFError, match="cut off"):
        Frames(Slowly(content[:-3]), FakeFrame).read()
