"""Where documents come from: folders, several sources, named corpora and the download cache."""

import codecs
import gzip
import hashlib
import io
import urllib.request

import pytest
from reading import read, write

from data import sources
from data.names import CORPORA
from data.sources import open_corpus
from errors import UserError


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
    # a.txt.gz, a/z.md, b.txt, ... in code point order
    assert documents == ["A\n", "Z\n", "B\n", "C1", "C2", "U\n"]
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


def test_every_name_that_is_told_can_be_opened():
    assert tuple(sources.NAMED) == CORPORA


def test_stdlib_needs_no_network():
    documents, events, corpus = read("stdlib")
    assert len(documents) > 300
    assert any("def dataclass(" in text for text in documents)
    assert not any("class TestCase" in text and "test_support" in text for text in documents)
    assert all(file.key.endswith(".py") for file in corpus.sources[0].files)
    assert not any("site-packages" in file.key for file in corpus.sources[0].files)
    assert "binary files skipped" not in events
    assert corpus.records == read("stdlib")[2].records


def test_tinyshakespeare_is_checked_and_cached(tmp_path, monkeypatch):
    content = b"First Citizen:\n"
    fetched = []

    def urlopen(url, timeout):
        fetched.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(sources, "CACHE", tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(UserError, match=r"SHA-256.*\n.*stdlib"):
        read("tinyshakespeare")
    monkeypatch.setattr(sources, "TINY", "tiny.txt")
    monkeypatch.setattr(sources, "TINY_SHA256", hashlib.sha256(content).hexdigest())
    assert read("tinyshakespeare")[0] == read("tinyshakespeare")[0] == ["First Citizen:\n"]
    assert len(fetched) == 2  # the refused one and the kept one
