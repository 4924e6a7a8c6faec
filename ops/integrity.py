"""Whether a checkpoint file is whole, and, where a file is none, what it is instead."""

import codecs
import os
import struct
import zipfile
import zlib
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from errors import UserError

LABEL = b"glassgpt crc32 "
"""What the comment at the end of a checkpoint says before the sum itself."""
COMMENT_LENGTH = len(LABEL) + 8
END_LENGTH = 22
"""Bytes of a zip file's last record, where its comment is empty; the last two are the comment's
length.
"""
END_MARK = b"PK\x05\x06"
CHUNK = 1 << 20

# Why CRC-32 and not a cryptographic digest: it is there to find damage (disks, copies, memory), not
# forgers, who would write a fitting digest too. It finds every single flipped bit and every damage
# within 32 bits for certain, and any other, such as a block of zeros, but for one in four billion.
# It goes through 4.2 GB/s, SHA-256 with the hardware's help through 1.8, BLAKE2b through 0.9 (AMD
# EPYC, zlib 1.2.13): with the reading, half a second for 100 million weights and their moments,
# 1.2 GB (`python -m benchmarks.save`).


class ChecksumWriter:
    """An open file that sums up what is written to it, for a zip file that is then sealed."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sum = 0

    def write(self, data: bytes | memoryview) -> int:
        """Write on, as a file does; `torch.save` asks for this and `flush` alone."""
        self.sum = zlib.crc32(data, self.sum)
        return self.file.write(data)

    def flush(self) -> None:
        """Hand on what Python still holds."""
        self.file.flush()

    def seal(self) -> None:
        """Put the sum behind the archive, as the comment that a zip file may end with: other
        readers pass it by.
        """
        comment = LABEL + b"%08x" % self.sum
        self.file.seek(-2, os.SEEK_END)
        self.file.write(struct.pack("<H", len(comment)) + comment)


def check_whole(path: Path) -> bool:
    """Read a checkpoint file from end to end, in little memory, before anything in it is believed.

    Returns whether it is sealed; one of an earlier version is not, and its parts are held against
    the sums that a zip file keeps of each of them (its table of contents has none). Raises
    UserError, saying what is wrong, where the file is not what was written or is no checkpoint.
    """
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - END_LENGTH - COMMENT_LENGTH))
        tail = file.read()
        if LABEL in tail:
            if _sum_when_sealed(file, length) != tail:
                raise UserError(_damaged(path, "it does not match the sum written with it"))
            return True
    if tail[-END_LENGTH : -END_LENGTH + 4] == END_MARK and tail.endswith(bytes(2)):
        _check_parts(path, length)
        return False
    raise UserError(_no_checkpoint(path))


def _sum_when_sealed(file: BufferedReader, length: int) -> bytes:
    """The last bytes that a sealed file with these contents must have."""
    buffer = memoryview(bytearray(CHUNK))  # the same pages for every chunk
    file.seek(0)
    left = length - COMMENT_LENGTH - 2
    total = 0
    last = b""
    while left > 0 and (n_read := file.readinto(buffer[: min(CHUNK, left)])):
        total = zlib.crc32(buffer[:n_read], total)
        last = (last + bytes(buffer[max(0, n_read - END_LENGTH) : n_read]))[2 - END_LENGTH :]
        left -= n_read
    total = zlib.crc32(bytes(2), total)  # the comment was empty when the sum was made
    return last + struct.pack("<H", COMMENT_LENGTH) + LABEL + b"%08x" % total


def _check_parts(path: Path, length: int) -> None:
    """Hold the parts of a zip file without a seal against the sums of each. UserError where one
    differs, or where it is not an archive such as torch writes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
            if not any(part.filename.endswith("/data.pkl") for part in parts):
                kind = "a zip archive of other files"
                if any(part.filename.endswith(".npy") for part in parts):
                    kind = "a NumPy archive"
                raise UserError(f"{path} can't be read as a checkpoint: it is {kind}")
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise zipfile.BadZipFile("compressed")
            if sum(part.file_size for part in parts) > length:
                raise zipfile.BadZipFile("too large")
            bad = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, RuntimeError, ValueError, EOFError, OSError):
        raise UserError(_damaged(path, "its archive is torn, or of another program")) from None
    if bad is not None:
        raise UserError(_damaged(path, f"its part {bad!r} does not match the sum kept of it"))


def _damaged(path: Path, why: str) -> str:
    return f"{path} can't be read as a checkpoint: it is damaged ({why})"


def _no_checkpoint(path: Path) -> str:
    """What to say of a file that does not end as a checkpoint does."""
    with open(path, "rb") as file:
        head = file.read(512)
        length = file.seek(0, os.SEEK_END)
    if not length:
        found = "it is empty: a copy or a download was truncated before it began"
    elif head.startswith(b"PK\x03\x04"):
        found = f"it is truncated or damaged (after {length:,} bytes its end is missing)"
    elif not head.strip(b"\0"):
        found = f"it begins with {len(head)} zero bytes: the disk or a copy has lost its contents"
    else:
        found = f"it is {_what_it_is(head)}"
    return f"{path} can't be read as a checkpoint: {found}"


KINDS = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: `git lfs pull` gets it"),
    (
        b"\x80",
        "a pickle of another program, which is unsafe to open, or weights in torch's old format",
    ),
    (b"\x1f\x8b", "compressed: unpack it with gunzip"),
    (b"BZh", "compressed: unpack it with bunzip2"),
    (b"\xfd7zXZ\0", "compressed: unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "compressed: unpack it with unzstd"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "weights in HDF5's format"),
    (b"GGUF", "weights in GGUF's format"),
    (b"\x89PNG", "a picture"),
)
"""First bytes of a file -> what it is, and what to do where that is known."""


def _what_it_is(head: bytes) -> str:
    """What a file is, by its first bytes, of which none may be a checkpoint's."""
    for mark, kind in KINDS:
        if head.startswith(mark):
            return kind
    if head[257:262] == b"ustar":
        return "a tar archive: unpack it"
    if head[8:9] == b"{" and not any(head[4:8]):
        return "weights in safetensors' format"
    beginning = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if beginning[:1] == b"<":
        return (
            "a web page (HTML), as a download link gives that needs a login or another address: "
            "fetch the file itself"
        )
    if _is_text(head):
        line = head.decode("utf-8", errors="ignore").strip().splitlines()[0][:40]
        return f"a text file, beginning {line!a}"
    return "of another program, or its beginning is damaged"


def _is_text(head: bytes) -> bool:
    """Whether these first bytes of a file are plain text in UTF-8."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end inside a character
    except UnicodeDecodeError:
        return False
    return bool(text.strip()) and all(c.isprintable() or c.isspace() for c in text)
