"""Files that hold a document in each row: JSON Lines, JSON, CSV and Parquet.

JSON is recognised by its content and CSV by its name or content, so that neither is taken for plain
text. A reader yields (number, text) of each row: the line it begins on, or the row of Parquet,
counted from 1. The text is None where there is none: null, an empty cell, an empty object. It is a
`Broken` where there is something else than text.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data.compression import Readable
from errors import UserError

LARGEST_ROW = 1 << 27  # characters: more is a bracket or quote that is never closed
LINES_LOOKED_AT = 20


class Broken(Exception):
    """A row that holds no text; what is wrong with it."""


Row = tuple[int, "str | Broken | None"]


# --- which syntax it is ---


@dataclass(frozen=True)
class Syntax:
    """How a file is written."""

    kind: str
    """text, jsonl, json (one value, an array, or several over many lines), csv"""
    columns: tuple[str, ...] = ()
    """of CSV, or the fields of the only object of a file"""
    delimiter: str = ""
    """of CSV"""
    has_quotes: bool = True
    """of CSV: whether quotes hold a cell together, or are ordinary characters"""
    longest: str = ""
    """the column of CSV with the longest cells: the text, probably"""
    is_lone_object: bool = False
    """whether the file is one JSON object, as a program's settings are"""


TEXT = Syntax("text")
_EXCEL = re.compile(r"\s*sep=(.)\n", re.IGNORECASE)  # a first line of Excel's: the delimiter
_KEY = re.compile(r'\s*(?:\[\s*)?\{\s*"[^"\n]*"\s*:')
_NULL_ROWS = re.compile(r"\s*(?:(?:null|\{\})[ \t]*\n\s*)*")
_NAME = re.compile(r"[^\W\d][\w.-]*(?: [\w.-]+){0,2}")
_WORD = re.compile(r"[^\W\d]\w*")


def recognise_syntax(head: str, is_whole: bool, suffix: str, field: str | None) -> Syntax:
    """The syntax of a file that begins with the text `head`.

    `is_whole`: whether that is all of it; `suffix`: of its name, in lower case; `field`: the one
    that the user named.
    """
    if suffix in (".jsonl", ".ndjson"):
        return Syntax("jsonl")
    found = None
    if suffix not in (".csv", ".tsv", ".tab"):
        found = recognise_json(head, is_whole)
    if found is None and suffix == ".json" and head.strip():
        return Syntax("json")
    return found or recognise_csv(head, is_whole, suffix, field) or TEXT


def recognise_json(head: str, is_whole: bool) -> Syntax | None:
    """The syntax of JSON Lines or JSON; None for anything else."""
    text = head[_NULL_ROWS.match(head).end() :]  # type: ignore[union-attr]
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > 1 and not is_whole:
        lines.pop()  # it may be cut
    lines = lines[:LINES_LOOKED_AT]
    if len(lines) > 2 and all(map(_holds_strings, lines)):
        return Syntax("jsonl")  # of no objects: the reader will refuse it with the way to them
    if text[:1] not in ("{", "["):
        return _recognise_behind(lines)
    objects = [value for value in map(_object, lines) if value]
    if objects and 2 * len(objects) >= len(lines):
        alone = is_whole and len(lines) == 1
        return Syntax("jsonl", tuple(objects[0]), is_lone_object=alone)
    return _recognise_value(text, is_whole)


def _recognise_behind(lines: list[str]) -> Syntax | None:
    """JSON Lines behind a comment or a warning, which the reader will then name as no JSON; None
    for anything else.
    """
    objects = [value for value in map(_object, lines) if value]
    if len(objects) > 2 and 2 * len(objects) >= len(lines):
        return Syntax("jsonl", tuple(objects[0]))
    return None


def _recognise_value(text: str, is_whole: bool) -> Syntax | None:
    """The syntax of a text that may be JSON over several lines."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        if not _KEY.match(text):
            return None
        # Cut, or broken: the reader will say.
        kind = "json" if is_whole or "\n" in text or text[0] == "[" else "jsonl"
        return Syntax(kind, is_lone_object=text[0] == "{" and kind == "json")
    rest = text[end:].lstrip()
    if isinstance(value, dict):
        if not value or rest[:1] not in ("", "{"):
            return None
        return Syntax("json", tuple(value), is_lone_object=not rest)
    if rest or not value or not all(isinstance(item, dict | str) for item in value):
        return None
    return Syntax("json")


def _holds_strings(line: str) -> bool:
    """Whether a line is a JSON string, or a JSON array that begins with one."""
    if not line.lstrip().startswith(('"', '["', '[ "')):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _object(line: str) -> dict | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def recognise_csv(head: str, is_whole: bool, suffix: str, field: str | None) -> Syntax | None:
    """The syntax of CSV, by its name, by a header that names the field, or by a header of names and
    rows of as many cells; None for anything else.
    """
    named = suffix in (".csv", ".tsv", ".tab")
    candidates = []
    delimiters = "\t" if suffix in (".tsv", ".tab") else ",\t;|"
    if excel := _EXCEL.match(head):
        named = True
        delimiters = excel[1]
        head = head[excel.end() :]
    first, *_ = head.lstrip("\n").split("\n", 1)
    for delimiter in delimiters:
        if not (named or field or _is_header([first.split(delimiter), [], []])):
            continue  # no need to parse what will not do
        rows = _first_rows(head, is_whole, delimiter)
        if rows:
            header = tuple(cell.strip() for cell in rows[0])
            is_table = len(header) > 1 and all(len(row) == len(header) for row in rows)
            rank = (field in header, is_table, len(header))
            candidates.append((rank, rows, Syntax("csv", header, delimiter)))
    if not candidates:
        return None
    (has_field, is_table, n_columns), rows, syntax = max(candidates, key=lambda found: found[0])
    if not (named or (has_field and n_columns > 1) or (is_table and _is_header(rows))):
        return None
    sizes = [sum(map(len, cells)) for cells in itertools.zip_longest(*rows[1:], fillvalue="")]
    sizes = (sizes + [0] * n_columns)[:n_columns]
    longest = syntax.columns[sizes.index(max(sizes))]
    return Syntax("csv", syntax.columns, syntax.delimiter, longest=longest)


def _first_rows(head: str, is_whole: bool, delimiter: str) -> list[list[str]]:
    """The rows of CSV that `head` holds in full, without empty ones."""
    lines = head.splitlines(keepends=True)
    if not is_whole:
        lines.pop()
    rows: list[list[str]] = []
    try:
        for row in csv.reader(lines, delimiter=delimiter, strict=True):
            if row:
                rows.append(row)
    except csv.Error:
        pass  # a quote that opens where the head ends, or a broken row: the reader will say
    return rows


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first of the rows consists of distinct names, which must be single words where
    there is but one row more.
    """
    name = _NAME if len(rows) != 2 else _WORD
    header = [cell.strip('"') for cell in rows[0]]
    names = all(name.fullmatch(cell) for cell in header)
    return len(rows) > 1 and len(header) > 1 and names and len(set(header)) == len(header)


# --- JSON ---


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """The lines of a text that comes in chunks, without their ends; "\\n" alone ends a line."""
    held: list[str] = []  # the beginning of a line that is not over yet
    for text in itertools.chain(texts, ["\n"]):  # the last line may lack its end
        *lines, rest = text.split("\n")
        for line in lines:
            held.append(line)
            yield "".join(held)
            held.clear()
        held.append(rest)


def json_lines(texts: Iterable[str], field: str) -> Iterator[Row]:
    """The rows of JSON Lines; lines of white space alone are none."""
    for number, line in enumerate(lines_of(texts), start=1):
        if line.strip():
            try:
                yield number, _text_of(json.loads(line), field)
            except Broken as error:
                yield number, error
            except (ValueError, RecursionError) as error:
                yield number, Broken(f"not JSON ({error})")


def _text_of(record: Any, field: str) -> str | None:
    """The text in a field of a record; None for null and an empty record. Raises Broken."""
    if record is None or record == {}:
        return None
    if isinstance(record, dict) and field not in record:
        fields = ", ".join(record)[:200]
        raise Broken(f"no field {field!r}; fields found: {fields} (--field){_inside(record)}")
    text = record[field] if isinstance(record, dict) else False
    if text is None:
        return None
    if not isinstance(text, str):
        way = ""
        if isinstance(record, str):
            way = f"; of strings, jq -c '..|strings|{{{field}:.}}' FILE makes objects"
        raise Broken(f"no object with text in the field {field!r} (--field){way}")
    try:
        text.encode()  # JSON can spell half a surrogate pair, which is not a character
    except UnicodeEncodeError as error:
        raise Broken(f"not text ({error})") from None
    return text


def _inside(record: dict) -> str:
    """The way to records that are in a list within this one."""
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            path = f".{key}[]" if key.isidentifier() else f".[{json.dumps(key)}][]"
            return f"; its list {key!r}: jq -c '{path}' FILE | python -m data.prepare -"
    return ""


class JSONValues:
    """The values of a JSON text that comes in chunks: the elements of one array, or values one
    after the other. One at a time is in memory. Iterating yields (line, value), or raises Broken,
    with the line in `line`, where it is no JSON: what follows cannot be told.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = iter(texts)
        self._held = ""
        self._at = 0
        self.line = 1

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        in_array = self._next() == "["
        if in_array:
            self._at += 1
        while (character := self._next()) not in ("", "]"):
            yield self.line, self._value()
            if in_array:
                character = self._next()
                if character not in (",", "]"):
                    raise Broken(f"not JSON (expected , or ] and found {character or 'the end'!r})")
                self._at += character == ","
        if in_array:
            if character != "]":
                raise Broken("not JSON (the array is never closed)")
            self._at += 1
        if self._next():
            raise Broken(f"not JSON (more text behind its end: {self._held[self._at :][:20]!r})")

    def _more(self, size: int) -> bool:
        """Hold up to `size` characters more; False at the end."""
        added = []
        for text in self._texts:
            added.append(text)
            size -= len(text)
            if size <= 0:
                break
        self._held = self._held[self._at :] + "".join(added)
        self._at = 0
        return bool(added)

    def _next(self) -> str:
        """The next character that is no white space, which stays; "" at the end."""
        while True:
            while self._at < len(self._held):
                character = self._held[self._at]
                if not character.isspace():
                    return character
                self._at += 1
                self.line += character == "\n"
            if not self._more(1):
                return ""

    def _value(self) -> Any:
        """The value that begins here. When it is not over yet, twice as much is held before it is
        tried again, so that time is linear.
        """
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self._held, self._at)
            except json.JSONDecodeError as error:
                text = self._held
                start = self._at
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(text) - 8
                size = len(text) - start
                if size > LARGEST_ROW:
                    raise Broken(f"a value of more than {LARGEST_ROW:,} characters") from None
                if not (is_cut and self._more(max(size, 1))):
                    self.line += text.count("\n", start, error.pos)
                    raise Broken(f"not JSON ({error.msg})") from None
            except RecursionError:
                raise Broken("not JSON (nested too deeply)") from None
            else:
                self.line += self._held.count("\n", self._at, end)
                self._at = end
                return value


def json_rows(texts: Iterable[str], field: str, name: str) -> Iterator[Row]:
    """The rows of JSON that is an array of objects, or objects over several lines. UserError where
    it is no JSON, as the next row cannot be found then.
    """
    values = JSONValues(texts)
    try:
        for number, value in values:
            try:
                yield number, _text_of(value, field)
            except Broken as error:
                yield number, error
    except Broken as error:
        raise UserError(
            f"{name}, line {values.line:,}: {error}\n"
            "mend it (jq . shows where), or take it as plain text: --format text"
        ) from None


# --- CSV ---


def csv_rows(texts: Iterable[str], field: str, name: str, syntax: Syntax) -> Iterator[Row]:
    """The rows of CSV below its header. UserError where the header lacks the field."""
    csv.field_size_limit(LARGEST_ROW)
    lines = (f"{line}\n" for line in lines_of(texts))
    quoting: Any = csv.QUOTE_MINIMAL if syntax.has_quotes else csv.QUOTE_NONE
    reader = csv.reader(lines, delimiter=syntax.delimiter or ",", strict=True, quoting=quoting)
    written = filter(None, reader)  # an empty line is no row
    header = [cell.strip() for cell in next(written, [])]
    if [cell.lower() for cell in header] == ["sep=", ""]:  # see _EXCEL
        header = [cell.strip() for cell in next(written, [])]
    if header.count(field) != 1:
        columns = ", ".join(header)[:200]
        n_found = header.count(field)
        wrong = f"{n_found} columns named {field!r}" if n_found else f"no column {field!r}"
        raise UserError(
            f"{name}: {wrong}; columns found: {columns} (--field)\n"
            "--format text takes it as plain text"
        )
    place = header.index(field)
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            way = ""
            if syntax.delimiter == "\t" and syntax.has_quotes:
                way = "; --format tsv takes quotes as they stand"
            yield number, Broken(f"not CSV ({error}){way}")
            continue
        if len(row) == len(header):
            yield number, row[place]
        elif row:
            yield number, Broken(f"{len(row)} cells, where the header has {len(header)}")


# --- Parquet ---


def parquet_rows(stream: Readable, field: str, name: str) -> Iterator[Row]:
    """The rows of Parquet. UserError where the column is missing or holds something else."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{name}: reading Parquet needs pyarrow: pip install pyarrow") from None
    # Parquet is read from its end and hashed from its beginning, so it is read from a copy.
    with tempfile.TemporaryFile() as content:
        shutil.copyfileobj(stream, content)
        try:
            table = pyarrow.parquet.ParquetFile(content)
            names = table.schema_arrow.names
            if field not in names:
                columns = ", ".join(names)[:200]
                raise UserError(f"{name}: no column {field!r}; columns found: {columns} (--field)")
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for text in _values(batch.column(0)):
                    number += 1
                    if not isinstance(text, str | bytes | None):
                        found = type(text).__name__
                        raise UserError(
                            f"{name}, row {number:,}: column {field!r} holds {found}, not text"
                        )
                    yield number, _decoded(text)
        except pyarrow.ArrowException as error:
            raise UserError(f"cannot read {name}: {error}") from None


def _values(column: Any) -> list:
    """The values of a column of Parquet. Text that is not UTF-8 comes as bytes."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        import pyarrow

        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return column.cast(pyarrow.large_binary()).to_pylist()


def _decoded(text: str | bytes | None) -> str | Broken | None:
    if not isinstance(text, bytes):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return Broken(f"not utf-8 (byte {error.start:,} of it, 0x{text[error.start]:02x})")
