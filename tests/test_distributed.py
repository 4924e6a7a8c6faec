"""One process or several, the model whole in each or shared out: the same curve up to the order of
float sums, and checkpoints that any of them can go on from.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    environment,
    fork_training,
    losses,
    make_config,
    nonsense,
    read_records,
    train_here,
    write_corpus,
)

from ops.checkpoint import load, open_run
from ops.distributed import Processes, gather, scatter_optimizer

STEPS = 50
COMMON = {
    **{
        "max_steps": STEPS,
        "batch_size": 8,
        "micro_batch_size": 2,
        "dropout": 0.1,
        "lr": 1e-3,
        "n_layer": 2,
    },
    **{"eval_every": 25, "save_every": 25, "eval_batches": 0},
}
TOLERANCE = 2e-6
"""Of losses near 3, whose float32 neighbours lie 2.4e-7 apart."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.distributed.is_available(), reason="this torch has no torch.distributed"
    ),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "d", nonsense())


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """The run in one process: (folder, losses by step)."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    assert train_here(make_config(data, folder, **COMMON)) == 0
    return folder, losses(folder)


def start_group(count, config, outputs):
    """The processes of a group, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return [
        fork_training(config, f"{outputs}-{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank in range(count)
    ]


def train_together(count, config, outputs, code=0):
    """Train in `count` processes; what each printed."""
    group = start_group(count, config, outputs)
    for process in group:
        process.join(120)
        process.kill()
    texts = [Path(f"{outputs}-{rank}").read_text(encoding="utf-8") for rank in range(count)]
    assert [process.exitcode for process in group] == [code] * count, "\n".join(texts)
    return texts


def same_curve(folder, expected, tolerance=TOLERANCE):
    found = losses(folder)
    assert found.keys() == expected.keys()
    worst = max(abs(found[step] - expected[step]) for step in found)
    assert worst <= tolerance, f"{worst:.1e}"


# --- the curve ---


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes(tmp_path, data, alone, strategy):
    """With dropout: at equal micro_batch_size any number of processes draws the same masks."""
    texts = train_together(
        2, make_config(data, tmp_path / "r", strategy=strategy, **COMMON), tmp_path / "out"
    )
    same_curve(tmp_path / "r", alone[1])
    evals = [
        [r for r in read_records(folder) if r["kind"] == "eval"]
        for folder in (tmp_path / "r", alone[0])
    ]
    for mine, theirs in zip(*evals, strict=True):
        assert mine == pytest.approx(theirs, abs=5e-5)  # perplexity, of size 20, among them
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], abs=TOLERANCE)
    assert "accumulation 2 x processes 2 x context 16 = 128 tokens" in texts[0]
    assert texts[1] == ""  # one process speaks
    a, b = (load(folder / "checkpoint.pt") for folder in (tmp_path / "r", alone[0]))
    assert {name: value.shape for name, value in a.model.items()} == {
        name: value.shape for name, value in b.model.items()
    }
    assert a.model["embed.weight"].data_ptr() == a.model["unembed.weight"].data_ptr()
    model, _, _ = open_run(tmp_path / "r")
    assert model.unembed.weight is model.embed.weight


def test_two_processes_with_muon(tmp_path, data):
    """Orthogonalised in float32, as it is where precision is float32."""
    fields = COMMON | {"optimizer": "muon", "eval_every": 0, "dropout": 0.0}
    assert train_here(make_config(data, tmp_path / "alone", **fields)) == 0
    train_together(2, make_config(data, tmp_path / "r", **fields), tmp_path / "out")
    same_curve(tmp_path / "r", losses(tmp_path / "alone"), tolerance=1e-5)


@pytest.mark.parametrize("first", [1, 2])
def test_checkpoints_are_interchangeable(tmp_path, data, alone, first):
    """Begun by one process and ended by two that share the model out, and the other way round."""
    for count, stop in ((first, 25), (3 - first, 0)):
        config = make_config(
            data, tmp_path / "r", strategy="fsdp", stop_at=stop, resume=True, **COMMON
        )
        if count == 1:
            assert train_here(config) == 0
        else:
            train_together(2, config, tmp_path / f"out{stop}")
    same_curve(tmp_path / "r", alone[1])
    state = load(tmp_path / "r" / "checkpoint.pt")
    shapes = [tuple(values["exp_avg"].shape) for values in state.optimizer[0]["state"].values()]
    known = load(alone[0] / "checkpoint.pt").optimizer[0]["state"]
    assert shapes == [tuple(values["exp_avg"].shape) for values in known.values()]


@pytest.mark.drill
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_four_processes(tmp_path, data, alone, strategy):
    train_together(
        4, make_config(data, tmp_path / "r", strategy=strategy, **COMMON), tmp_path / "out"
    )
    same_curve(tmp_path / "r", alone[1])


# --- the group ---


def test_a_signal_to_one_stops_all_at_one_step(tmp_path, data):
    fields = COMMON | {"max_steps": 10**6, "eval_every": 0, "save_every": 0}
    group = start_group(2, make_config(data, tmp_path / "r", **fields), tmp_path / "out")
    log, end = tmp_path / "r" / "log.jsonl", time.monotonic() + 100
    while not log.exists() or log.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < end
        assert all(process.is_alive() for process in group)
        time.sleep(0.02)
    os.kill(group[1].pid, signal.SIGTERM)
    for process in group:
        process.join(60)
    assert [process.exitcode for process in group] == [75, 75]
    assert load(tmp_path / "r" / "checkpoint.pt").step == read_records(tmp_path / "r")[-1]["step"]


def children(pid):
    return [
        int(word)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for word in (task / "children").read_text().split()
    ]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the processes in /proc")
def test_torchrun_starts_again_and_goes_on(tmp_path, data, alone):
    """The real launcher. One process of the group is killed; the others end, all are started anew
    and resume by themselves.
    """
    config = make_config(
        data, tmp_path / "r", **COMMON | {"save_every": 1, "eval_every": 0, "sample_tokens": 0}
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    line += [str(ROOT / "train.py"), str(tmp_path / "config.json"), "--resume"]
    with open(tmp_path / "out", "wb") as output:
        launcher = subprocess.Popen(
            line, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        log, end = tmp_path / "r" / "log.jsonl", time.monotonic() + 100
        while not log.exists() or log.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < end
            assert launcher.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.01)
        workers = [
            pid
            for pid in children(launcher.pid)
            if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert launcher.wait(60) == 0, (tmp_path / "out").read_text()
    finally:
        if launcher.poll() is None:
            for pid in (launcher.pid, *children(launcher.pid)):
                os.kill(pid, signal.SIGKILL)
            launcher.wait()
    assert "going on from step" in (tmp_path / "out").read_text()
    same_curve(tmp_path / "r", alone[1])


# --- the parts ---


def test_one_process():
    processes = Processes()
    assert processes.is_main
    assert not processes.is_sharded
    assert processes.device("cuda") == "cuda"
    assert processes.sum(1, torch.tensor(2.5), True) == [1.0, 2.5, 1.0]
    model = torch.nn.Linear(2, 2)
    assert processes.wrap(model, "cpu") is model


def test_places():
    second = Processes(rank=1, count=2, local_rank=1, strategy="fsdp")
    assert not second.is_main
    assert second.is_sharded
    assert (second.device("cuda"), second.device("cpu")) == ("cuda:1", "cpu")
    assert not Processes(count=1, strategy="fsdp").is_sharded


def test_gather_copies_and_keeps_containers():
    weight = torch.ones(2)
    state = {"a": [weight, 3], "b": (0.9, 0.99), "c": {"d": "text"}}
    kept, dropped = gather(state, True), gather(state, False)
    weight.zero_()
    assert kept["a"][0].tolist() == [1.0, 1.0]
    assert (kept["a"][1], kept["b"], kept["c"]) == (3, (0.9, 0.99), {"d": "text"})
    assert dropped == {"a": [None, 3], "b": (0.9, 0.99), "c": {"d": "text"}}


def test_scatter_leaves_whole_parameters_alone():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    assert (
        scatter_optimizer(optimizer, state)["state"][0]["exp_avg"] is state["state"][0]["exp_avg"]
    )
