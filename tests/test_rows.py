"""Rows of JSON Lines, JSON, CSV and Parquet: recognised whatever the name, empty ones counted,
broken ones refused with their place or counted.
"""

import csv
import gzip
import io
import json

import pytest
from reading import read, write

from data import documents as documents_module, rows as rows_module
from data.rows import recognise_syntax
from errors import UserError

TEXTS = ["One, two.\n", 'She said: "three"\n\nfour', "\u4e2d\u6587 ; | \t", "five"]
RECORDS = [{"id": i, "text": text, "tag": f"t{i}"} for i, text in enumerate(TEXTS)]


@pytest.fixture(params=[1, 5, 1 << 20])
def chunk_bytes(request, monkeypatch):
    monkeypatch.setattr(documents_module, "CHUNK_BYTES", request.param)


def json_lines(records=RECORDS):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(delimiter=",", records=RECORDS):
    content = io.StringIO()
    writer = csv.DictWriter(content, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return content.getvalue().encode()


# --- JSON ---

JSON = {
    "lines": json_lines(),
    "lines after nulls": b"null\n{}\n\n" + json_lines(),
    "array": json.dumps(RECORDS).encode(),
    "printed array": b"\n " + json.dumps(RECORDS, indent=2, ensure_ascii=False).encode() + b"\n",
    "printed objects": "\n".join(json.dumps(record, indent=1) for record in RECORDS).encode(),
    "objects on one line": b" ".join(json.dumps(record).encode() for record in RECORDS),
}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.txt", "a.json.gz", "stdin"])
@pytest.mark.parametrize("kind", JSON)
def test_json_is_read_by_its_content(kind, name, chunk_bytes, tmp_path):
    content = JSON[kind]
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    documents, events, _ = read(path)
    assert documents == TEXTS
    assert any(event.startswith("files recognised as JSON") for event in events)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_json_lines_with_a_byte_order_mark(encoding, tmp_path):
    assert read(write(tmp_path / "a", json_lines().decode().encode(encoding)))[0] == TEXTS


@pytest.mark.parametrize("first", ["# exported today", "WARNING: slow", "id, text"])
def test_json_lines_behind_another_line_are_no_prose(first, tmp_path):
    path = write(tmp_path / "a.txt", f"{first}\n".encode() + json_lines())
    with pytest.raises(UserError, match="line 1: not JSON"):
        read(path)
    assert read(path, skip_broken=True)[0] == TEXTS
    essay = "Rows look so:\n" + '{"text": "a"}\n' * 2 + "and so on.\nThe end.\n"
    assert read(write(tmp_path / "b.txt", essay.encode()))[0] == [essay]


@pytest.mark.parametrize("wrap", [str, lambda text: [text], lambda text: [text, 1]])
def test_json_lines_without_objects_are_refused_whatever_the_name(wrap, tmp_path):
    lines = "".join(json.dumps(wrap(text)) + "\n" for text in TEXTS)
    path = write(tmp_path / "a.txt", lines.encode())
    with pytest.raises(UserError, match=r"line 1: no object with text .*\n.*--format text"):
        read(path)
    assert read(path, format="text")[0] == [lines]
    speech = '"So," said he.\n"No."\n"[a] yes"\n'
    assert read(write(tmp_path / "b.txt", speech.encode()))[0] == [speech]


def test_documents_longer_than_what_is_looked_at(tmp_path):
    records = [{"text": f"{i}" * 200_000} for i in range(3)]
    wanted = [record["text"] for record in records]
    for content in (json_lines(records), json.dumps(records).encode()):
        assert read(write(tmp_path / "a.json", content))[0] == wanted
    printed = json.dumps(records, indent=1).encode()
    assert read(write(tmp_path / "a.txt", printed))[0] == wanted


def test_one_line_is_json_lines(tmp_path):
    assert read(write(tmp_path / "a.txt", b'{"text": "alone"}'))[0] == ["alone"]


@pytest.mark.parametrize(
    "text",
    [
        "[1] A footnote.\n[2] Another.\n",
        "{curly} words\nand more\n",
        "{}\nint main() {}\n",
        "[Verse 1]\nla la\n",
        '{ foo: "bar" }\n',
        "null and void\n",
        "{\n  // a comment\n}\n",
        "[]",
    ],
)
def test_what_only_begins_like_json_is_text(text, tmp_path):
    assert read(write(tmp_path / "a.txt", text.encode()))[0] == [text]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(RECORDS)[:-30].encode(), r"line 1: not JSON "),
        (json.dumps(RECORDS[:2]).encode()[:-1], "line 1: not JSON .*the end"),
        (b'[{"text": "a"}\n,\n{"text": "b"}}]', "line 3: not JSON .*found '}'"),
        (b'[{"text": "a"},\n\n{"text": b}]', "line 3: not JSON"),
        (b'[{"text": "a"}] more', "line 1: not JSON"),
        (b"not json at all", "line 1: not JSON"),
    ],
)
def test_broken_json_is_refused_with_its_line(content, message, tmp_path):
    for options in ({}, {"skip_broken": True}):
        with pytest.raises(UserError, match=rf"a\.json, {message}"):
            read(write(tmp_path / "a.json", content), **options)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"version": 1, "rows": RECORDS}, "no field .*: version, rows.*jq -c '.rows\\[\\]' FILE"),
        (TEXTS, "no object with text.*jq"),
        ([{"body": "x"}] * 3, "no field 'text'; fields found: body"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_of_another_shape_is_refused_with_a_way_out(value, indent, message, tmp_path):
    path = write(tmp_path / "a.json", json.dumps(value, indent=indent).encode())
    with pytest.raises(UserError, match=rf"a\.json, line \d+: {message}") as caught:
        read(path)
    assert len(str(caught.value).splitlines()) == 2


def test_a_value_that_never_ends_is_not_held_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "LARGEST_ROW", 1000)
    content = b'[{"text": "' + b"x" * 500_000
    with pytest.raises(UserError, match="a value of more than 1,000 characters"):
        read(write(tmp_path / "a.json", content))


def test_settings_in_a_folder_are_text_and_said_to_be(tmp_path):
    write(tmp_path / "package.json", b'{\n  "name": "x"\n}\n')
    write(tmp_path / "map.json", b'{"version": 3}')
    write(tmp_path / "rows.json", json_lines())
    documents, events, _ = read(tmp_path)
    assert documents == ['{"version": 3}', '{\n  "name": "x"\n}\n', *TEXTS]
    assert events["files of one JSON object without 'text' read as plain text"] == 2
    with pytest.raises(UserError, match="no field 'text'; fields found: name"):
        read(tmp_path / "package.json")


@pytest.mark.parametrize("head", ["<!DOCTYPE html>", "\n<html>", "\ufeff<?xml version='1.0'?>"])
def test_markup_is_text_and_said_to_be(head, tmp_path):
    documents, events, _ = read(write(tmp_path / "a.txt", f"{head}<p>Hi</p>".encode()))
    assert documents[0].endswith("<p>Hi</p>")
    assert events["files of HTML or XML read as plain text, tags and all"] == 1


# --- CSV ---


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.txt", "stdin"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv_is_read_with_its_column(delimiter, name, chunk_bytes, tmp_path):
    content = table(delimiter)
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    documents, events, _ = read(path, field="text")
    assert documents == TEXTS
    assert events["files read as CSV, column 'text'"] == 1


def test_tsv_and_a_column_alone(tmp_path):
    assert read(write(tmp_path / "a.tsv", table("\t")), field="text")[0] == TEXTS
    assert read(write(tmp_path / "a.csv", b"text\na, b\n\nc\n"), field="text", skip_broken=True)[
        0
    ] == ["c"]
    assert read(write(tmp_path / "a.csv", b'text\n"a, b"\n\nc\n'), field="text")[0] == ["a, b", "c"]


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.csv.gz"])
def test_csv_without_a_column_is_refused_with_the_way_out(name, tmp_path):
    content = table()
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    message = (
        "is CSV with the columns id, text, tag\n--field text .*--format text takes it as plain"
    )
    with pytest.raises(UserError, match=message):
        read(path)
    assert read(path, format="text")[0] == [content.decode().replace("\r\n", "\n")]
    with pytest.raises(UserError, match=r"no column 'body'; columns found: id, text, tag"):
        read(path, field="body")


def test_a_column_that_stands_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", b"id,text,text\n1,a,b\n2,c,d\n")
    message = "2 columns named 'text'; columns found: id, text, text"
    with pytest.raises(UserError, match=message):
        read(path, field="text")


def test_quotes_in_tsv_are_a_tables_or_the_texts(tmp_path):
    content = b'id\ttext\n1\t"Yes," she said.\n2\ta 5" pipe\n3\t"open\n4\tdone\n'
    path = write(tmp_path / "a.tsv", content)
    with pytest.raises(UserError, match=r"line 2: not CSV .*; --format tsv takes quotes"):
        read(path, field="text")
    expected = ['"Yes," she said.', 'a 5" pipe', '"open', "done"]
    for name in ("a.tsv", "a.txt"):
        assert read(write(tmp_path / name, content), field="text", format="tsv")[0] == expected
    quoted = write(tmp_path / "b.tsv", b'id\ttext\n1\t"two\nlines, ""quoted"""\n')
    assert read(quoted, field="text")[0] == ['two\nlines, "quoted"']
    with pytest.raises(UserError, match="no column 'body'; columns found: id, text"):
        read(path, field="body", format="tsv")


def test_csv_in_a_folder_is_refused_too(tmp_path):
    write(tmp_path / "a.txt", b"plain\n")
    write(tmp_path / "b.csv", table())
    with pytest.raises(UserError, match=r"b\.csv is CSV"):
        read(tmp_path)


@pytest.mark.parametrize("delimiter", [";", "|", ","])
@pytest.mark.parametrize("before", ["", "\n\n"])
def test_excels_first_line_names_the_delimiter(delimiter, before, tmp_path):
    """And is no header, whatever the file is called."""
    rows = f"{before}sep={delimiter}\r\nid{delimiter}text\r\n1{delimiter}hello\r\n"
    path = write(tmp_path / "a.txt", rows.encode())
    assert read(path, field="text")[0] == ["hello"]
    with pytest.raises(UserError, match="is CSV with the columns id, text"):
        read(path)


def test_csv_that_is_not_recognised_is_read_when_told(tmp_path):
    path = write(tmp_path / "a.txt", b"the text\nhello\n")
    assert read(path, field="the text", format="csv")[0] == ["hello"]


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.\nHow are you, today?\nFine, thanks.\n",
        "Yes, sir\nNo, sir\n",
        "the\t23135851162\nof\t13151942776\n",
        "1,2\n3,4\n",
        "One line, alone",
        "a, b, c\n",
        "x = f(a, b)\ny = g(c, d)\n",
    ],
)
def test_prose_with_commas_is_text(text):
    assert recognise_syntax(text, True, "", None).kind == "text"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,a,b", "3 cells, where the header has 2"),
        ("1", "1 cells"),
        ('1,"a"b', "not CSV .*expected after"),
    ],
)
def test_broken_rows_of_csv(row, message, tmp_path):
    path = write(tmp_path / "a.csv", f'id,text\n0,"two\nlines"\n{row}\n2,fine\n3,\n'.encode())
    with pytest.raises(UserError, match=rf"a\.csv, line 4: {message}.*\n--skip-broken"):
        read(path, field="text")
    documents, events, corpus = read(path, field="text", skip_broken=True)
    assert documents == ["two\nlines", "fine"]
    assert events["broken rows skipped"] == 1
    assert events["empty documents skipped"] == 1
    assert "line 4" in corpus.report()[-1]


def test_an_open_quote_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", b'id,text\n1,fine\n2,"open\n3,more\n')
    with pytest.raises(UserError, match=r"line 3: not CSV .*unexpected end"):
        read(path, field="text")


# --- fields, empty and broken rows ---


@pytest.mark.parametrize("name", ["a.txt", "a.csv.txt", "stdin"])
def test_a_field_where_there_are_none_is_refused(name, tmp_path):
    path = write(tmp_path / name, b"Just a text, with words.\n")
    with pytest.raises(UserError, match=r"--field body is given, and .* plain text.*\nleave"):
        read(path, field="body")
    with pytest.raises(UserError, match="--field text is given"):
        read(path, path, field="text")
    rows = write(tmp_path / "b.jsonl", b'{"body": "yes"}\n')
    assert read(path, rows, field="body")[0] == ["Just a text, with words.\n", "yes"]
    with pytest.raises(UserError, match="--field body is given"):
        read(rows, field="body", format="text")


EMPTY = [{"text": None}, {"text": ""}, None, {}]


@pytest.mark.parametrize("form", ["lines", "array"])
def test_empty_rows_are_skipped_and_counted(form, tmp_path):
    records = [*EMPTY, {"text": "one"}, *EMPTY, {"text": "two"}, {"text": " "}]
    content = json_lines(records) if form == "lines" else json.dumps(records).encode()
    documents, events, _ = read(write(tmp_path / "a.json", content))
    assert documents == ["one", "two", " "]
    assert events["empty documents skipped"] == 2 * len(EMPTY)


@pytest.mark.parametrize(
    "bad", [b"{", b"not json", b'{"body": "x"}', b'{"text": 1}', b'{"text": "\xff"}', b"\0\0"]
)
def test_broken_lines_are_refused_or_counted(bad, chunk_bytes, tmp_path):
    content = b'{"text": "one"}\n' + bad + b'\n{"text": "two"}\n' + bad + b"\n"
    path = write(tmp_path / "a.jsonl", content)
    with pytest.raises(
        UserError, match=r"a\.jsonl(, line 2: .*\n--skip-broken| .* (in line 2|NUL))"
    ):
        read(path)
    documents, events, corpus = read(path, skip_broken=True)
    assert documents == ["one", "two"]
    assert events == {"broken rows skipped": 2}
    assert corpus.report()[1].startswith(f"  the first: {path}, line 2: ")


def test_a_file_of_broken_rows_alone_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"body": "x"}\n' * 3)
    with pytest.raises(UserError, match=r"all 3 lines are broken; .*line 1: no field 'text'"):
        read(path, skip_broken=True)


def parquet_file(path, column):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the optional pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": column}), path)
    return path


def test_parquet_under_another_name_and_text_as_bytes(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the optional pyarrow")
    column = pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary())
    assert read(parquet_file(tmp_path / "a.txt", column))[0] == TEXTS
    column = pyarrow.array([*TEXTS, None]).dictionary_encode()
    assert read(parquet_file(tmp_path / "a.bin", column))[0] == TEXTS


def test_broken_rows_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the optional pyarrow")
    raw = pyarrow.array([b"one", b"caf\xe9", None, b"", b"two"], pyarrow.binary())
    for column in (raw, raw.view(pyarrow.string())):
        path = parquet_file(tmp_path / "a.parquet", column)
        with pytest.raises(UserError, match=r"a\.parquet, row 2: not utf-8 \(byte 3 of it, 0xe9\)"):
            read(path)
        documents, events, _ = read(path, skip_broken=True)
        assert documents == ["one", "two"]
        assert events == {"broken rows skipped": 1, "empty documents skipped": 2}
