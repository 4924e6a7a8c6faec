"""A dataset of huggingface.co as a corpus, with a module in the place of the package datasets."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from reading import read

from data.prepare import Options, prepare
from data.sources import open_corpus
from errors import MachineError, UserError

STORIES = [
    {"text": "One caf\u00e9.\r\n", "title": "1"},
    {"text": None, "title": None},
    {"text": "Two \U0001f600", "title": "2"},
    {"text": "", "title": "3"},
]


@pytest.fixture
def published(monkeypatch):
    """What the mock was asked for; its rows may be exchanged."""
    asked = SimpleNamespace(calls=[], rows=STORIES)

    def load_dataset(name, configuration, split, streaming):
        asked.calls.append((name, configuration, split, streaming))
        return iter(asked.rows)

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_rows_are_documents_and_the_network_is_asked_once(published):
    documents, events, corpus = read("hf:owner/Tiny.Stories")
    assert documents == ["One caf\u00e9.\n", "Two \U0001f600"]
    assert events == {"empty documents skipped": 2, "line ends (CRLF or CR) made \\n": 1}
    assert [text for _, text in corpus.documents()] == documents
    assert published.calls == [("owner/Tiny.Stories", None, "train", True)]
    assert corpus.records[0]["name"] == "hf:owner/Tiny.Stories"


@pytest.mark.parametrize(
    ("name", "call", "folder"),
    [
        ("hf:wikitext", ("wikitext", None, "train"), "hf-wikitext"),
        ("hf:o/n:validation", ("o/n", None, "validation"), "n-validation"),
        ("hf:o/n/sample-10BT", ("o/n", "sample-10BT", "train"), "sample-10BT"),
        ("hf:o/n/c:test", ("o/n", "c", "test"), "c-test"),
    ],
)
def test_configuration_split_and_field(published, name, call, folder):
    documents, _, corpus = read(name, field="title", format="text")
    assert documents == ["1", "2", "3"]
    assert published.calls == [(*call, True)]
    assert corpus.name == folder


def failing(error, rows=()):
    yield from rows
    raise error


@pytest.mark.parametrize(
    ("rows", "field", "message"),
    [
        (STORIES, "body", "row 1: no column 'body'; columns found: text, title "),
        ([*STORIES, {"title": ""}], "text", "row 5: no column 'text'; columns found: title "),
        ([{"text": ["a"]}], "text", "row 1: column 'text' holds list, not text"),
        (failing(ConnectionError("no\n route")), "text", "(ConnectionError: no route)"),
        (failing(TimeoutError("3 s"), STORIES), "text", "(TimeoutError: 3 s)"),
    ],
)
def test_what_cannot_be_had_is_a_line_and_leaves_nothing(published, tmp_path, rows, field, message):
    published.rows = rows
    options = Options(corpus=("hf:o/n",), field=field, out=tmp_path / "out")
    with pytest.raises(UserError) as error:
        prepare(options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c/d", "hf:a b", "hf:a/b:", "hf:../x/y"])
def test_a_name_of_another_form_is_refused(published, name):
    with pytest.raises(UserError, match=r"write hf:OWNER/NAME"):
        open_corpus([name])
    assert published.calls == []


def test_without_the_package_a_line_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install datasets; or pipe a file .*datasets/o/n/"):
        open_corpus(["hf:o/n"])


def test_a_path_comes_before_a_dataset_and_a_missing_path_names_it(
    published, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf:o").write_text("a file")
    assert read("hf:o")[0] == ["a file"]
    with pytest.raises(UserError, match=r"hf:owner/name is the dataset of that name"):
        open_corpus(["owner/name"])
    with pytest.raises(UserError, match=r"named corpora are [\w, ]+$"):
        open_corpus(["notes/book.txt"])
    assert published.calls == []


def test_a_full_disk_is_the_machines_fault(published, monkeypatch):
    class Full:
        def write(self, line):
            pass

        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("data.hub.tempfile.TemporaryFile", Full)
    with pytest.raises(MachineError, match=r"hf:o/n can't be copied .*No space left.*TMPDIR"):
        open_corpus(["hf:o/n"])
