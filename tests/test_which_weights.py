"""Which weights a command reads, and that it says so; which folder a run is."""

import json
import shutil

import pytest
from helpers import (
    assert_same_run,
    command,
    flags,
    make_config,
    nonsense,
    read_records,
    train_here,
    write_corpus,
)

from ops.checkpoint import find, load
from ops.command_line import parse

pytestmark = pytest.mark.slow
RARELY = {"eval_every": 100, "save_every": 100, "max_steps": 40}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", nonsense())


@pytest.mark.parametrize("ends", [{"stop_at": 30}, {"max_minutes": 1e-9}])
def test_a_stopped_run_is_evaluated_and_its_weights_are_the_best(tmp_path, data, ends):
    assert train_here(make_config(data, tmp_path / "r", **RARELY, **ends)) == 0
    best, latest = load(tmp_path / "r" / "best.pt"), load(tmp_path / "r" / "checkpoint.pt")
    assert best.step == latest.step > 0
    extra = [r for r in read_records(tmp_path / "r") if r.get("extra") and r["kind"] == "eval"]
    assert [r["step"] for r in extra] == [best.step]
    assert best.best_val_loss == extra[0]["val_loss"]


def test_the_last_look_is_forgotten_when_the_run_goes_on(tmp_path, data):
    """Two stops between evaluations, and none: the same run, whatever was seen at the stops."""
    whole = make_config(data, tmp_path / "whole", **RARELY | {"eval_every": 20}, patience=2)
    assert train_here(whole) == 0
    for stop in (7, 33, 0):
        part = whole.replace(out=str(tmp_path / "part"), resume=True, stop_at=stop)
        assert train_here(part) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_random_weights_are_never_the_best_once_there_are_later_ones(tmp_path, data):
    """As after a signal, which leaves no time for an evaluation."""
    assert train_here(make_config(data, tmp_path / "r", **RARELY, stop_at=30)) == 0
    assert train_here(make_config(data, tmp_path / "zero", **RARELY, stop_at=30)) == 0
    shutil.copy(tmp_path / "r" / "checkpoint.pt", tmp_path / "later.pt")
    (tmp_path / "z").mkdir()
    assert train_here(make_config(data, tmp_path / "z", max_steps=0)) == 0
    assert find(tmp_path / "z").name == "best.pt"  # there is nothing else
    shutil.copy(tmp_path / "later.pt", tmp_path / "z" / "checkpoint.pt")
    assert find(tmp_path / "z").name == "checkpoint.pt"


@pytest.mark.parametrize("script", ["sample.py", "attention_map.py"])
def test_commands_say_what_they_read(tmp_path, data, script):
    assert train_here(make_config(data, tmp_path / "r", stop_at=5)) == 0
    best = load(tmp_path / "r" / "best.pt")
    _, error = command(script, tmp_path / "r")
    first = error.split("\n")[0]
    loss = f"validation loss {best.best_val_loss:.4f}"
    assert first == f"reading {tmp_path / 'r' / 'best.pt'}: step {best.step}, {loss}"
    _, error = command(script, tmp_path / "r" / "checkpoint.pt")
    assert "checkpoint.pt: step 5, best validation loss so far" in error.split("\n")[0]


# --- the folder named is the run ---


def test_config_json_does_not_say_where_it_lies(tmp_path, data):
    assert train_here(make_config(data, tmp_path / "r")) == 0
    assert json.loads((tmp_path / "r" / "config.json").read_text())["run"]["out"] == ""


@pytest.mark.parametrize("named", ["folder", "config.json"])
@pytest.mark.parametrize("recorded", ["", "the old place"])
def test_a_run_that_was_moved_goes_on_where_it_is(tmp_path, data, named, recorded):
    old, new = tmp_path / "old", tmp_path / "new"
    assert train_here(make_config(data, old, stop_at=4)) == 0
    shutil.copytree(old, new)
    plain = json.loads((new / "config.json").read_text())
    plain["run"]["out"] = str(old) if recorded else ""  # as earlier versions recorded it
    (new / "config.json").write_text(json.dumps(plain))
    before = {path.name: path.read_bytes() for path in old.iterdir() if path.is_file()}
    config = parse([str(new if named == "folder" else new / "config.json"), "--resume"])
    assert config.run.out == str(new)
    assert train_here(config) == 0
    assert load(new / "checkpoint.pt").step == 8
    assert {path.name: path.read_bytes() for path in old.iterdir() if path.is_file()} == before


def test_out_on_the_command_line_counts(tmp_path, data):
    assert train_here(make_config(data, tmp_path / "r", stop_at=4)) == 0
    config = parse([str(tmp_path / "r"), *flags(out=str(tmp_path / "s"), lr=1e-3)])
    assert (config.run.out, config.optim.lr) == (str(tmp_path / "s"), 1e-3)


def test_data_that_was_moved_is_known_by_its_fingerprint(tmp_path, data):
    config = make_config(tmp_path / "first", tmp_path / "r", stop_at=4)
    shutil.copytree(data, tmp_path / "first")
    assert train_here(config) == 0
    (tmp_path / "first").rename(tmp_path / "second")
    _, error = command("train.py", tmp_path / "r", "--resume", code=2)
    assert "isn't prepared" in error
    assert "name it with --data" in error
    command("train.py", tmp_path / "r", "--resume", "--data", tmp_path / "second")
    assert load(tmp_path / "r" / "checkpoint.pt").step == 8
