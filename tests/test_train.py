"""The loop from end to end on a small corpus: what it leaves in the run folder, how it ends, and
that it repeats.
"""

import dataclasses
import importlib
import json
import math
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    assert_same_run,
    assert_same_state,
    command,
    losses,
    make_config,
    nonsense,
    read_records,
    restored,
    start,
    train_here,
    write_byte_corpus,
    write_corpus,
)

from configs import read_config
from data.batches import training_batch
from data.dataset import Dataset
from errors import MachineError, UserError
from ops import distributed
from ops.checkpoint import Checkpoint, load, open_run
from ops.device import set_up
from ops.log import RunLog
from ops.session import Session
from ops.stopping import Stop
from training.evaluate import split_loss
from training.loss import cross_entropy
from training.optimizer import learning_rate

pytestmark = pytest.mark.slow

TEXT = nonsense()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", TEXT)


@pytest.fixture(scope="module")
def one(tmp_path_factory, data):
    """A run of 8 steps: evaluated and saved at 0, 4 and 8, dropout on."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert train_here(make_config(data, folder, dropout=0.1, probe_tokens=8)) == 0
    return folder


def interrupted(config, step, number, monkeypatch):
    """Run `config` and receive a signal while update `step` is computed. Returns the exit code."""
    module = importlib.import_module("training.trainer")

    def batch(tokens, context_length, batch_size, seed, index, rows):
        listening = isinstance(getattr(signal.getsignal(number), "__self__", None), Stop)
        if index == step - 1 and listening:
            os.kill(os.getpid(), number)
        return training_batch(tokens, context_length, batch_size, seed, index, rows)

    with monkeypatch.context() as patch:
        patch.setattr(module, "training_batch", batch)
        return train_here(config)


# --- what a run leaves ---


def test_files_of_a_run(one, data, capsys):
    names = {path.name for path in one.iterdir()}
    assert names == {
        "config.json",
        "log.jsonl",
        "checkpoint.pt",
        "best.pt",
        "loss.png",
        "samples.txt",
        "attention",
    }
    assert (one / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (one / "attention").iterdir()) == [
        f"step-{step:09}.npz" for step in (0, 4, 8)
    ]
    plain = json.loads((one / "config.json").read_text())
    assert plain["run"]["threads"] == 1
    state = load(one / "checkpoint.pt")
    assert (state.step, state.version) == (8, 1)
    assert state.dataset == Dataset(data).fingerprint
    assert state.tokenizer == Dataset(data).tokenizer_spec


def test_log_of_a_run(one):
    records = read_records(one)
    assert [(r["kind"], r["step"]) for r in records if r["kind"] != "sample"] == [
        ("eval", 0),
        *[("train", step) for step in (1, 2, 3, 4)],
        ("eval", 4),
        *[("train", step) for step in (5, 6, 7, 8)],
        ("eval", 8),
    ]
    assert [r["step"] for r in records if r["kind"] == "sample"] == [0, 4, 8]
    optim = make_config("d", "r").optim
    assert [r["lr"] for r in records if r["kind"] == "train"] == [
        learning_rate(step, optim) for step in range(8)
    ]
    texts = [r["text"] for r in records if r["kind"] == "sample"]
    assert (one / "samples.txt").read_text() == "".join(
        f"--- step {step} ---\n{text}\n\n" for step, text in zip((0, 4, 8), texts, strict=True)
    )
    assert all(len(text) == 4 for text in texts)


def test_the_loss_logged_is_that_of_the_step_named(one, data):
    """Record 1 is the loss of the first batch under the initial weights, which checkpoint and seed
    give back.
    """
    config = make_config(data, one)
    with restored():
        set_up(config.run)
        from model.gpt import GPT

        model = GPT(config.model, len(Dataset(data).tokenizer_spec["symbols"]))
        tokens, targets = training_batch(Dataset(data).tokens["train"], 16, 4, 1337, 0)
        expected = cross_entropy(model(tokens), targets).item()
    assert losses(one)[1] == pytest.approx(expected, abs=0.02)  # the run had dropout
    assert expected == pytest.approx(math.log(model.vocab_size), rel=0.01)


def test_best_is_the_best(one):
    evals = {r["step"]: r["val_loss"] for r in read_records(one) if r["kind"] == "eval"}
    best = load(one / "best.pt")
    assert best.step == min(evals, key=evals.get)
    assert best.best_val_loss == evals[best.step] == load(one / "checkpoint.pt").best_val_loss


def test_evaluations_are_those_of_the_saved_weights(one, data):
    model, _, state = open_run(one / "checkpoint.pt")
    with restored():
        torch.set_num_threads(1)
        expected = split_loss(model, Dataset(data).tokens["val"], 4, 8)
    (record,) = (r for r in read_records(one) if r["kind"] == "eval" and r["step"] == state.step)
    assert record["val_loss"] == expected


def test_introduction_and_farewell(tmp_path, data, capsys):
    assert train_here(make_config(data, tmp_path / "r", max_steps=2)) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    assert [line.split()[0] for line in lines[:5]] == ["device", "model", "data", "step", "run"]
    assert "micro-batch 4 x accumulation 1 x processes 1 x context 16 = 64 tokens" in lines[3]
    assert any(f"python sample.py {tmp_path / 'r'}" in line for line in lines)


def test_step_0_is_saved_before_the_first_update(tmp_path, data, monkeypatch):
    seen = []

    def look(step, optim):
        seen.append(
            (
                step,
                load(tmp_path / "r" / "checkpoint.pt").step,
                load(tmp_path / "r" / "best.pt").step,
            )
        )
        return 1e-3

    monkeypatch.setattr("training.trainer.learning_rate", look)
    assert train_here(make_config(data, tmp_path / "r", max_steps=1)) == 0
    assert seen == [(0, 0, 0)]


@pytest.mark.parametrize(
    ("eval_every", "save_every", "evals"),
    [(3, 5, [0, 3, 6, 7]), (0, 0, [7]), (7, 7, [0, 7]), (100, 100, [0, 7])],
)
def test_the_last_step_is_evaluated_and_saved(
    tmp_path, data, monkeypatch, eval_every, save_every, evals
):
    saved, save = [], importlib.import_module("ops.checkpoint").save

    def spy(checkpoint, path):
        saved.append((checkpoint.step, path.name))
        save(checkpoint, path)

    monkeypatch.setattr("ops.checkpoint.save", spy)
    config = make_config(
        data, tmp_path / "r", max_steps=7, eval_every=eval_every, save_every=save_every
    )
    assert train_here(config) == 0
    assert [r["step"] for r in read_records(tmp_path / "r") if r["kind"] == "eval"] == evals
    steps = [step for step, name in saved if name == "checkpoint.pt"]
    assert steps == sorted({0, 7, *(range(0, 8, save_every) if save_every else ())})


def test_no_steps_at_all(tmp_path, data):
    assert train_here(make_config(data, tmp_path / "r", max_steps=0)) == 0
    assert load(tmp_path / "r" / "checkpoint.pt").step == 0
    assert [r["kind"] for r in read_records(tmp_path / "r")] == ["eval", "sample"]


# --- it learns, and repeats ---


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls(tmp_path, data, optimizer):
    """From an even guess (log 21 = 3.04) to well below the entropy of single characters."""
    counts = [TEXT.count(symbol) / len(TEXT) for symbol in set(TEXT)]
    entropy = -sum(share * math.log(share) for share in counts)
    shape = {
        "n_layer": 2,
        "d_model": 32,
        "context_length": 32,
        "n_head": 4,
        "positions": "rotary",
        "tie_embeddings": False,
    }
    run = {
        "max_steps": 100,
        "batch_size": 16,
        "lr": 1e-2,
        "eval_every": 100,
        "eval_batches": 0,
        "save_every": 0,
    }
    assert train_here(make_config(data, tmp_path / "r", optimizer=optimizer, **shape, **run)) == 0
    first, last = (r["val_loss"] for r in read_records(tmp_path / "r") if r["kind"] == "eval")
    assert first == pytest.approx(math.log(len(counts)) + 32 * 0.02**2 / 2, rel=0.01)
    assert last < 0.5 * entropy


@pytest.mark.parametrize("attention", ["fused", "explicit"])
def test_twice_is_the_same(tmp_path, data, attention):
    for name in ("one", "two"):
        assert train_here(make_config(data, tmp_path / name, dropout=0.2, attention=attention)) == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")
    assert (
        train_here(make_config(data, tmp_path / "three", dropout=0.2, attention=attention, seed=1))
        == 0
    )
    assert losses(tmp_path / "three") != losses(tmp_path / "one")


def test_evaluating_and_logging_leave_the_mathematics_alone(tmp_path, data, one):
    quiet = {
        "eval_every": 3,
        "eval_batches": 1,
        "save_every": 5,
        "log_every": 8,
        "sample_tokens": 0,
    }
    assert train_here(make_config(data, tmp_path / "r", dropout=0.1, **quiet)) == 0
    a, b = load(tmp_path / "r" / "checkpoint.pt"), load(one / "checkpoint.pt")
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    assert losses(tmp_path / "r") == {8: losses(one)[8]}


def test_accumulation_is_one_batch(tmp_path, data):
    """Gradients of 8 sequences, 2 at a time: a sum of four parts differs by some ten roundings from
    the sum of all, and three updates of AdamW carry that on. Compared are losses, of size 3, in
    float32.
    """
    for micro in (0, 2, 4):
        config = make_config(
            data,
            tmp_path / str(micro),
            batch_size=8,
            micro_batch_size=micro,
            max_steps=3,
            warmup_steps=0,
        )
        assert train_here(config) == 0
    for micro in ("2", "4"):
        for step, loss in losses(tmp_path / micro).items():
            assert loss == pytest.approx(losses(tmp_path / "0")[step], abs=3 * 16 * 2**-24)


def test_the_gradient_is_the_mean_over_the_global_batch(tmp_path, data):
    """The logged norm of one step against the gradient of one plain backward pass over the whole
    batch.
    """
    config = make_config(
        data, tmp_path / "r", batch_size=8, micro_batch_size=2, max_steps=1, grad_clip=0.0
    )
    assert train_here(config) == 0
    from model.gpt import GPT

    with restored():
        set_up(config.run)
        model = GPT(config.model, len(Dataset(data).tokenizer_spec["symbols"]))
        tokens, targets = training_batch(Dataset(data).tokens["train"], 16, 8, 1337, 0)
        cross_entropy(model(tokens), targets).backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    (record,) = (r for r in read_records(tmp_path / "r") if r["kind"] == "train")
    assert record["grad_norm"] == pytest.approx(norm, rel=50 * 2**-24)


# --- folders ---


def test_a_folder_is_never_overwritten_silently(tmp_path, data):
    config = make_config(data, tmp_path / "r", max_steps=2)
    assert train_here(config) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    with pytest.raises(UserError, match="holds a run"):
        train_here(config)
    assert {path.name: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before


def test_overwrite(tmp_path, data, one):
    assert train_here(make_config(data, tmp_path / "r", max_steps=12, d_model=32, seed=4)) == 0
    assert (
        train_here(make_config(data, tmp_path / "r", dropout=0.1, probe_tokens=8, overwrite=True))
        == 0
    )
    assert_same_run(tmp_path / "r", one)
    assert {p.name for p in (tmp_path / "r" / "attention").iterdir()} == {
        p.name for p in (one / "attention").iterdir()
    }


def test_resume_starts_where_there_is_nothing(tmp_path, data, one):
    assert train_here(make_config(data, tmp_path / "r", dropout=0.1, resume=True)) == 0
    assert_same_run(tmp_path / "r", one)


def test_resuming_a_finished_run_changes_nothing(tmp_path, data):
    config = make_config(data, tmp_path / "r", max_steps=3)
    assert train_here(config) == 0
    before = {
        name: (tmp_path / "r" / name).read_bytes()
        for name in ("checkpoint.pt", "best.pt", "log.jsonl", "samples.txt")
    }
    assert (
        train_here(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)))
        == 0
    )
    assert {name: (tmp_path / "r" / name).read_bytes() for name in before} == before


def test_a_corpus_shorter_than_the_context(tmp_path):
    data = write_corpus(tmp_path / "d", "short text " * 2, "and")
    _, error = command(
        "train.py",
        "nanogpt-cpu",
        "--data",
        data,
        "--out",
        tmp_path / "r",
        "--context-length",
        64,
        code=2,
    )
    assert error == (
        "error: the train split has 22 tokens, a window needs 65: "
        "use a longer text or a shorter --context-length\n"
    )
    assert not (tmp_path / "r").exists()


def test_a_corpus_of_one_window(tmp_path):
    data = write_corpus(tmp_path / "d", "abcdefghijklmnopq", "ab")
    assert train_here(make_config(data, tmp_path / "r", max_steps=2)) == 0


# --- ends ---


def test_stop_at(tmp_path, data, one, capsys):
    assert train_here(make_config(data, tmp_path / "r", dropout=0.1, stop_at=5)) == 0
    assert load(tmp_path / "r" / "checkpoint.pt").step == 5
    assert "stopped after step 5 of 8" in capsys.readouterr().out
    records = read_records(tmp_path / "r")
    regular = [record for record in records if "extra" not in record]
    assert regular == [r for r in read_records(one) if r["step"] <= 5]
    assert [(r["kind"], r["step"]) for r in records if "extra" in r] == [("eval", 5), ("sample", 5)]


def test_max_minutes(tmp_path, data, capsys):
    assert train_here(make_config(data, tmp_path / "r", max_minutes=1e-9)) == 0
    assert load(tmp_path / "r" / "checkpoint.pt").step == 1
    assert "time is up: stopped after step 1 of 8" in capsys.readouterr().out
    assert train_here(make_config(data, tmp_path / "r", max_minutes=60.0, resume=True)) == 0
    assert load(tmp_path / "r" / "checkpoint.pt").step == 8


def scripted(monkeypatch, values):
    """Let the evaluations find these validation losses, one after the other."""
    found = iter(values)

    def evaluate(*arguments):
        return {
            "train_loss": 1.0,
            "val_loss": next(found),
            "val_perplexity": 1.0,
            "val_bits_per_byte": 1.0,
        }

    monkeypatch.setattr("training.trainer.evaluate", evaluate)


def test_patience(tmp_path, data, monkeypatch, capsys):
    scripted(
        monkeypatch, [3.0, 2.0, 2.0, 1.9, 2.5, 1.9]
    )  # steps 0 to 5; 1.9 once more is no improvement
    assert train_here(make_config(data, tmp_path / "r", max_steps=9, eval_every=1, patience=2)) == 0
    state = load(tmp_path / "r" / "checkpoint.pt")
    assert (state.step, state.best_val_loss, state.counters["since_best"]) == (5, 1.9, 2)
    assert load(tmp_path / "r" / "best.pt").step == 3
    assert "no improvement: stopped after step 5 of 9" in capsys.readouterr().out


def test_patience_counts_on_where_a_run_goes_on(tmp_path, data, monkeypatch):
    scripted(monkeypatch, [3.0, 3.1, 3.2, 3.3])
    assert (
        train_here(
            make_config(data, tmp_path / "r", max_steps=9, eval_every=1, patience=3, stop_at=2)
        )
        == 0
    )
    assert (
        train_here(
            make_config(data, tmp_path / "r", max_steps=9, eval_every=1, patience=3, resume=True)
        )
        == 0
    )
    assert load(tmp_path / "r" / "checkpoint.pt").step == 3


def test_an_evaluation_that_is_no_number_is_never_the_best(tmp_path, data, monkeypatch):
    scripted(monkeypatch, [3.0, float("nan"), 2.0, float("nan")])
    assert train_here(make_config(data, tmp_path / "r", max_steps=3, eval_every=1)) == 0
    assert load(tmp_path / "r" / "best.pt").step == 2
    assert load(tmp_path / "r" / "checkpoint.pt").best_val_loss == 2.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_signal_ends_after_the_step_in_hand(
    tmp_path, data, one, monkeypatch, capsys, number, step
):
    config = make_config(data, tmp_path / "r", dropout=0.1)
    assert interrupted(config, step, number, monkeypatch) == 75
    assert load(tmp_path / "r" / "checkpoint.pt").step == step
    assert (
        f"{signal.Signals(number).name}: stopped after step {step} of 8" in capsys.readouterr().out
    )
    assert (
        train_here(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True)))
        == 0
    )
    assert_same_run(tmp_path / "r", one)


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ctrl_c_on_the_real_thing(tmp_path, data):
    config = make_config(
        data,
        tmp_path / "r",
        max_steps=10**6,
        save_every=0,
        eval_every=0,
        warmup_steps=0,
        schedule="constant",
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    process = start("train.py", tmp_path / "config.json")
    log = tmp_path / "r" / "log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("\n") > 5, process)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "Traceback" not in error
    assert "SIGINT: stopped after step" in out
    assert load(tmp_path / "r" / "checkpoint.pt").step == read_records(tmp_path / "r")[-1]["step"]


# --- other weights ---


def test_init_from(tmp_path, data, one):
    assert (
        train_here(make_config(data, tmp_path / "r", init_from=str(one), stop_at=1, warmup_steps=2))
        == 0
    )
    state = load(tmp_path / "r" / "checkpoint.pt")
    assert state.step == 1
    assert {int(values["step"]) for values in state.optimizer[0]["state"].values()} == {
        1
    }  # the optimiser is a fresh one
    first, before = (
        next(
            r["val_loss"] for r in read_records(folder) if r["kind"] == "eval" and r["step"] == step
        )
        for folder, step in ((tmp_path / "r", 0), (one, load(one / "best.pt").step))
    )
    assert first == before
    assert losses(tmp_path / "r").keys() == {1}


# --- what fails ---


@pytest.mark.parametrize(("precision", "lr"), [("float32", 1e12), ("bfloat16", 1e12)])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path, data, monkeypatch, precision, lr):
    folder = tmp_path / "r"
    steady = {"precision": precision, "max_steps": 40, "warmup_steps": 0, "schedule": "constant"}
    steady |= {"save_every": 1, "eval_every": 2}
    assert train_here(make_config(data, folder, stop_at=4, **steady)) == 0
    before = (folder / "best.pt").read_bytes()
    monkeypatch.setattr("training.trainer.learning_rate", lambda step, optim: lr)
    with pytest.raises(MachineError, match=r"not finite at step .*best\.pt is as it was") as caught:
        train_here(make_config(data, folder, resume=True, **steady))
    assert "--lr" in str(caught.value)
    assert (folder / "best.pt").read_bytes() == before
    assert load(folder / "checkpoint.pt").step >= 4
    assert [r["step"] for r in read_records(folder) if r["kind"] == "eval"][:3] == [0, 2, 4]


def poisoned(monkeypatch, steps, loss_only=False):
    """Let the loss be no number in these steps: with its gradient, or alone."""
    from training.loss import cross_entropy as plain

    count = iter(range(1000))

    def wrong(logits, targets, reduction="mean"):
        if reduction == "sum":
            return plain(logits, targets, reduction)
        loss = plain(logits, targets)
        if next(count) not in steps:
            return loss
        return loss + (torch.tensor(float("inf")) if loss_only else loss * float("nan"))

    monkeypatch.setattr("training.trainer.cross_entropy", wrong)


@pytest.mark.parametrize("loss_only", [False, True])
def test_an_update_that_is_not_finite_is_not_applied(
    tmp_path, data, monkeypatch, capsys, loss_only
):
    folder = tmp_path / "r"
    poisoned(monkeypatch, {1}, loss_only)
    common = {"max_steps": 3, "warmup_steps": 0, "save_every": 1}
    assert train_here(make_config(data, folder, stop_at=1, **common)) == 0
    before = load(folder / "checkpoint.pt")
    weights = {name: value.clone() for name, value in before.model.items()}
    assert train_here(make_config(data, folder, stop_at=2, resume=True, **common)) == 0
    assert "step 2: loss" in capsys.readouterr().out
    after = load(folder / "checkpoint.pt")
    assert after.step == 2
    assert all(torch.equal(after.model[name], value) for name, value in weights.items())


def test_the_first_update_is_not_finite(tmp_path, data, monkeypatch):
    """As it is with float16 while the scaler looks for its scale."""
    poisoned(monkeypatch, {0})
    assert train_here(make_config(data, tmp_path / "r", max_steps=3, log_every=1)) == 0
    assert [r["step"] for r in read_records(tmp_path / "r") if r["kind"] == "train"] == [1, 2, 3]
    assert losses(tmp_path / "r")[1] is None
    assert math.isfinite(losses(tmp_path / "r")[3])


@pytest.mark.parametrize(
    ("wrong", "ends"),
    [({1, 2, 3, 4}, False), ({1, 2, 3, 4, 5}, True), ({0, 1, 2, 3, 5, 6, 7, 8}, False)],
)
def test_five_in_a_row_are_too_many(tmp_path, data, monkeypatch, wrong, ends):
    poisoned(monkeypatch, wrong)
    config = make_config(data, tmp_path / "r", max_steps=12, eval_every=0)
    if ends:
        with pytest.raises(MachineError, match="at step 6 and"):
            train_here(config)
    else:
        assert train_here(config) == 0


def test_exit_code_of_a_lost_run(tmp_path, data):
    config = make_config(
        data,
        tmp_path / "r",
        lr=1e30,
        warmup_steps=0,
        schedule="constant",
        max_steps=100,
        eval_every=0,
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    _, error = command("train.py", tmp_path / "config.json", code=1)
    message = error[error.index("error: ") :].strip()
    assert "--lr (now 1e+30)" in message
    assert len(message.split("\n")) == 2  # and no progress line behind it


def test_a_full_disk(tmp_path, data):
    """Step 0, without moments, fits under the largest size a file may have; step 4 does not. (A
    quota's way of being full.)
    """
    config = make_config(data, tmp_path / "r", d_model=64, probe_tokens=0)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    weights = 4 * (12 * 64**2 + 16 * 64 + 20 * 64 + 13 * 64)
    _, error = command("train.py", tmp_path / "config.json", code=1, limit=2 * weights)
    assert "error: a checkpoint could not be saved" in error
    assert load(tmp_path / "r" / "checkpoint.pt").step == 0
    assert not list((tmp_path / "r").glob("*.tmp"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert train_here(make_config(data, tmp_path / "r", d_model=64, resume=True)) == 0
    assert train_here(make_config(data, tmp_path / "s", d_model=64)) == 0
    assert_same_run(tmp_path / "r", tmp_path / "s")


def test_a_save_that_fails_ends_the_run_at_once(tmp_path, data, monkeypatch):
    """Not only where the next save is due, hours later it may be."""
    save = importlib.import_module("ops.checkpoint").save

    def fail(checkpoint, path):
        if checkpoint.step:
            raise OSError("No space left on device")
        save(checkpoint, path)

    monkeypatch.setattr("ops.checkpoint.save", fail)
    with pytest.raises(MachineError, match="could not be saved"):
        train_here(make_config(data, tmp_path / "r", max_steps=200, save_every=100, eval_every=0))
    assert 100 <= max(losses(tmp_path / "r")) < 150
    assert load(tmp_path / "r" / "checkpoint.pt").step == 0


def test_a_truncated_checkpoint_is_refused(tmp_path, data):
    assert train_here(make_config(data, tmp_path / "r", max_steps=1)) == 0
    path = tmp_path / "r" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    log = (tmp_path / "r" / "log.jsonl").read_bytes()
    with pytest.raises(UserError, match="truncated"):
        train_here(make_config(data, tmp_path / "r", max_steps=1, resume=True))
    assert (tmp_path / "r" / "log.jsonl").read_bytes() == log


def test_a_tracker_that_fails_does_not_end_a_run(tmp_path, data, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train_here(make_config(data, tmp_path / "r", max_steps=2, wandb=True)) == 0
    assert "wandb is off, the local log goes on" in capsys.readouterr().out
    assert losses(tmp_path / "r").keys() == {1, 2}


def test_samples_of_any_characters(tmp_path):
    """A byte model draws line separators sooner or later: here it knows no other character."""
    data = write_byte_corpus(tmp_path / "d", "\u2028\x85" * 300)
    common = {"max_steps": 30, "lr": 1e-2, "eval_every": 10, "sample_tokens": 20}
    assert train_here(make_config(data, tmp_path / "a", **common)) == 0
    assert train_here(make_config(data, tmp_path / "b", stop_at=20, **common)) == 0
    assert train_here(make_config(data, tmp_path / "b", resume=True, **common)) == 0
    assert any("\u2028" in r["text"] for r in read_records(tmp_path / "a") if r["kind"] == "sample")
    assert_same_run(tmp_path / "a", tmp_path / "b")


# --- one loop for one process or many ---


def test_dropout_belongs_to_the_micro_batch(tmp_path, data, monkeypatch):
    """Seeds are drawn for (seed, step, index in the global batch), whatever number of processes
    shares it.
    """
    seen = []
    monkeypatch.setattr("training.trainer.dropout_seed", lambda *key: seen.append(key) or 0)
    config = make_config(
        data, tmp_path / "r", dropout=0.1, batch_size=8, micro_batch_size=2, max_steps=2, seed=9
    )
    assert train_here(config) == 0
    assert seen == [(9, step, index) for step in range(2) for index in range(4)]


def test_one_process_needs_no_group(tmp_path, data, monkeypatch):
    monkeypatch.setattr(
        distributed.dist, "init_process_group", lambda *_: pytest.fail("a group was made")
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train_here(make_config(data, tmp_path / "r", max_steps=1)) == 0


def test_the_log_is_closed(tmp_path, data, monkeypatch):
    closed, close = [], RunLog.close
    monkeypatch.setattr(RunLog, "close", lambda self: closed.append(1) or close(self))
    assert train_here(make_config(data, tmp_path / "r", max_steps=1)) == 0
    assert closed == [1]


def test_same_state_twice(one):
    """The comparison itself sees a difference of one bit."""
    state = assert_same_state(one, one)
    other = load(one / "checkpoint.pt")
    other.model["norm.weight"].view(torch.int32)[3] ^= 1
    from helpers import same_value

    assert not same_value(state.model, other.model)


def test_resume_goes_on_from_best_where_it_is_all_there_is(tmp_path, capsys):
    data = write_corpus(tmp_path / "d", nonsense())
    fields = {"max_steps": 6, "eval_every": 2, "save_every": 2, "log_every": 1}
    assert train_here(make_config(data, tmp_path / "whole", **fields)) == 0
    assert train_here(make_config(data, tmp_path / "r", **fields, stop_at=4)) == 0
    (tmp_path / "r" / "checkpoint.pt").unlink()
    assert train_here(make_config(data, tmp_path / "r", **fields, resume=True)) == 0
    assert (
        "going on from step 4" in capsys.readouterr().out
    )  # not from the start, over what was there
    assert_same_run(tmp_path / "whole", tmp_path / "r")


def test_config_json_forgets_where_this_start_was_to_end(tmp_path):
    data = write_corpus(tmp_path / "d", nonsense())
    assert (
        train_here(make_config(data, tmp_path / "r", max_steps=4, stop_at=2, max_minutes=9.0)) == 0
    )
    again = read_config(tmp_path / "r" / "config.json").run
    assert (again.stop_at, again.max_minutes) == (0, 0)


def test_a_run_is_watched_early_and_no_other_for_it(tmp_path, data):
    fields = {"max_steps": 20, "eval_every": 15, "dropout": 0.1}
    assert train_here(make_config(data, tmp_path / "watched", probe_tokens=256, **fields)) == 0
    assert train_here(make_config(data, tmp_path / "r", **fields)) == 0
    assert_same_run(tmp_path / "watched", tmp_path / "r")
    names = sorted(path.name for path in (tmp_path / "watched" / "attention").iterdir())
    assert names == [f"step-{step:09}.npz" for step in (0, 10, 15, 20)]
    assert not (tmp_path / "r" / "attention").exists()


def test_pictures_and_snapshots_end_no_run(tmp_path, data, monkeypatch, capsys):
    def fail(*_):
        raise OSError("no such font")

    monkeypatch.setattr("ops.session.plot_losses", fail)
    monkeypatch.setattr("viz.probe.save_probe", fail)
    config = make_config(data, tmp_path / "r", max_steps=2, eval_every=0, probe_tokens=4)
    assert train_here(config) == 0
    out = capsys.readouterr().out
    assert out.count("is left out (OSError: no such font)") == 3  # at steps 0 and 2; loss.png
    assert "saved in" in out
    assert "loss.png, " not in out


def test_where_compiling_fails_in_another_process_none_compiles(tmp_path, data, monkeypatch):
    class Compiled(torch.nn.Module):
        def forward(self, *_):
            raise AssertionError("the others go on without it")

    monkeypatch.setattr("ops.session.compile_or_not", lambda *_: Compiled())
    own = distributed.Processes.sum

    def with_another(self, *numbers, device="cpu"):
        return [1.0] if numbers == (False,) else own(self, *numbers, device=device)

    monkeypatch.setattr(distributed.Processes, "sum", with_another)
    assert train_here(make_config(data, tmp_path / "r", max_steps=1)) == 0


def test_a_run_that_had_no_scaler_begins_with_a_fresh_one(tmp_path):
    """As when a bfloat16 run goes on in float16 on another GPU."""
    checkpoint = Checkpoint(3, {}, {}, {}, "f", best_val_loss=2.0)
    scaler = torch.amp.GradScaler("cpu")
    session = SimpleNamespace(
        checkpoint=checkpoint, folder=tmp_path, device="cpu", processes=distributed.Processes()
    )
    state = Session.restore(session, [], scaler)
    assert (state.step, state.best_val_loss) == (3, 2.0)
    assert scaler.get_scale() == torch.amp.GradScaler("cpu").get_scale()
