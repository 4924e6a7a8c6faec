"""The benchmarks: their arithmetic, and that what they run still exists. No time is asserted."""

import json
from itertools import pairwise

import pytest
import torch

from benchmarks import ideas, machine, train
from benchmarks.attention import exponent
from configs import PRESETS
from ops.command_line import parse


def test_spread_is_the_median_and_the_ends():
    assert machine.spread([3.0, 1.0, 10.0]) == "3.0 (1.0-10.0)"
    assert machine.spread([1234.5], ",.0f") == "1,234"


def test_published_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "describe_machine", lambda: "a machine")
    machine.publish(
        tmp_path / "new" / "x-1.5",
        {"One": [{"a": 1, "b": 2}], "None": []},
        {"figure": 3},
        "A note.",
    )
    text = (tmp_path / "new" / "x-1.5.md").read_text()
    assert text == "a machine\n\n## One\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\nA note.\n"
    assert json.loads((tmp_path / "new" / "x-1.5.json").read_text()) == {
        "machine": "a machine",
        "figures": {"figure": 3},
    }
    assert text in capsys.readouterr().out


def test_the_machine_is_timed_in_what_it_multiplies_well(monkeypatch):
    """An emulated product is a thousand times slower: a benchmark would hang on it."""
    monkeypatch.setattr(machine, "best_precision", lambda device: "float32")
    assert machine.cpu_precisions() == ["float32"]
    monkeypatch.setattr(machine, "best_precision", lambda device: "bfloat16")
    assert machine.cpu_precisions() == ["float32", "bfloat16"]


def test_exponent_of_a_power():
    lengths = [256, 512, 1024, 2048]
    assert exponent(lengths, [3 * n**1.7 for n in lengths]) == pytest.approx(1.7, rel=1e-9)
    assert exponent(lengths, [1, 1, *(n**2 for n in lengths[2:])]) == pytest.approx(
        2.0, rel=1e-9
    )  # the upper half counts


def test_muon_flops_by_hand():
    """A 2 x 3 matrix, one step: X X^T 2*2*2*3 = 24, its square 2*2*2*2 = 16, the product with X
    24.
    """
    assert train.muon_flops(torch.Size([3, 2]), n_step=1) == 24 + 16 + 24


def test_a_run_is_sized_to_a_time(monkeypatch):
    """100 steps take 10 s, each of the later ones 50 ms, so that 200 more fit into 20 s."""
    log = [
        {"kind": "train", "step": n, "seconds": {"forward": 0.3 if n > 50 else 2.0, "save": 0.2}}
        for n in range(10, 101, 10)
    ]
    monkeypatch.setattr(
        train,
        "run_training",
        lambda *_: {"seconds": 10.0, "log": [*log, {"kind": "eval", "step": 100}]},
    )
    assert train.steps_within(20.0, ("speedrun-cpu",), "data") == 300


@pytest.mark.parametrize("name", train.RUNS)
def test_what_the_speed_run_runs_can_be_parsed(name):
    parse([str(argument) for argument in train.RUNS[name]])


def test_ideas_lead_from_gpt2_to_the_speed_run(monkeypatch):
    """Each recipe is the one before and one idea more; the last is the preset, but for its length
    and precision.
    """
    monkeypatch.setattr(ideas, "cpu_precisions", lambda: ["float32"])
    recipes = ideas.recipes()
    configs = [parse([str(argument) for argument in recipe]) for _, recipe in recipes]
    assert configs[0].model == PRESETS["nanogpt-cpu"][1].model
    for before, after in pairwise(configs):
        assert (before.model, before.optim) != (after.model, after.optim)
    last, preset = configs[-1], PRESETS["speedrun-cpu"][1]
    assert last.model == preset.model
    same = (
        "optimizer",
        "lr",
        "min_lr",
        "schedule",
        "batch_size",
        "beta1",
        "beta2",
        "weight_decay",
        "grad_clip",
    )
    assert [getattr(last.optim, name) for name in same] == [
        getattr(preset.optim, name) for name in same
    ]


def test_a_row_an_idea(tmp_path, monkeypatch):
    """Steps fill the time asked for, at the speed measured; the change is against the row above."""
    losses = iter([2.0, 2.1, 1.9, 1.8, 1.7, 1.85])
    log = [
        {
            "kind": "train",
            "seconds": {"data": 0.0, "forward": 0.02, "backward": 0.03, "optimizer": 0.0},
        }
    ] * 20
    calls = []

    def run(*arguments):
        calls.append(arguments)
        return {"log": log} if "--stop-at" in arguments else {"val_loss": next(losses)}

    monkeypatch.setattr(ideas, "run_training", run)
    monkeypatch.setattr(ideas, "IDEAS", ideas.IDEAS[:2])
    monkeypatch.setattr(ideas, "cpu_precisions", lambda: ["float32"])
    published = []
    monkeypatch.setattr(
        ideas, "publish", lambda out, sections, record: published.append((sections, record))
    )
    monkeypatch.setattr(
        "sys.argv", ["ideas", "--seconds", "10", "--plot", str(tmp_path / "plot.png")]
    )
    ideas.main()
    rows = next(iter(published[0][0].values()))
    assert [row["loss"] for row in rows] == ["2.000 (1.900-2.100)", "1.800 (1.700-1.850)"]
    assert [row["change"] for row in rows] == ["", "-0.200"]
    assert [row["steps"] for row in rows] == ["200", "200"]
    assert len({call[call.index("--seed") + 1] for call in calls[1:4]}) == 3
    assert (tmp_path / "plot.png").stat().st_size > 1000
