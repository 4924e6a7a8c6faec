"""A prepared folder read through: ids beyond the vocabulary, files that are not what was written,
and a dataset.json that lacks something.
"""

import hashlib
import json

import numpy as np
import pytest
from helpers import make_config, nonsense, train_here, write_corpus

import attention_map
from data import dataset as dataset_module, prepare
from data.dataset import Dataset
from data.tokenizer import ByteTokenizer
from errors import UserError
from ops.checkpoint import load


@pytest.fixture
def folder(tmp_path):
    return write_corpus(tmp_path / "data", nonsense(2000))


def change(folder, split, token, value, record=False):
    """Put an id in place of another and, with `record`, the new digest where the old one stood."""
    path = folder / f"{split}.bin"
    ids = np.fromfile(path, "<u2")
    ids[token] = value
    ids.tofile(path)
    if record:
        about = json.loads((folder / "dataset.json").read_text())
        about["splits"][split]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / "dataset.json").write_text(json.dumps(about))


def n_ids(folder):
    return len(Dataset(folder).tokenizer_spec["symbols"])


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("token", [0, 77, -1])
@pytest.mark.parametrize("beyond", [0, 9, 65_000])
def test_an_id_beyond_the_vocabulary_is_found(split, token, beyond, folder, monkeypatch):
    monkeypatch.setattr(dataset_module, "CHECKED_AT_ONCE", 64)  # the last part is a short one
    vocab_size = n_ids(folder)
    Dataset(folder).check_content(vocab_size)
    value = min(vocab_size + beyond, 65_535)
    change(folder, split, token, value, record=True)
    place = token % len(Dataset(folder).tokens[split])
    message = rf"{split}\.bin is damaged: token {place:,} is {value:,}, and the vocabulary has"
    for with_digests in (None, False, True):
        with pytest.raises(UserError, match=message):
            Dataset(folder).check_content(vocab_size, with_digests)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_changed_file_is_found_by_its_digest(split, folder, capsys):
    before = Dataset(folder).tokens[split][50]
    change(folder, split, 50, (before + 1) % n_ids(folder))
    data = Dataset(folder)
    data.check_content(n_ids(folder), with_digests=False)
    for with_digests in (None, True):
        with pytest.raises(UserError, match=rf"{split}\.bin is damaged: its SHA-256 is [0-9a-f]+"):
            data.check_content(n_ids(folder), with_digests)
    assert capsys.readouterr().err == ""


def test_large_files_are_hashed_when_told(folder, monkeypatch, capsys):
    monkeypatch.setattr(dataset_module, "DIGESTED_BYTES", 3999)  # there are 4,000
    change(folder, "train", 50, (Dataset(folder).tokens["train"][50] + 1) % n_ids(folder))
    Dataset(folder).check_content(n_ids(folder))
    note = capsys.readouterr().err
    assert f"python -m data.prepare --check {folder}" in note
    assert note.count("\n") == 1
    with pytest.raises(UserError, match="SHA-256"):
        Dataset(folder).check_content(n_ids(folder), with_digests=True)


def test_a_digest_that_was_never_written_is_not_missed(folder):
    about = json.loads((folder / "dataset.json").read_text())
    about["splits"]["train"]["sha256"] = ""
    (folder / "dataset.json").write_text(json.dumps(about))
    Dataset(folder).check_content(n_ids(folder), with_digests=True)


# --- who checks ---


@pytest.mark.parametrize(("record", "value"), [(True, 60_000), (False, 0)])
def test_training_checks_before_it_begins(record, value, folder, tmp_path):
    change(folder, "train", slice(3, 9), value, record)
    with pytest.raises(UserError, match=r"train\.bin is damaged"):
        train_here(make_config(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_checks_too(folder, tmp_path):
    train_here(make_config(folder, tmp_path / "run", stop_at=2))
    change(folder, "val", 3, 60_000)
    with pytest.raises(UserError, match=r"val\.bin is damaged"):
        train_here(make_config(folder, tmp_path / "run", resume=True))
    assert load(tmp_path / "run" / "checkpoint.pt").step == 2


def test_ablation_checks_the_ids_it_measures_on(folder, tmp_path):
    train_here(make_config(folder, tmp_path / "run", stop_at=0, max_steps=1))
    checkpoint = load(tmp_path / "run" / "checkpoint.pt")
    assert attention_map.ablation_texts(checkpoint, [1]).keys() == {"validation"}
    change(folder, "val", 3, 60_000)
    with pytest.raises(UserError, match=r"val\.bin is damaged"):
        attention_map.ablation_texts(checkpoint, [1])


def test_the_command_that_checks(folder, capsys):
    assert prepare.prepare(prepare.Options(check=folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"{folder / name}.bin: {n:,} tokens, all ids below {n_ids(folder)}, SHA-256 as recorded"
        for name, n in (("train", 1800), ("val", 200))
    ]
    change(folder, "val", 7, 1000)
    with pytest.raises(UserError, match=r"val\.bin is damaged: token 7 is 1,000"):
        prepare.prepare(prepare.Options(check=folder))
    with pytest.raises(UserError, match="no prepared data"):
        prepare.prepare(prepare.Options(check=folder / "nowhere"))
    with pytest.raises(UserError, match="--check reads a prepared folder"):
        prepare.prepare(prepare.Options(("shakespeare.txt",), check=folder))


def test_a_damaged_folder_is_not_taken_for_prepared(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(nonsense(2000))
    options = prepare.Options((str(tmp_path / "text.txt"),), "byte", out=tmp_path / "out")
    prepare.prepare(options)
    prepare.prepare(options)
    assert "already prepared" in capsys.readouterr().out
    change(tmp_path / "out", "val", 7, 255)
    with pytest.raises(UserError, match=r"val\.bin is damaged: .*--overwrite"):
        prepare.prepare(options)


# --- a dataset.json that lacks something ---


@pytest.mark.parametrize(
    "change_json",
    [
        lambda about: about.pop("splits"),
        lambda about: about.pop("dtype"),
        lambda about: about.pop("tokenizer"),
        lambda about: about.update(dtype="float16"),
        lambda about: about.update(dtype=["uint16"]),
        lambda about: about.update(splits=[]),
        lambda about: about["splits"].pop("val"),
        lambda about: about["splits"]["train"].pop("sha256"),
        lambda about: about["splits"]["train"].update(tokens="1800"),
        lambda about: about["splits"]["train"].update(bytes=None),
        lambda about: about["splits"].update(train=3),
    ],
)
def test_a_damaged_description(change_json, folder):
    about = json.loads((folder / "dataset.json").read_text())
    change_json(about)
    (folder / "dataset.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"dataset\.json is damaged \(.*--overwrite") as caught:
        Dataset(folder)
    assert "\n" not in str(caught.value)


def test_an_empty_split(tmp_path):
    folder = write_corpus(tmp_path / "data", "abc" * 10, "", tokenizer=ByteTokenizer())
    with pytest.raises(UserError, match="the val split has 0 tokens"):
        Dataset(folder).check_context(4)


def test_a_folder_of_another_program_is_not_taken_for_prepared(folder, tmp_path):
    """One without options or sources, as a script may write it."""
    (tmp_path / "text.txt").write_text(nonsense(2000))
    with pytest.raises(UserError, match="--overwrite replaces it") as caught:
        prepare.prepare(prepare.Options((str(tmp_path / "text.txt"),), out=folder))
    assert "seed None, not 1337" in str(caught.value)
