"""Documents as they must come out, whatever the encoding, the line ends, the container and the
places where chunks are cut.
"""

import codecs
import gzip
import hashlib
import json

import pytest
from reading import read, write

from data import documents as documents_module
from data.sources import open_corpus
from errors import UserError


@pytest.fixture(params=[1, 2, 3, 7, 1 << 20])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", request.param)
    return request.param


# --- encodings and line ends ---

TEXT = "caf\u00e9 \u4e2d\u6587 \U0001f600\nend\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "gbk", "latin-1"])
def test_text_is_exact_across_chunk_edges(encoding, chunk_bytes, tmp_path):
    text = TEXT.encode(encoding, "ignore").decode(encoding)
    path = write(tmp_path / "a.txt", text.replace("\n", "\r\n").encode(encoding))
    documents, events, _ = read(path, encoding=encoding)
    assert documents == [text]
    assert events.pop("line ends (CRLF or CR) made \\n") == 2
    assert events == ({} if encoding == "utf-8" else {f"files read as {encoding}": 1})


def test_every_line_end_becomes_a_newline_and_is_counted(chunk_bytes, tmp_path):
    documents, events, _ = read(write(tmp_path / "a.txt", b"1\r\n2\r3\n\r\r\n\n4\r"))
    assert documents == ["1\n2\n3\n\n\n\n4\n"]
    assert events == {"line ends (CRLF or CR) made \\n": 5}


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_byte_order_mark_names_the_encoding_and_is_dropped(mark, encoding, chunk_bytes, tmp_path):
    path = write(tmp_path / "a.txt", mark + TEXT.encode(encoding))
    documents, events, _ = read(path)
    assert documents == [TEXT]
    assert events.pop("byte-order marks dropped") == 1
    assert events == ({} if encoding == "utf-8" else {f"files read as {encoding}": 1})


@pytest.mark.parametrize("spelling", ["utf-8", "UTF8", "utf_8"])
def test_a_byte_order_mark_is_dropped_when_utf8_is_asked_for(spelling, tmp_path):
    assert read(write(tmp_path / "a.txt", codecs.BOM_UTF8 + b"ab"), encoding=spelling)[0] == ["ab"]


def test_a_gbk_file_is_refused_with_offset_and_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", 4)
    path = write(tmp_path / "gbk.txt", b"Hello \xd6\xd0\xce\xc4 " * 3)
    with pytest.raises(
        UserError, match=r"gbk\.txt is not utf-8: byte 0xd6 at offset 6 .*\n.*--encoding gbk"
    ):
        read(path)
    assert read(path, encoding="gbk")[0] == ["Hello \u4e2d\u6587 " * 3]


@pytest.mark.parametrize(
    ("content", "encoding", "message"),
    [
        (b"abcdefg\xe4\xb8", None, "byte 0xe4 at offset 7 "),  # the file ends inside a character
        (b"\xef\xbb\xbfabc\xff", None, "byte 0xff at offset 6 "),  # the mark counts
        (b"ab\0c", None, "NUL byte at offset 2,.*\n.*utf-16-le"),
        ("ab".encode("utf-16-le"), None, "NUL byte at offset 1,"),
        (b"abc", "utf-16-le", "byte 0x63 at offset 2 "),
        (b"abc", "utf-16", "utf-16"),
    ],
)
def test_what_does_not_decode_is_refused_where_it_is(
    content, encoding, message, chunk_bytes, tmp_path
):
    with pytest.raises(UserError, match=r"a\.txt .*" + message):
        read(write(tmp_path / "a.txt", content), encoding=encoding)


@pytest.mark.parametrize("encoding", ["klingon", "hex", "rot13"])
def test_unknown_encodings_are_refused(encoding, tmp_path):
    with pytest.raises(UserError, match=encoding):
        read(write(tmp_path / "a.txt", b"abc"), encoding=encoding)


# --- containers ---


def test_gzip_is_read_through_and_its_own_bytes_are_hashed(chunk_bytes, tmp_path):
    content = gzip.compress(TEXT.encode() * 10)
    documents, _, corpus = read(write(tmp_path / "a.txt.gz", content))
    assert documents == [TEXT * 10]
    assert corpus.name == "a"
    assert corpus.records == [
        {"name": "a.txt.gz", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip",
        gzip.compress(b"abc" * 99, mtime=0)[:-9],
        gzip.compress(b"abc", mtime=0)[:10] + b"\xff" * 30,
    ],
)
def test_damaged_gzip_is_refused(content, tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*a\.gz"):
        read(write(tmp_path / "a.gz", content))


def test_json_lines(chunk_bytes, tmp_path):
    records = ["one", "", "two\r\nlines\r", "\u4e2d\U0001f600", "line\u2028separator\x0b\x85"]
    lines = [
        json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0)
        for i, text in enumerate(records)
    ]
    content = "\r\n".join(
        [*lines[:2], "", *lines[2:]]
    ).encode()  # no line end at the end, an empty line within
    for name, data in [
        ("a.jsonl", content),
        ("b.ndjson.gz", gzip.compress(content + b"\n", mtime=0)),
    ]:
        documents, events, corpus = read(write(tmp_path / name, data))
        assert documents == [
            "one",
            "two\nlines\n",
            "\u4e2d\U0001f600",
            "line\u2028separator\x0b\x85",
        ]
        assert events["empty documents skipped"] == 1
        assert corpus.records[0]["sha256"] == hashlib.sha256(data).hexdigest()


def test_json_lines_field(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "no", "body": "yes"}\n')
    assert read(path, field="body")[0] == ["yes"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "x", "n": 1}', r"line 2: no field 'text'; fields found: body, n \(--field\)"),
        (b"{'text': 1}", "line 2: not JSON"),
        (b'{"text": ["x"]}', "line 2: no object with text"),
        (b'{"text": 7}', "line 2: no object with text"),
        (b'["text"]', "line 2: no object with text"),
        (b'"text"', "line 2: no object with text"),
        (b'{"text": "\\ud800"}', "line 2: .*surrogates"),
        (b"[" * 100_000, "line 2: not JSON"),
    ],
)
def test_bad_json_lines_are_refused_with_their_number(line, message, tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl, " + message):
        read(write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n"))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the optional pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i}\r\n" for i in range(3000)] + [None, ""]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": texts, "n": range(3002)}), path)
    documents, events, corpus = read(path, field="body")
    assert documents == [f"document {i}\n" for i in range(3000)]
    assert events == {"empty documents skipped": 2, "line ends (CRLF or CR) made \\n": 3000}
    assert corpus.records[0]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(UserError, match=r"no column 'text'; columns found: body, n"):
        read(path)
    with pytest.raises(UserError, match=r"'n' holds int"):
        read(path, field="n")
    with pytest.raises(UserError, match=r"cannot read .*b\.parquet"):
        read(write(tmp_path / "b.parquet", b"PAR1 not"))


def test_progress_hears_of_every_byte(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfabc\r\n" * 1)
    seen = []
    corpus = open_corpus([str(path)])
    list(corpus.documents(seen.append))
    assert sum(seen) == corpus.size() == 8
