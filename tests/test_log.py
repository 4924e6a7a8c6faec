"""The log: one JSON object a line whatever the numbers, cut back where a run goes on, and none the
worse for a tracker.
"""

import json
import os
import random
import subprocess
import sys
import types

import pytest
from helpers import environment, make_config

from ops import log as logs
from ops.log import PHASES, RunLog, cut_log, plot_losses, read_log

LOSSES = {"train_loss": 1.5, "val_loss": 2.5, "val_perplexity": 12.18, "val_bits_per_byte": 3.6}


def lines(folder):
    """Each line by itself: JSON Lines know no other end of a line than \\n."""
    text = (folder / "log.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text[:-1].split("\n")]


def open_log(folder, start=0, is_main=True, makers=0.0, **fields):
    config = make_config("d", folder, **fields)
    return RunLog(folder, config, start, 100.0, 1e5, is_main, makers_flops=makers)


def write_run(folder, steps, samples=True):
    """A record of training each step, an evaluation with a sample every other one."""
    log = open_log(folder)
    for step in steps:
        log.train(step, 4.0 - step, 0.1, 1.0)
        if step % 2 == 0:
            log.evaluation(
                step, LOSSES, f"sample of {step}\n\u00e9\u4e2d" if samples else "", False
            )
    log.close()


# --- records ---


def test_records(tmp_path, capsys):
    log = open_log(tmp_path)
    with log.phase("data"):
        pass
    log.train(3, 2.25, 1e-3, 0.5)
    log.evaluation(3, LOSSES, "To be", True)
    log.close()
    train, evaluation, sample = lines(tmp_path)
    assert list(train)[:2] == ["kind", "step"]
    assert {k: train[k] for k in ("kind", "step", "loss", "lr", "grad_norm")} == {
        **{"kind": "train", "step": 3, "loss": 2.25, "lr": 1e-3, "grad_norm": 0.5}
    }
    assert set(train) == {
        "kind",
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "mfu",
        "memory",
        "seconds",
    }
    assert tuple(train["seconds"]) == PHASES
    assert evaluation == {"kind": "eval", "step": 3, **LOSSES}
    assert sample == {"kind": "sample", "step": 3, "text": "To be"}
    assert (tmp_path / "samples.txt").read_text() == "--- step 3 ---\nTo be\n\n"
    assert "2.5000 on validation" in capsys.readouterr().out


def test_speed_by_hand(tmp_path, monkeypatch):
    """64 tokens a step: from step 10 to 20 in 8 s, of which 2 + 1 s went to evaluating and saving,
    640 / 5 = 128 a second.
    """
    now = [100.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    log = open_log(tmp_path, start=10, makers=4e5, batch_size=4, context_length=16)
    spent = {
        "data": 0.5,
        "forward": 1.5,
        "backward": 2.5,
        "optimizer": 0.5,
        "evaluate": 2.0,
        "save": 1.0,
    }
    for name, seconds in spent.items():
        with log.phase(name):
            now[0] += seconds
    log.train(20, 1.0, 0.1, 1.0)
    now[0] += 4.0
    log.train(30, 1.0, 0.1, 1.0)
    log.close()
    first, second = lines(tmp_path)
    assert first["tokens_per_second"] == 128
    assert first["mfu"] == 0.128  # of 1e5 FLOP/s
    assert first["mfu_maker"] == 0.032
    assert first["seconds"] == spent
    assert second["tokens_per_second"] == 160
    assert set(second["seconds"].values()) == {0.0}
    assert 50 < first["memory"] < 1 << 20  # MiB


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_becomes_null(tmp_path, value):
    log = open_log(tmp_path)
    log.train(1, value, 0.1, value)
    log.evaluation(1, LOSSES | {"val_loss": value}, "", False)
    log.close()
    train, evaluation = lines(tmp_path)
    assert train["loss"] is train["grad_norm"] is evaluation["val_loss"] is None
    assert train["lr"] == 0.1
    plot_losses(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_is_there_at_once(tmp_path):
    log = open_log(tmp_path)
    log.train(1, 1.0, 0.1, 1.0)
    assert [r["step"] for r in lines(tmp_path)] == [1]
    log.close()


def test_a_process_that_is_not_the_main_one_writes_nothing(tmp_path, capsys):
    log = open_log(tmp_path, is_main=False, wandb=True)
    log.train(1, 1.0, 0.1, 1.0)
    log.evaluation(1, LOSSES, "text", True)
    log.say("hello")
    log.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


# --- going on ---


def test_cut_back(tmp_path):
    write_run(tmp_path, range(1, 9))
    whole = lines(tmp_path)
    before = (tmp_path / "log.jsonl").read_bytes()
    cut_log(tmp_path / "log.jsonl", 8)
    assert (tmp_path / "log.jsonl").read_bytes() == before
    cut_log(tmp_path / "log.jsonl", 5)
    assert lines(tmp_path) == [r for r in whole if r["step"] <= 5]
    assert (tmp_path / "samples.txt").read_text(encoding="utf-8") == "".join(
        f"--- step {step} ---\nsample of {step}\n\u00e9\u4e2d\n\n" for step in (2, 4)
    )
    cut_log(tmp_path / "log.jsonl", -1)
    assert (tmp_path / "log.jsonl").read_bytes() == (tmp_path / "samples.txt").read_bytes() == b""
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "samples.txt"}


def test_cut_back_where_there_is_no_log(tmp_path):
    cut_log(tmp_path / "log.jsonl", 5)
    assert read_log(tmp_path / "log.jsonl") == []


@pytest.mark.parametrize(
    "text",
    ["\u2028", "\x85", "\u2029 a\x0b\x0c\x1c\x1d\x1e\r\n", '"\\', "\ud7ff\U0001f600", "\ufffd"],
)
def test_a_sample_of_any_characters_stays_one_record(tmp_path, text):
    """Python's splitlines knows ten ends of a line, JSON Lines one."""
    log = open_log(tmp_path)
    log.evaluation(1, LOSSES, text, False)
    log.train(2, 1.0, 0.1, 1.0)
    log.close()
    assert [r["kind"] for r in read_log(tmp_path / "log.jsonl")] == ["eval", "sample", "train"]
    cut_log(tmp_path / "log.jsonl", 2)
    assert [r["kind"] for r in lines(tmp_path)] == ["eval", "sample", "train"]
    assert lines(tmp_path)[1]["text"] == text


def test_a_half_written_last_line(tmp_path):
    """Wherever a kill or a full disk cut the file, inside a character too, what was whole before
    stays.
    """
    log = open_log(tmp_path)
    log.train(1, 1.0, 0.1, 1.0)
    log.evaluation(1, LOSSES, "\u00e9\u4e2d\U0001f600", False)
    log.close()
    path = tmp_path / "log.jsonl"
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == 10]
    assert len(ends) == 3
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        cut_log(path, 1)
        kept = path.read_bytes()
        complete = sum(end <= size for end in ends) + (
            size + 1 in ends
        )  # a record that lacks its \n alone may stay
        assert kept == b"" or kept.endswith(b"\n")
        assert [r["kind"] for r in read_log(path)] == ["train", "eval", "sample"][:complete]


def test_samples_are_those_of_the_log(tmp_path):
    write_run(tmp_path, range(1, 5))
    (tmp_path / "samples.txt").write_text("half a sam")
    cut_log(tmp_path / "log.jsonl", 2)
    assert (tmp_path / "samples.txt").read_text(
        encoding="utf-8"
    ) == "--- step 2 ---\nsample of 2\n\u00e9\u4e2d\n\n"


def test_the_progress_goes_on_where_it_stood(tmp_path):
    log = open_log(tmp_path, start=6, max_steps=8)
    assert (log.bar.n, log.bar.total) == (6, 8)
    log.train(7, 1.0, 0.1, 1.0)
    assert log.bar.n == 7
    log.close()


# --- the tracker ---


class FakeRun:
    def __init__(self, fail_at=None):
        self.logged, self.finished, self.fail_at = [], False, fail_at

    def log(self, values, step):
        if step == self.fail_at:
            raise ConnectionError("gone")
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def fake_wandb(monkeypatch, run=None, error=None, key=None):
    """A module in wandb's place; `init` remembers its arguments in `.given`."""
    module = types.ModuleType("wandb")

    def init(**given):
        module.given = given
        if error:
            raise error
        return run

    module.init, module.Settings = init, lambda **settings: settings
    module.api = types.SimpleNamespace(api_key=key)
    module.util = types.SimpleNamespace(generate_id=lambda: f"{random.randrange(1 << 32):08x}")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


def test_tracker_gets_the_numbers(tmp_path, monkeypatch):
    run = FakeRun()
    module = fake_wandb(monkeypatch, run)
    log = open_log(tmp_path, wandb=True)
    log.train(1, 2.5, 0.1, 1.0)
    log.evaluation(1, LOSSES, "text", True)
    log.close()
    assert [step for step, _ in run.logged] == [1, 1]
    assert run.logged[0][1]["train/loss"] == 2.5
    assert run.logged[1][1] == {f"eval/{name}": value for name, value in LOSSES.items()}
    assert run.finished
    assert module.given["mode"] == "offline"
    assert module.given["config"]["optim"]["max_steps"] == 8


def test_tracker_is_off_unless_asked(tmp_path, monkeypatch):
    module = fake_wandb(monkeypatch, error=RuntimeError("called"))
    open_log(tmp_path).close()
    assert not hasattr(module, "given")


@pytest.mark.parametrize(
    ("key", "variable", "mode"),
    [(None, None, "offline"), ("k", None, "online"), ("k", "disabled", "disabled")],
)
def test_tracker_mode(tmp_path, monkeypatch, key, variable, mode):
    module = fake_wandb(monkeypatch, FakeRun(), key=key)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    open_log(tmp_path, wandb=True).close()
    assert module.given["mode"] == mode


def test_how_an_offline_run_is_sent(tmp_path, monkeypatch, capsys):
    """Said at the start, in case there is no end, and at the end: all parts of the run."""
    run = FakeRun()
    run.offline = True
    fake_wandb(monkeypatch, run)
    (tmp_path / "a run").mkdir()
    log = open_log(tmp_path / "a run", wandb=True)
    said = capsys.readouterr().out
    assert f"its files lie in {tmp_path / 'a run' / 'wandb'}, and are sent with wandb sync" in said
    for part in ("offline-run-2-x", "offline-run-1-x"):
        (tmp_path / "a run" / "wandb" / part).mkdir(parents=True)
    log.close()
    parts = [f"'{tmp_path}/a run/wandb/offline-run-{n}-x'" for n in (1, 2)]
    assert f"to send the run: wandb sync {' '.join(parts)}\n" in capsys.readouterr().out


def test_an_online_run_is_sent_already(tmp_path, monkeypatch, capsys):
    run = FakeRun()
    run.offline = False
    fake_wandb(monkeypatch, run, key="k")
    open_log(tmp_path, wandb=True).close()
    assert "sync" not in capsys.readouterr().out


def test_tracker_goes_on_with_its_run(tmp_path, monkeypatch):
    given = []
    for folder in ("one", "one", "two"):
        (tmp_path / folder).mkdir(exist_ok=True)
        module = fake_wandb(monkeypatch, FakeRun())
        open_log(tmp_path / folder, wandb=True).close()
        given.append(module.given["id"])
        assert module.given["resume"] == "allow"
    assert given[0] == given[1] != given[2]
    assert given[0]


@pytest.mark.parametrize(
    "error", [RuntimeError("no network\nat all"), ImportError(), ValueError("")]
)
def test_a_tracker_that_does_not_start_is_a_warning(tmp_path, monkeypatch, capsys, error):
    fake_wandb(monkeypatch, error=error)
    log = open_log(tmp_path, wandb=True)
    log.train(1, 2.5, 0.1, 1.0)
    log.close()
    said = capsys.readouterr().out.strip().split("\n")
    assert len(said) == 1
    assert "wandb is off, the local log goes on" in said[0]
    assert len(lines(tmp_path)) == 1


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    open_log(tmp_path, wandb=True).close()
    assert "wandb is off" in capsys.readouterr().out


def test_a_tracker_that_fails_later_is_a_warning(tmp_path, monkeypatch, capsys):
    run = FakeRun(fail_at=2)
    fake_wandb(monkeypatch, run)
    log = open_log(tmp_path, wandb=True)
    for step in (1, 2, 3):
        log.train(step, 2.5, 0.1, 1.0)
    log.close()
    assert [step for step, _ in run.logged] == [1]
    assert capsys.readouterr().out.count("wandb is off from step 2") == 1
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3]


def test_a_tracker_that_fails_at_the_end_is_no_failure(tmp_path, monkeypatch):
    run = FakeRun()
    fake_wandb(monkeypatch, run)
    log = open_log(tmp_path, wandb=True)

    def fail():
        raise ConnectionError("gone")

    run.finish = fail
    log.close()


WITHOUT_ACCOUNT = """
import sys
from pathlib import Path
from helpers import make_config
from ops.log import RunLog
folder = Path(sys.argv[1])
log = RunLog(folder, make_config("d", folder, wandb=True), 0, 1.0, 1.0)
assert log.wandb is not None, "not even offline"
log.train(1, 2.5, 0.1, 1.0)
log.close()
"""


@pytest.mark.slow
def test_the_real_tracker_without_an_account(tmp_path):
    """No account, no terminal: offline, and no question asked. A proxy that isn't there stands for
    no network.
    """
    pytest.importorskip("wandb")
    none = {name: None for name in os.environ if name.startswith("WANDB_")}
    nowhere = {
        "HOME": str(tmp_path / "home"),
        "NETRC": str(tmp_path / "netrc"),
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    variables = environment(**none, **nowhere)
    variables["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
    (tmp_path / "home").mkdir()
    (tmp_path / "run").mkdir()
    line = [sys.executable, "-c", WITHOUT_ACCOUNT, str(tmp_path / "run")]
    done = subprocess.run(
        line, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"wandb is off" not in done.stdout
    (part,) = (tmp_path / "run").glob("wandb/offline-run-*-*")
    assert f"wandb sync {part}".encode() in done.stdout
    assert [r["step"] for r in lines(tmp_path / "run")] == [1]
    assert list((tmp_path / "run").glob("wandb/offline-run-*-*/*.wandb"))


@pytest.mark.parametrize("name", ["a$b", "x$\\frac$", "\u4e2d\u6587"])
def test_the_curve_of_a_folder_of_any_name(tmp_path, recwarn, name):
    (tmp_path / name).mkdir()
    write_run(tmp_path / name, [1, 2])
    plot_losses(tmp_path / name)
    assert (tmp_path / name / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [str(each.message) for each in recwarn if "Glyph" in str(each.message)] == []


def test_what_can_be_dispensed_with(tmp_path, capsys):
    log = open_log(tmp_path)
    with log.dispensable("a picture"):
        raise ValueError("no font\nsecond line")
    log.close()
    assert "warning: a picture is left out (ValueError: no font)\n" in capsys.readouterr().out
