"""`benchmarks.gpu`: the whole command on a CPU, what it does where a piece is missing, and its
arithmetic.
"""

import dataclasses
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, environment, nonsense, write_corpus

from benchmarks.gpu import checks, facts, lengths, runs, sampling, training
from benchmarks.gpu.__main__ import SHARES, deadlines_share
from benchmarks.gpu.process import outcome, run_apart
from benchmarks.gpu.report import Report
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.task import REHEARSAL, Missing, Scale, Task
from benchmarks.steps import PlainGPT, make_step
from benchmarks.train import best_so_far
from configs import OptimConfig
from model.config import ModelConfig
from model.gpt import GPT
from ops.command_line import parse


@pytest.fixture
def heard():
    return []


@pytest.fixture
def task(tmp_path, heard):
    """Of a rehearsal on the CPU, with a minute's time."""
    return Task("cpu", REHEARSAL, time.monotonic() + 60, tmp_path, tmp_path / "d", heard.append)


def notes(heard):
    return "\n".join(message.get("note", "") for message in heard)


def rows(heard):
    return [message["row"] for message in heard if "row" in message]


@pytest.mark.slow
def test_the_whole_command(tmp_path):
    """Every section has a figure to tell, with no card, no network and a corpus of nonsense."""
    data = write_corpus(tmp_path / "d", nonsense())
    words = ["--device", "cpu", "--minutes", "3", "--data", data, "--out", tmp_path / "gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *map(str, words)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    log = (tmp_path / "gpu.log").read_text()
    assert done.returncode == 0, f"{done.stderr}\n{log[-3000:]}"
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert list(record) == list(SECTIONS)
    assert {section["ended"] for section in record.values()} == {"done"}
    for name, section in record.items():
        assert any(section["tables"].values()) or name == "tests"
    assert (tmp_path / "gpu.md").read_text() == done.stdout.removesuffix("\n")


def test_no_such_device(task, monkeypatch):
    monkeypatch.setattr(facts, "has_device", lambda device: False)
    with pytest.raises(Missing, match="finds 0 CUDA devices; --device cpu"):
        facts.facts(dataclasses.replace(task, device="cuda"))


def test_shares_are_of_what_is_left():
    assert list(SHARES) == list(SECTIONS)
    assert deadlines_share("facts", [], 30) == 30
    late = ["batches", "speedruns"]
    assert deadlines_share("batches", late[1:], 150) == pytest.approx(150 * 10 / 75)


# --- what is missing ---


def test_without_a_corpus(task):
    assert outcome(runs.resume, task).startswith("left out: ")
    assert "python -m data.prepare tinyshakespeare" in outcome(runs.speedruns, task)


def test_without_pytest_transformers_and_nvidia_smi(task, heard, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert outcome(checks.tests, task).startswith("left out: pytest isn't installed")
    monkeypatch.setattr(sampling, "read_rate", lambda size, device: 1e9)
    monkeypatch.setattr(sampling, "ours", lambda *_: lambda: None)
    sampling.sampling(task)
    assert "transformers isn't installed" in notes(heard)
    assert len(rows(heard)) == 1
    assert "ratio" not in rows(heard)[0]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.driver_lines() == ["nvidia-smi: none (FileNotFoundError)"]
    assert facts.c_compiler() == "none"


def test_a_compiler_that_fails_costs_its_rows_alone(task, heard, monkeypatch):
    def broken(module, backend):
        raise RuntimeError("no Triton\nat all")

    monkeypatch.setattr(torch, "compile", broken)
    training.training(task)
    assert "plain loop, compiled: failed (RuntimeError: no Triton)" in notes(heard)
    assert {row["program"] for row in rows(heard)} == {
        "plain loop, eager",
        "train.py's update, eager",
    }


def test_out_of_memory_halves_the_micro_batch(task, heard, monkeypatch):
    def make(shape, optim, *_, **__):
        def step():
            if optim.batch_size > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return step

    monkeypatch.setattr(training, "make_step", make)
    large = dataclasses.replace(task, scale=dataclasses.replace(REHEARSAL, rows=16))
    assert training.fitting_rows(large) == 4
    assert "16 sequences at once don't fit in memory: 8 are tried" in notes(heard)
    large = dataclasses.replace(task, scale=dataclasses.replace(REHEARSAL, most_rows=64))
    training.batches(large)
    assert [row["GiB"] for row in rows(heard)] == ["", "", "", "out of memory"]


def test_out_of_memory_ends_a_kind_of_attention(task, heard, monkeypatch):
    def once(attend, mask, n_token, *_):
        if attend is lengths.KINDS["explicit"][0]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lengths, "once", once)
    lengths.attention(task)
    assert [row["ms"] == "out of memory" for row in rows(heard)] == [True, *[False] * 4]


def test_pytests_failures_are_told(task, heard, monkeypatch):
    done = SimpleNamespace(returncode=1, stdout="FAILED tests/a.py::b - no\n1 failed", stderr="")
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: done)
    assert outcome(checks.tests, task).startswith("failed: RuntimeError")
    assert notes(heard) == "FAILED tests/a.py::b - no\npytest -m gpu: 1 failed"


# --- a card that is pretended ---


def test_facts_of_a_card(task, heard, monkeypatch):
    card = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30, multi_processor_count=132
    )
    monkeypatch.setattr(facts, "has_device", lambda device: True)
    monkeypatch.setattr(facts, "describe_machine", lambda: "a machine")
    monkeypatch.setattr(facts, "best_precision", lambda device: "bfloat16")
    monkeypatch.setattr(facts, "device_name", lambda device: card.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(facts, "matrix_rate", lambda device, precision: 7e14)
    monkeypatch.setattr(facts, "read_rate", lambda size, device: 4.2e12)
    facts.facts(dataclasses.replace(task, device="cuda"))
    assert "card: NVIDIA H200, capability 9.0, 141.0 GiB, 132 multiprocessors" in notes(heard)
    assert [row["rate"] for row in rows(heard)] == [
        "700.00 TFLOP/s",
        "700.00 TFLOP/s",
        "989 TFLOP/s",
        "4,200 GB/s",
    ]


def test_memory_of_a_card(monkeypatch):
    """A program's own peak is what came on top of the tensors that were there."""
    held = iter([1 << 30, 4 << 30])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(held))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(held))
    task = Task("cuda", REHEARSAL, 0.0, None)
    program = training.build(task, "one", lambda: lambda: None, 1.0)
    assert program.gibibytes == 3.0


# --- arithmetic ---


def test_the_plain_loop_is_gpt2():
    """The same weights give the same loss as ours, in float64."""
    config = ModelConfig(n_layer=2, n_head=2, d_model=8, context_length=6)
    ours, plain = GPT(config, 11).double().eval(), PlainGPT(config, 11, padding=1).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    theirs = {"tokens.weight": ours.embed.weight, "norm.weight": ours.norm.weight}
    theirs |= {"norm.bias": ours.norm.bias, "positions.weight": ours.positions.table.weight}
    for index, block in enumerate(ours.blocks):
        parts = [block.attention.query, block.attention.key, block.attention.value]
        up, down = (layer for layer in block.mlp.modules() if isinstance(layer, torch.nn.Linear))
        for kind in ("weight", "bias"):
            own = {
                "attention_norm": getattr(block.attention_norm, kind),
                "queries_keys_values": torch.cat([getattr(part, kind) for part in parts]),
                "project": getattr(block.attention.project, kind),
                "mlp_norm": getattr(block.mlp_norm, kind),
                "up": getattr(up, kind),
                "down": getattr(down, kind),
            }
            theirs |= {f"blocks.{index}.{name}.{kind}": value for name, value in own.items()}
    plain.load_state_dict(theirs)
    tokens = torch.randint(11, (2, 7))
    logits = ours(tokens[:, :-1]).flatten(0, 1)
    right = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    torch.testing.assert_close(plain(tokens[:, :-1], tokens[:, 1:]), right)
    assert PlainGPT(config, 11).tokens.weight.shape == (64, 8)


def test_both_updates_learn():
    """Each of the two makes whole updates: the parameters move, and gradients don't pile up."""
    optim = OptimConfig(batch_size=4, micro_batch_size=2, lr=1e-2)
    for plain in (False, True):
        step = make_step(REHEARSAL.model, optim, 11, "float32", False, plain=plain)
        losses = []
        for _ in range(5):
            losses.append(step.loss_of(step.tokens, step.tokens).item())
            step()
        assert losses[-1] < losses[0] - 0.1


def test_weights_read_for_a_token():
    """GPT-2 124M: 12 blocks of 12 d^2 + 13 d, the last norm, the tied table; not the positions."""
    n_weight = 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50_257 * 768
    assert sampling.read_weights(ModelConfig(), 50_257) == n_weight


def test_when_the_target_was_reached(task):
    """Evaluations count with the training record behind them; the best so far is what counts."""
    log = [
        {"kind": "eval", "step": 0, "val_loss": 9.0},
        {"kind": "train", "step": 1, "seconds": {"forward": 2.0}, "tokens_per_second": 5.0},
        {"kind": "eval", "step": 1, "val_loss": 4.0},
        {"kind": "train", "step": 2, "seconds": {"forward": 3.0}, "tokens_per_second": 6.0},
        {"kind": "eval", "step": 2, "val_loss": 4.4},
    ]
    assert [p["best_loss"] for p in best_so_far(log)] == [9.0, 4.0]
    cells = runs.found(task, log)
    assert (cells["seconds to 4.5"], cells["at step"], cells["steps"]) == ("2.0", "1", "2")
    assert runs.found(task, log[:1])["seconds to 4.5"] == "not reached in this time"


@pytest.mark.parametrize("scale", [Scale(), REHEARSAL])
def test_runs_can_be_parsed(scale):
    for arguments in (*scale.runs, scale.resumed):
        parse([*arguments, "--data", "d"])


# --- the report ---


def test_a_report_is_whole_at_any_time(tmp_path, capsys):
    report = Report(tmp_path / "new" / "x", "a title")
    report.open("one")
    report.add("one", {"table": "T", "row": {"what": "a", "rate": "1"}})
    report.add("one", {"table": "T", "row": {"what": "a", "rate": "2", "more": "3"}})
    report.add("one", {"table": "T", "row": {"what": "b"}})
    report.add("one", {"note": "a note"})
    record = json.loads((tmp_path / "new" / "x.json").read_text())["one"]
    assert record["ended"] == "cut short"
    assert record["tables"] == {"T": [{"what": "a", "rate": "2", "more": "3"}, {"what": "b"}]}
    report.close("one", "failed: no", 2.0)
    assert report.failed()
    assert (tmp_path / "new" / "x.md").read_text() == (
        "# a title\n\n## one: failed: no, 2 s\n\nT\n\n| what | rate | more |\n"
        "| --- | --- | --- |\n| a | 2 | 3 |\n| b |  |  |\n\na note\n"
    )


@pytest.mark.slow
def test_a_section_that_hangs_or_dies(tmp_path, task):
    """The time is up for the one; the other's end is told. `attention` stands for any section."""
    heard = []
    task = dataclasses.replace(task, send=print)
    limit = time.monotonic() - 1
    assert run_apart("attention", task, limit, heard.append, tmp_path / "log") == "time is up"
    bad = dataclasses.replace(task, device="nonsense")
    limit = time.monotonic() + 60
    ended = run_apart("attention", bad, limit, heard.append, tmp_path / "log")
    assert ended.startswith("failed: RuntimeError")
    assert "Traceback" in (tmp_path / "log").read_text()
