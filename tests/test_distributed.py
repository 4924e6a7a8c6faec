"""One process or several, the model whole in each or shared out: the same curve up to the order of
float sums, and checkpoints that any of them can go on from.
"""

import functools
import json
import multiprocessing
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
    make_model,
    nonsense,
    read_records,
    train_here,
    write_corpus,
)

from configs import OptimConfig
from ops import distributed
from ops.checkpoint import load, open_run
from ops.device import autocast
from ops.distributed import (
    Processes,
    announced,
    gather,
    half_announced,
    is_first,
    scatter_optimizer,
    world_size,
)
from ops.meeting import disagreement
from training.loss import cross_entropy
from training.optimizer import make_optimizers

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


def start_group(configs, outputs):
    """The processes of a group, one a configuration, with the variables that torchrun sets."""
    count = len(configs)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return [
        fork_training(config, f"{outputs}-{rank}", RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank, config in enumerate(configs)
    ]


def train_together(count, config, outputs, code=0):
    """Train in `count` processes; what each printed."""
    return train_each([config] * count, outputs, code)


def train_each(configs, outputs, code=0):
    """Train in as many processes as there are configurations; what each printed."""
    count = len(configs)
    group = start_group(configs, outputs)
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


# --- what is announced ---

GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "7"}


@pytest.fixture
def announce(monkeypatch):
    """Sets the variables of a group; one that is None isn't set."""

    def write(**changes):
        for name, value in (GROUP | changes).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    return write


def test_a_group_is_announced(announce):
    announce()
    assert (announced(), world_size(), is_first(), half_announced()) == ((1, 2), 2, False, None)
    announce(RANK="0")
    assert is_first()


@pytest.mark.parametrize(
    "change",
    [
        *({name: None} for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")),
        *({"RANK": text} for text in ("", "two", "2", "-1", "1.0")),
        *({"WORLD_SIZE": text} for text in ("", "two", "0", "1e3", "-2")),
        {"MASTER_PORT": "http"},
    ],
    ids=str,
)
def test_half_a_group_is_none(announce, change):
    announce(**change)
    assert (world_size(), is_first()) == (1, True)
    line = half_announced()
    name, value = next(iter(change.items()))
    assert f"{name} is {value or 'not set'}" in line
    assert len(line.splitlines()) == 1


def test_nothing_announced_is_nothing_said(announce):
    announce(**dict.fromkeys(GROUP))
    assert (announced(), half_announced()) == ((0, 1), None)
    announce(WORLD_SIZE="1", RANK=None)
    assert (announced(), half_announced()) == ((0, 1), None)


@pytest.mark.parametrize("change", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"}], ids=str)
def test_half_a_group_trains_alone(tmp_path, data, announce, capsys, change):
    announce(**dict.fromkeys(GROUP) | change)
    assert train_here(make_config(data, tmp_path / "r")) == 0
    assert capsys.readouterr().err.count("note: going on as one process") == 1


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


def muon_weights(processes=None):
    """A model's weights after two updates, each process having its share of the products."""
    model = make_model(seed=0, n_layer=3)
    optimizers = make_optimizers(model, OptimConfig(optimizer="muon"))
    if processes is not None:
        processes.share_products(optimizers, "cpu")
        assert isinstance(optimizers[1].orthogonalize, functools.partial)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def share_muon(rank, place):
    """One of two processes, between which sending is cheap."""
    torch.set_num_threads(1)
    distributed.FAST_LINKS = {"cpu"}
    store = torch.distributed.FileStore(f"{place}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(muon_weights(Processes(rank, 2)), f"{place}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_muons_products_are_shared_out(tmp_path):
    """12 matrices of one shape and three of two others: the update is one process's, up to float
    sums, and the same bits in both.
    """
    context = multiprocessing.get_context("fork")  # this process has torch, and one thread
    group = [context.Process(target=share_muon, args=(rank, str(tmp_path))) for rank in (0, 1)]
    for process in group:
        process.start()
    for process in group:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in group] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    expected = muon_weights()
    for name, weight in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], weight, rtol=1e-5, atol=1e-7)


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
    group = start_group([make_config(data, tmp_path / "r", **fields)] * 2, tmp_path / "out")
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


# --- what they see ---


def ends_with(configs, outputs, *words):
    """The processes end with 2 and one line, printed by the first, that holds the words."""
    began = time.monotonic()
    first, *others = train_each(configs, outputs, code=2)
    assert time.monotonic() - began < 60
    assert all(word in first for word in words), first
    assert first.startswith("error: ")
    assert first.count("\n") == 1
    assert others == [""] * len(others)


def test_one_does_not_see_the_checkpoint(tmp_path, data):
    here = make_config(data, tmp_path / "r", stop_at=4, **COMMON)
    assert train_here(here) == 0
    before = (tmp_path / "r" / "checkpoint.pt").read_bytes()
    configs = [
        make_config(data, tmp_path / out, resume=True, **COMMON) for out in ("r", "elsewhere")
    ]
    ends_with(
        configs, tmp_path / "out", "process 1 (", "sees checkpoint none", "sees step 4", "share"
    )
    assert (tmp_path / "r" / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


def test_one_sees_other_data(tmp_path, data):
    other = write_corpus(tmp_path / "other", nonsense(seed=1))
    configs = [make_config(folder, tmp_path / "r", **COMMON) for folder in (data, other)]
    ends_with(configs, tmp_path / "out", "process 1 (", "sees data ", "same prepared folder")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("blind", [0, 1])
def test_one_sees_no_data(tmp_path, data, blind):
    configs = [make_config(data, tmp_path / "r", **COMMON) for _ in range(2)]
    configs[blind] = configs[blind].replace(data=str(tmp_path / "missing"))
    ends_with(configs, tmp_path / "out", f"process {blind} (", "missing isn't prepared")


def test_one_does_not_see_the_weights_to_start_from(tmp_path, data):
    assert train_here(make_config(data, tmp_path / "old")) == 0
    configs = [make_config(data, tmp_path / "r", init_from=str(tmp_path / "old"))] * 2
    configs[1] = configs[1].replace(init_from=str(tmp_path / "missing"))
    ends_with(configs, tmp_path / "out", "process 1 (", "there is no run", "missing")


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({}, None),
        ({"host": "c"}, None),
        (
            {"checkpoint": "none"},
            "process 1 (b) sees checkpoint none, but process 0 (a) sees step 4: ",
        ),
        (
            {"precision": "float32"},
            "process 1 (b) sees precision float32, but process 0 (a) sees float16",
        ),
        ({"device": "cpu", "precision": "float32"}, "sees device cpu"),
        ({"error": "no data"}, "process 1 (b): no data"),
        ({"error": "no data", "checkpoint": "none"}, "process 1 (b): no data"),
    ],
)
def test_disagreement(second, expected):
    facts = {"checkpoint": "step 4", "device": "cuda", "precision": "float16"}
    told = [facts | {"host": "a"}, facts | {"host": "b"} | second, facts | {"host": "d"}]
    line = disagreement(told)
    assert line is None if expected is None else expected in line


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


@pytest.mark.parametrize("n_matrix", [1, 3, 4])
def test_shares_by_hand(monkeypatch, n_matrix):
    """Each of three processes doubles its own; what all of them send is put together."""
    stack = torch.arange(n_matrix * 4.0).view(n_matrix, 2, 2)
    sent = {}

    def send(whole, mine):
        sent[rank] = mine.clone()
        whole.copy_(torch.cat([sent.get(r, torch.full_like(mine, -1.0)) for r in range(3)]))

    monkeypatch.setattr(distributed.dist, "all_gather_into_tensor", send)
    for rank in range(3):
        found = Processes(rank, 3).in_shares(lambda x, factor: factor * x, stack, 2.0)
    assert torch.equal(found, 2 * stack)
    assert {len(mine) for mine in sent.values()} == {-(-n_matrix // 3)}


@pytest.fixture
def group():
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # CUDA's autocast widens a norm's weights
@pytest.mark.parametrize(
    ("links", "precision", "gathered"),
    [
        ({"cpu"}, "bfloat16", torch.bfloat16),
        ({"cpu"}, "float32", torch.float32),
        ({"cuda"}, "bfloat16", torch.float32),
    ],
)
def test_blocks_are_gathered_in_bfloat16(monkeypatch, group, links, precision, gathered):
    """As between GPUs; weights, gradients and the stream between blocks stay in float32."""
    monkeypatch.setattr(distributed, "FAST_LINKS", links)
    tokens, seen = torch.arange(16).view(2, 8) % 11, []

    def look(attention, *_):
        seen.append(attention.query.weight.dtype)

    results = []
    for strategy in ("ddp", "fsdp"):
        model = make_model(seed=0, norm="rmsnorm", bias=False, tie_embeddings=False)
        if strategy == "fsdp":
            Processes(0, 2, 0, "fsdp").shard(model, precision)
            model.blocks[0].attention.register_forward_hook(look)
            model.blocks[0].register_forward_hook(lambda _, given, out: seen.append(out.dtype))
        with autocast("cpu", precision):
            loss = cross_entropy(model(tokens), tokens)
        loss.backward()
        gradient = model.blocks[0].mlp.up.weight.grad
        results.append((loss.detach(), gather(gradient, True)))
    assert gradient.dtype == model.blocks[0].mlp.up.weight.dtype == torch.float32
    assert seen == [gathered, torch.float32]
    # The norms' weights, all ones, and autocast's own rounding of the others are the same.
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=2**-7, atol=1e-6)


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
