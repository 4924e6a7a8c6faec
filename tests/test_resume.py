"""N steps straight, and N steps in parts, are the same to the last bit: weights, moments, log,
samples.

Eight configurations in which any two of five choices meet in all four combinations.
"""

import dataclasses
import shlex
from itertools import combinations

import pytest
import torch
from helpers import (
    assert_same_run,
    losses,
    make_config,
    nonsense,
    read_records,
    same_value,
    train_here,
    write_corpus,
)

from configs import read_config
from errors import UserError
from ops.checkpoint import load, save
from ops.command_line import parse

pytestmark = pytest.mark.slow

STEPS = 7


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", nonsense())


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    """loss.png is not compared, and costs as much as the training."""
    monkeypatch.setattr("ops.session.plot_losses", lambda folder: None)


def in_parts(data, folder, stops, **fields):
    """Train up to each of `stops`, each time from what the folder holds, then to the end."""
    for stop in (*stops, 0):
        assert (
            train_here(
                make_config(data, folder, max_steps=STEPS, resume=True, stop_at=stop, **fields)
            )
            == 0
        )
        assert load(folder / "checkpoint.pt").step == (stop or STEPS)


MATRIX = [  # dropout, precision, optimizer, sequences in a micro-batch (of 4), attention
    (0.0, "float32", "adamw", 0, "fused"),
    (0.0, "float32", "adamw", 2, "explicit"),
    (0.0, "bfloat16", "muon", 0, "fused"),
    (0.0, "bfloat16", "muon", 2, "explicit"),
    (0.1, "float32", "muon", 0, "explicit"),
    (0.1, "float32", "muon", 2, "fused"),
    (0.1, "bfloat16", "adamw", 0, "explicit"),
    (0.1, "bfloat16", "adamw", 2, "fused"),
]


def test_any_two_choices_meet():
    for a, b in combinations(zip(*MATRIX, strict=True), 2):
        assert len(set(zip(a, b, strict=True))) == 4


@pytest.mark.parametrize(("dropout", "precision", "optimizer", "micro", "attention"), MATRIX)
def test_matrix(tmp_path, data, dropout, precision, optimizer, micro, attention):
    fields = {
        "dropout": dropout,
        "precision": precision,
        "optimizer": optimizer,
        "micro_batch_size": micro,
    }
    fields |= {"attention": attention, "eval_every": 2, "save_every": 3}
    assert train_here(make_config(data, tmp_path / "straight", max_steps=STEPS, **fields)) == 0
    in_parts(
        data, tmp_path / "parts", [3, 4], **fields
    )  # at a save, and between an evaluation and a save
    assert_same_run(tmp_path / "straight", tmp_path / "parts")
    first = losses(tmp_path / "straight")
    assert (
        len(set(first.values())) == STEPS
    )  # something was learned: the comparison is of something


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_at_any_step(tmp_path, data, stop):
    fields = {"dropout": 0.1, "eval_every": 3, "save_every": 2, "patience": 5, "recompute": True}
    assert train_here(make_config(data, tmp_path / "straight", max_steps=STEPS, **fields)) == 0
    in_parts(data, tmp_path / "parts", [stop], **fields)
    assert_same_run(tmp_path / "straight", tmp_path / "parts")


def test_at_every_step(tmp_path, data):
    fields = {
        "dropout": 0.1,
        "optimizer": "muon",
        "n_layer": 2,
        "positions": "rotary",
        "tie_embeddings": False,
    }
    assert train_here(make_config(data, tmp_path / "straight", max_steps=STEPS, **fields)) == 0
    in_parts(data, tmp_path / "parts", range(1, STEPS), **fields)
    assert_same_run(tmp_path / "straight", tmp_path / "parts")


def test_from_an_older_checkpoint(tmp_path, data, monkeypatch):
    """As after a kill: log, samples and best.pt are ahead of checkpoint.pt, and are brought
    back.
    """
    fields = {
        "dropout": 0.1,
        "eval_every": 1,
        "save_every": 3,
        "probe_tokens": 8,
        "max_steps": STEPS,
    }
    assert train_here(make_config(data, tmp_path / "straight", **fields)) == 0
    assert train_here(make_config(data, tmp_path / "killed", stop_at=3, **fields)) == 0
    older = (tmp_path / "killed" / "checkpoint.pt").read_bytes()
    assert train_here(make_config(data, tmp_path / "killed", stop_at=5, resume=True, **fields)) == 0
    (tmp_path / "killed" / "checkpoint.pt").write_bytes(older)
    with open(tmp_path / "killed" / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"kind": "train", "st')
    assert train_here(make_config(data, tmp_path / "killed", resume=True, **fields)) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    for name in ("straight", "killed"):
        found = sorted(path.name for path in (tmp_path / name / "attention").iterdir())
        assert found == [f"step-{step:09}.npz" for step in range(STEPS + 1)]


def test_free_fields_change_no_step(tmp_path, data):
    """Logging, evaluating and saving otherwise from step 4 on: the losses of the steps are the
    same.
    """
    assert train_here(make_config(data, tmp_path / "straight", max_steps=STEPS, dropout=0.1)) == 0
    assert (
        train_here(make_config(data, tmp_path / "other", max_steps=STEPS, dropout=0.1, stop_at=4))
        == 0
    )
    changes = {
        "log_every": 2,
        "eval_every": 5,
        "eval_batches": 1,
        "save_every": 1,
        "sample_tokens": 0,
        "recompute": True,
    }
    assert (
        train_here(
            make_config(
                data, tmp_path / "other", max_steps=STEPS, dropout=0.1, resume=True, **changes
            )
        )
        == 0
    )
    expected = losses(tmp_path / "straight")
    assert losses(tmp_path / "other") == {step: expected[step] for step in (1, 2, 3, 4, 6, 7)}
    a, b = (load(tmp_path / name / "checkpoint.pt").model for name in ("straight", "other"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_constant_rate_may_go_on_beyond_its_end(tmp_path, data, optimizer, capsys):
    """Ended at 4, made longer twice, and the whole at once: the same run."""
    fields = {"schedule": "constant", "optimizer": optimizer, "dropout": 0.1, "eval_every": 2}
    assert train_here(make_config(data, tmp_path / "straight", max_steps=10, **fields)) == 0
    for end in (4, 6, 10):
        config = make_config(data, tmp_path / "parts", max_steps=end, resume=True, **fields)
        assert train_here(config) == 0
    assert_same_run(tmp_path / "straight", tmp_path / "parts")
    assert "max_steps changed since the checkpoint from 6 to 10" in capsys.readouterr().out
    assert read_config(tmp_path / "parts" / "config.json").optim.max_steps == 10


def test_the_command_that_trains_a_decayed_run_further(tmp_path, data, monkeypatch):
    """It is in the message, and it works as it stands, from the latest weights."""
    monkeypatch.chdir(tmp_path)
    assert train_here(make_config(data, "r", eval_every=2)) == 0
    with pytest.raises(UserError, match="max_steps is 12") as caught:
        train_here(make_config(data, "r", max_steps=12, resume=True))
    program, script, *words = shlex.split(str(caught.value).partition("of their own: ")[2])
    assert (program, script) == ("python", "train.py")
    assert train_here(parse(words)) == 0
    more = load("r-more/checkpoint.pt")
    assert (more.step, more.config["run"]["init_from"]) == (4, "r/checkpoint.pt")


def test_another_micro_batch_is_said_and_exact_to_rounding(tmp_path, data, capsys):
    """Two more roundings in each gradient; seven updates of a loss of size 3."""
    assert train_here(make_config(data, tmp_path / "straight", max_steps=STEPS)) == 0
    assert train_here(make_config(data, tmp_path / "other", max_steps=STEPS, stop_at=4)) == 0
    assert "micro_batch_size changed" not in capsys.readouterr().out
    assert (
        train_here(
            make_config(data, tmp_path / "other", max_steps=STEPS, resume=True, micro_batch_size=1)
        )
        == 0
    )
    assert (
        "micro_batch_size changed since the checkpoint: the same run but for rounding"
        in capsys.readouterr().out
    )
    expected = losses(tmp_path / "straight")
    assert losses(tmp_path / "other") == pytest.approx(expected, abs=3 * 16 * 2**-24)


def test_another_micro_batch_draws_other_masks(tmp_path, data, capsys):
    assert (
        train_here(make_config(data, tmp_path / "r", max_steps=STEPS, dropout=0.1, stop_at=4)) == 0
    )
    config = make_config(
        data, tmp_path / "r", max_steps=STEPS, dropout=0.1, resume=True, micro_batch_size=1
    )
    assert train_here(config) == 0
    assert "other dropout masks of the same law" in capsys.readouterr().out


def test_attention_may_be_exchanged(tmp_path, data, capsys):
    assert train_here(make_config(data, tmp_path / "r", max_steps=STEPS, stop_at=4)) == 0
    assert (
        train_here(
            make_config(data, tmp_path / "r", max_steps=STEPS, resume=True, attention="explicit")
        )
        == 0
    )
    assert (
        "attention changed since the checkpoint: the same run but for rounding"
        in capsys.readouterr().out
    )
    assert train_here(make_config(data, tmp_path / "straight", max_steps=STEPS)) == 0
    assert losses(tmp_path / "r") == pytest.approx(
        losses(tmp_path / "straight"), abs=3 * 16 * 2**-24
    )


def as_if_from_a_gpu(folder, precision):
    """Have a run's checkpoint say that a GPU made it."""
    checkpoint = load(folder / "checkpoint.pt")
    run = checkpoint.config["run"]
    run |= {"device": "cuda", "precision": precision, "compile": "on", "threads": 24}
    if precision == "float16":
        checkpoint.scaler = torch.amp.GradScaler("cpu").state_dict()
    save(checkpoint, folder / "checkpoint.pt")


@pytest.mark.parametrize("asked", ["auto", "cpu"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_run_from_a_gpu_goes_on_on_a_cpu(tmp_path, data, capsys, asked, precision):
    """The scaler of float16 is left behind. Where the CPU's precision is float32, the rest of the
    run is that of a run which was here all along.
    """
    fields = {"max_steps": STEPS, "optimizer": "muon"}
    assert train_here(make_config(data, tmp_path / "here", **fields)) == 0
    folder = tmp_path / "r"
    assert train_here(make_config(data, folder, stop_at=4, **fields)) == 0
    as_if_from_a_gpu(folder, precision)
    onwards = {"device": asked, "resume": True}
    if asked == "auto":
        onwards |= {"precision": "auto", "compile": "auto", "threads": 0}
    assert train_here(make_config(data, folder, **fields, **onwards)) == 0
    said = capsys.readouterr().out
    assert "threads changed since the checkpoint: the same run but for rounding" in said
    assert f"precision {precision}, now " in said or (asked, precision) == ("auto", "bfloat16")
    again = load(folder / "checkpoint.pt")
    assert again.config["run"]["device"] == "cpu"
    if asked == "cpu":
        assert same_value(again.model, load(tmp_path / "here" / "checkpoint.pt").model)


def test_the_log_names_each_step_once(tmp_path, data):
    in_parts(data, tmp_path / "r", [2, 4, 5])
    steps = [r["step"] for r in read_records(tmp_path / "r") if r["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.drill
@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "float32"), ("muon", "bfloat16")])
def test_compiled(tmp_path, data, optimizer, precision, capsys):
    fields = {
        "compile": "on",
        "optimizer": optimizer,
        "precision": precision,
        "dropout": 0.1,
        "max_steps": STEPS,
    }
    config = make_config(data, tmp_path / "straight", **fields)
    assert train_here(config) == 0
    assert (
        train_here(
            dataclasses.replace(
                config, run=dataclasses.replace(config.run, out=str(tmp_path / "again"))
            )
        )
        == 0
    )
    assert_same_run(tmp_path / "straight", tmp_path / "again")
    in_parts(
        data,
        tmp_path / "parts",
        [3],
        **{name: value for name, value in fields.items() if name != "max_steps"},
    )
    assert_same_run(tmp_path / "straight", tmp_path / "parts")
    assert "going on without" not in capsys.readouterr().err
