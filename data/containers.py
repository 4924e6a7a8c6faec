"""What a file is by its first bytes, whatever its name, where that is no plain text: compressed,
packed, or a document of another program. Each is named with the command that makes text of it.

What compresses one file is recognised too, and refused only where `data.compression` can't read it;
Parquet is read by `data.documents`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from errors import UserError

PARQUET = re.compile(rb"PAR1[\0-\x1f]")
HEAD_BYTES = 1 << 16  # of a file, that are looked at


@dataclass(frozen=True)
class Container:
    """A kind of file that is not read."""

    name: str
    to_text: str = ""
    """The command that makes text of FILE, on standard output; "-" for FILE is standard input."""
    remedy: str = ""
    """What to do where no command of one line is enough."""
    needs: str = ""
    """What would read it here."""
    is_text: bool = False
    """Whether it may be taken for plain text, if the user says so."""

    def way(self, file: str) -> str:
        """The remedy for a file, named as a shell takes it."""
        return self.remedy.replace("FILE", file)


ZSTD = "or pip install zstandard, with which it is read as it is"
WEIGHTS = "train on text; this holds numbers or objects"
PICTURE = "train on text; tesseract and other OCR read it from pictures"
SOUND = "train on text; this is sound or film"
OFFICE = "libreoffice --headless --convert-to txt makes a text of it"
PANDOC = "pandoc -t plain -f"
TAR = Container("a tar archive", remedy="mkdir D && tar -xf FILE -C D, then give the folder D")

TAR_NAME = re.compile(r"\.tar\.\w+$|\.t(?:xz|bz2?|zst|lz)$")

# Zip is looked into: the archive's first names say whose document it is.
ZIPS = (
    (rb"word/", Container("a Word document (docx)", f"{PANDOC} docx FILE")),
    (rb"xl/", Container("an Excel workbook", remedy="save it as CSV, and say --field")),
    (rb"ppt/", Container("a PowerPoint file", remedy=OFFICE)),
    (rb"epub\+zip", Container("an EPUB book", f"{PANDOC} epub FILE")),
    (rb"opendocument\.text", Container("an OpenDocument text (odt)", f"{PANDOC} odt FILE")),
    (rb"opendocument", Container("an OpenDocument file", remedy=OFFICE)),
    (rb"data\.pkl", Container("a PyTorch file (zip)", remedy=WEIGHTS)),
    (rb"\.npy", Container("NumPy arrays (npz)", remedy=WEIGHTS)),
)
ZIP = Container("a zip archive", "unzip -p FILE")
SIGNATURES = tuple(
    (re.compile(pattern, re.DOTALL), container)
    for pattern, container in (
        (
            rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
            Container("compressed with zstd", "zstd -dc FILE", needs=ZSTD),
        ),
        (rb"\xfd7zXZ\0", Container("compressed with xz", "xz -dc FILE")),
        (rb"\x5d\0\0.{2}[\0\xff]", Container("compressed with LZMA", "xz -dc --format=lzma FILE")),
        (rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", Container("compressed with bzip2", "bzip2 -dc FILE")),
        (rb"\x04\x22\x4d\x18", Container("compressed with LZ4", "lz4 -dc FILE")),
        (rb"\x1f\x9d", Container("compressed with Unix compress (.Z)", "uncompress -c FILE")),
        (rb"LZIP\x01", Container("compressed with lzip", "lzip -dc FILE")),
        (rb"\xff\x06\0\0sNaPpY", Container("compressed with Snappy", "snzip -dc FILE")),
        (rb"PK(?:\x03\x04|\x05\x06|\x07\x08)", ZIP),
        (rb"7z\xbc\xaf\x27\x1c", Container("a 7-Zip archive", "7z x -so FILE")),
        (rb"Rar!\x1a\x07", Container("a RAR archive", "unrar p -inul FILE")),
        (rb".{257}ustar", TAR),
        (rb"!<arch>\n", Container("an ar archive (.a, .deb)", remedy=WEIGHTS)),
        (rb"\s{0,16}%PDF-\d", Container("a PDF file", "pdftotext FILE -")),
        (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", Container("an old Office file", remedy=OFFICE)),
        (rb"\{\\rtf\d", Container("rich text (RTF)", f"{PANDOC} rtf FILE", is_text=True)),
        (rb"%!PS", Container("a PostScript file", "ps2ascii FILE", is_text=True)),
        (
            rb"WARC/\d\.\d\r\n",
            Container(
                "a web archive (WARC)", remedy="take the pages' text out first", is_text=True
            ),
        ),
        (rb"\x93NUMPY", Container("a NumPy array", remedy=WEIGHTS)),
        (rb"\x80[\x02-\x05][\x8a\x95}\])(cXKMGJNq]", Container("a Python pickle", remedy=WEIGHTS)),
        (rb"\x89HDF\r\n", Container("an HDF5 file", remedy=WEIGHTS)),
        (rb".{7}\0\{\"", Container("a safetensors file", remedy=WEIGHTS)),
        (rb"GGUF.\0\0\0", Container("a GGUF file", remedy=WEIGHTS)),
        (
            rb"ARROW1\0\0|FEA1|\xff\xff\xff\xff.{2}\0\0",
            Container("an Arrow or Feather file", remedy="save it as Parquet or JSON Lines"),
        ),
        (
            rb"ORC.{0,1}[\0-\x08]",
            Container("an ORC file", remedy="save it as Parquet or JSON Lines"),
        ),
        (rb"Obj\x01", Container("an Avro file", remedy="save it as Parquet or JSON Lines")),
        (
            rb"SQLite format 3\0",
            Container("an SQLite database", "sqlite3 FILE 'select text from TABLE'"),
        ),
        (rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*", Container("a picture", "", PICTURE)),
        (rb"RIFF.{4}WEBP", Container("a picture", remedy=PICTURE)),
        (
            rb"RIFF.{4}(?:WAVE|AVI )|ID3[\x02-\x04]\0|OggS\0|fLaC\0|\0\0\0.ftyp|\x1a\x45\xdf\xa3",
            Container("sound or film", remedy=SOUND),
        ),
        (rb"\x7fELF|MZ.{0,62}\0", Container("a program", remedy="train on text")),
    )
)


def recognise(head: bytes) -> Container | None:
    """What kind of file begins with `head`, of those that are not read; None for any other."""
    for signature, container in SIGNATURES:
        if signature.match(head):
            if container is not ZIP:
                return container
            for inside, document in ZIPS:
                if re.search(rb"PK\x03\x04.{26}.{0,60}?(?:" + inside + rb")", head, re.DOTALL):
                    return document
            return ZIP
    return None


def refuse(name: str, container: Container, layers: Sequence[tuple[str, str]] = ()) -> UserError:
    """The error for a file of that kind, with the way out. `layers`: the name of each compression
    around it that was undone already, and the command that undoes it.
    """
    file = "FILE" if name == "stdin" else shlex.quote(name)
    if TAR_NAME.search(name.lower()) and container is not TAR and not layers:
        # Piped through, it would only be a tar archive then.
        return UserError(f"{name} is {container.name}, a tar archive inside: {TAR.way(file)}")
    inside = "".join(f" inside {layer}" for layer, _ in reversed(layers))
    error = f"{name} is {container.name}{inside}, which is not read"
    if container.to_text:
        commands = [command for _, command in layers]
        if commands:
            commands[0] += f" < {file}"
        command = container.to_text.replace("FILE", "-" if layers else file)
        way = " | ".join([*commands, command, "python -m data.prepare -"])
        if container.needs:
            way += f" ({container.needs})"
    else:
        way = container.way(file)
    if container.is_text:
        way += " (--format text takes it as it is)"
    return UserError(f"{error}: {way}")
