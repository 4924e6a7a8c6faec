"""What files are by their first bytes: every kind named with its way out, and no text taken for
one.
"""

import gzip
import io
import lzma
import pickle
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from reading import read, write

from data.containers import recognise
from errors import UserError


def zipped(*names):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            text = "application/epub+zip" if name == "mimetype" else "hello world " * 50
            kind = zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED
            archive.writestr(name, text, kind)
    return content.getvalue()


def tarred(mode):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = 6
        archive.addfile(member, io.BytesIO(b"hello\n"))
    return content.getvalue()


def npy():
    content = io.BytesIO()
    np.save(content, np.arange(9))
    return content.getvalue()


KINDS = {
    "zst": (b"\x28\xb5\x2f\xfd\x24\x05\x29", "compressed with zstd.*zstd -dc FILE | "),
    "lz4": (b"\x04\x22\x4d\x18\x64\x40", "LZ4.*lz4 -dc FILE | "),
    "zip": (zipped("a.txt"), "zip archive.*unzip -p FILE | "),
    "docx": (zipped("[Content_Types].xml", "word/document.xml"), "Word.*pandoc .*-f docx FILE | "),
    "xlsx": (zipped("[Content_Types].xml", "xl/workbook.xml"), "Excel.*CSV"),
    "epub": (zipped("mimetype", "a.xhtml"), "EPUB.*pandoc .*-f epub FILE | "),
    "pt": (zipped("archive/data.pkl"), "PyTorch"),
    "npz": (zipped("x.npy"), "NumPy"),
    "tar": (tarred("w"), "tar archive.*tar -xf FILE"),
    "7z": (b"7z\xbc\xaf\x27\x1c\0\4", "7-Zip.*7z x -so FILE | "),
    "rar": (b"Rar!\x1a\x07\x01\x00", "RAR.*unrar p"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3", "PDF.*pdftotext FILE - | "),
    "doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "old Office file.*libreoffice"),
    "rtf": (b"{\\rtf1\\ansi Hello}", "RTF.*pandoc .*-f rtf FILE | .*--format text"),
    "npy": (npy(), "NumPy array"),
    "pickle": (pickle.dumps({"a": [1]}), "pickle"),
    "pickle2": (pickle.dumps([1, 2], 2), "pickle"),
    "sqlite": (b"SQLite format 3\0", "SQLite.*sqlite3 FILE"),
    "png": (b"\x89PNG\r\n\x1a\n", "picture.*OCR"),
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"a":', "safetensors"),
    "arrow": (b"ARROW1\0\0", "Arrow.*Parquet"),
}


@pytest.fixture(autouse=True)
def no_zstd(monkeypatch):
    """Whatever is installed, zstd is not read here."""
    for name in ("compression", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_named_whatever_its_name(kind, tmp_path):
    content, message = KINDS[kind]
    path = write(tmp_path / "a.txt", content)
    pattern = message.replace("FILE", str(path)).replace("| ", r"\| python -m data.prepare -")
    with pytest.raises(UserError, match=rf"a\.txt is .*{pattern}") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UserError, match="which is not read"):
        read(write(tmp_path / f"a.{kind}", content))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.txt"])
def test_an_archive_inside_gzip_is_named(name, tmp_path):
    with pytest.raises(UserError, match=r"a tar archive inside gzip.*mkdir D && tar -xf"):
        read(write(tmp_path / name, tarred("w:gz")))
    content = gzip.compress(KINDS["zst"][0])
    with pytest.raises(UserError, match=r"gzip -dc < .* \| zstd -dc - \| python"):
        read(write(tmp_path / name, content))
    content = lzma.compress(gzip.compress(KINDS["pdf"][0]))
    with pytest.raises(
        UserError,
        match=r"PDF file inside gzip inside xz.*: xz -dc < .* \| gzip -dc \| pdftotext - ",
    ):
        read(write(tmp_path / name, content))


@pytest.mark.parametrize("name", ["a.tar.zst", "a.tar.zstd", "a.tzst"])
def test_an_archive_is_not_piped_to_be_refused_again(name, tmp_path):
    path = write(tmp_path / name, KINDS["zst"][0])
    with pytest.raises(UserError, match=rf"zstd, a tar archive inside: mkdir D && tar -xf {path}"):
        read(path)


def test_another_format_named_gz_is_named_for_what_it_is(tmp_path):
    with pytest.raises(UserError, match=r"a\.txt\.gz is compressed with zstd, "):
        read(write(tmp_path / "a.txt.gz", KINDS["zst"][0]))


def test_gzip_is_read_whatever_its_name(tmp_path):
    once = gzip.compress(b"hello\n")
    for content in (once, gzip.compress(once)):
        assert read(write(tmp_path / "a.txt", content))[0] == ["hello\n"]


def test_a_text_format_is_read_as_it_is_when_told(tmp_path):
    path = write(tmp_path / "a.txt", b"{\\rtf1 Hello}")
    assert read(path, format="text")[0] == ["{\\rtf1 Hello}"]
    with pytest.raises(UserError, match="with zstd"):
        read(write(tmp_path / "b.txt", KINDS["zst"][0]), format="text")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "P",
        "PK is short for Park.\n",
        "PAR1 is how Parquet begins.\n",
        "BZh is how bzip2 begins. BZh9 too.\n",
        "The PDF begins with %PDF-1.7.\n",
        "MZ and ELF begin programs.\n",
        "ORC and ID3 and GIF and II* are names.\n",
        "Obj, RIFF and OggS\n",
        "{\\rm in TeX}\n",
        "\u0420\u0443\u0441\u0441\u043a\u0438\u0439\n",
        "]\n",
    ],
)
def test_no_text_is_taken_for_a_container(text):
    for encoding in ("utf-8", "cp1251", "utf-16"):
        assert recognise(text.encode(encoding, "ignore")) is None


def test_in_a_folder_containers_are_skipped_and_counted_by_kind(tmp_path):
    write(tmp_path / "a.txt", b"hello\n")
    write(tmp_path / "b.zst", KINDS["zst"][0])
    write(tmp_path / "c.zst", KINDS["zst"][0])
    write(tmp_path / "d.dat", b"x\0y")
    write(tmp_path / "e.txt", gzip.compress(b"more\n"))
    documents, events, _ = read(tmp_path)
    assert documents == ["hello\n", "more\n"]
    assert events == {"binary files skipped": 3, "of these, compressed with zstd": 2}


def test_a_folder_of_containers_alone_says_how_to_read_them(tmp_path):
    path = write(tmp_path / "b.zst", KINDS["zst"][0])
    message = rf"no text file \(1 binary.*\n.*compressed with zstd.*zstd -dc {path} \| python"
    with pytest.raises(UserError, match=message):
        read(tmp_path)
