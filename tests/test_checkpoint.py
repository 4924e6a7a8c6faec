"""The file of a run's state: it comes back as it went, is there whole or as it was, and cannot run
code.
"""

import dataclasses
import errno
import io
import os
import pickle
import stat
import threading
import zipfile

import pytest
import torch
from helpers import assert_same_state, make_config, make_model, same_value, write_byte_corpus

from configs import Config, OptimConfig
from data.dataset import Dataset
from data.tokenizer import ByteTokenizer
from errors import MachineError, UserError
from model.attention import explicit_attention
from ops import checkpoint as checkpoints
from ops.checkpoint import Checkpoint, Saver, find, load, load_weights, open_run, save, snapshot
from training.optimizer import make_optimizers


def build(vocab_size=256, **options):
    return make_model(vocab_size, seed=1, **{"n_layer": 1} | options)


def updated(model, optim):
    """Optimisers of `model` that have made two steps."""
    optimizers = make_optimizers(model, optim)
    for step in range(2):
        model(torch.arange(8)[None] + step).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return optimizers


def make_checkpoint(kind="adamw", step=7, **options):
    model = build(**options)
    config = Config(model=model.config, optim=OptimConfig(optimizer=kind))
    tensors = snapshot(
        model, updated(model, config.optim), torch.amp.GradScaler(enabled=False), True
    )
    return model, Checkpoint(
        step, config=config.to_dict(), tokenizer=ByteTokenizer().spec(), dataset="f", **tensors
    )


def refused(path, *words):
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert len(message.splitlines()) <= 2
    assert len(message) < 500
    assert path.name in message
    for word in words:
        assert word in message
    return message


# --- there and back ---


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path, kind, tied):
    _, before = make_checkpoint(kind, tie_embeddings=tied)
    before.best_val_loss, before.counters, before.scaler = 1.25, {"since_best": 3}, {"scale": 2.0}
    save(before, tmp_path / "c.pt")
    after = load(tmp_path / "c.pt")
    for field in dataclasses.fields(Checkpoint):
        assert same_value(getattr(before, field.name), getattr(after, field.name)), field.name
    model = build(tie_embeddings=tied)
    for optimizer, moments in zip(
        make_optimizers(model, OptimConfig(optimizer=kind)), after.optimizer, strict=True
    ):
        optimizer.load_state_dict(moments)
        assert same_value(optimizer.state_dict()["state"], moments["state"])
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_it_is_plain_to_torch(tmp_path):
    """Nothing of this program is needed to read it."""
    save(make_checkpoint()[1], tmp_path / "c.pt")
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert type(state) is dict
    wanted = "version model optimizer step config tokenizer best_val_loss dataset scaler counters"
    assert sorted(state) == sorted(wanted.split())
    assert state["version"] == 1


def test_best_val_loss_that_is_infinite(tmp_path):
    save(make_checkpoint()[1], tmp_path / "c.pt")
    assert load(tmp_path / "c.pt").best_val_loss == float("inf")


def test_tied_embeddings_are_stored_once(tmp_path):
    sizes = {}
    for tied in (True, False):
        _, checkpoint = make_checkpoint(vocab_size=5000, tie_embeddings=tied)
        checkpoint.optimizer = []
        save(checkpoint, tmp_path / f"{tied}.pt")
        sizes[tied] = (tmp_path / f"{tied}.pt").stat().st_size
    matrix = 5000 * 16 * 4
    assert sizes[True] == pytest.approx(sizes[False] - matrix, abs=1000)
    assert sizes[True] < 2 * matrix
    weights = load(tmp_path / "True.pt").model
    assert weights["embed.weight"].data_ptr() == weights["unembed.weight"].data_ptr()
    model = build(vocab_size=5000)
    load_weights(model, load(tmp_path / "True.pt"), "x")
    assert model.unembed.weight is model.embed.weight
    assert torch.equal(model.embed.weight, weights["embed.weight"])


# --- a copy ---


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_snapshot_is_not_changed_by_later_updates(kind):
    model = build()
    optimizers = updated(model, OptimConfig(optimizer=kind, lr=0.1))
    taken = snapshot(model, optimizers, torch.amp.GradScaler(enabled=False), True)
    buffer = io.BytesIO()
    torch.save(taken, buffer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    assert not torch.equal(taken["model"]["norm.weight"], model.norm.weight)
    assert same_value(taken, torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))


def test_a_snapshot_that_is_not_kept_holds_no_tensor():
    model = build()
    taken = snapshot(
        model, updated(model, OptimConfig()), torch.amp.GradScaler(enabled=False), False
    )
    assert taken["model"].keys() == model.state_dict().keys()
    assert all(value is None for value in taken["model"].values())
    assert all(
        v is None for values in taken["optimizer"][0]["state"].values() for v in values.values()
    )


# --- what is refused ---


def test_missing(tmp_path):
    refused(tmp_path / "c.pt", "there is no checkpoint")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.99, "one byte"])
def test_truncated(tmp_path, share):
    path = tmp_path / "c.pt"
    save(make_checkpoint()[1], path)
    whole = path.read_bytes()
    path.write_bytes(whole[: -1 if share == "one byte" else int(share * len(whole))])
    refused(path, "truncated")


class Trap:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_code_is_not_run(tmp_path):
    _, checkpoint = make_checkpoint()
    path = tmp_path / "c.pt"
    state = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
    torch.save({**state, "counters": Trap(tmp_path / "ran")}, path)
    refused(path, "unsafe")
    path.write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    refused(path)
    torch.save(
        {**state, "counters": Trap(tmp_path / "ran")}, path, _use_new_zipfile_serialization=False
    )
    refused(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Trap(tmp_path / "ran")))  # the trap does work
    assert (tmp_path / "ran").exists()


def test_foreign_files(tmp_path):
    path = tmp_path / "c.pt"
    for content in (
        b"",
        b"#!/bin/sh\n",
        b"\x80\x02}q\x00.",
        bytes(range(256)) * 50,
        b"PK\x03\x04" + bytes(200),
    ):
        path.write_bytes(content)
        refused(path, "can't be read as a checkpoint")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", "<xml/>")
    refused(path, "can't be read as a checkpoint")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError):
        load(path)


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"0.",
        b"K\x01",
        b"cno_such\nthing\n.",
        b"\x80\x09.",
        b"(d",
        b"}Q.",
        b"\x85.",
        b"X\xff",
        b"\x95",
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_pickles(tmp_path, pickled):
    """A zip file like torch's whose pickle is nonsense, as a stranger may send it."""
    path = tmp_path / "c.pt"
    save(make_checkpoint()[1], tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as good, zipfile.ZipFile(path, "w") as bad:
        for name in good.namelist():
            bad.writestr(name, pickled if name.endswith("data.pkl") else good.read(name))
    refused(path)


def test_another_program(tmp_path):
    path = tmp_path / "c.pt"
    for state in ({"model": {}, "iter_num": 5}, build().state_dict(), [1, 2], torch.zeros(3), 5):
        torch.save(state, path)
        refused(path, "no checkpoint of this program")


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_another_version(tmp_path, version):
    save(dataclasses.replace(make_checkpoint()[1], version=version), tmp_path / "c.pt")
    refused(tmp_path / "c.pt", repr(version), "reads 1")


@pytest.mark.parametrize(
    "version",
    [True, 1.0, [1], {1: 2}, float("nan"), 10**40, "one\ntwo" * 99, torch.tensor(1), torch.ones(9)],
)
def test_a_version_that_is_no_number(tmp_path, version):
    save(dataclasses.replace(make_checkpoint()[1], version=version), tmp_path / "c.pt")
    message = refused(tmp_path / "c.pt", "is no checkpoint of this program", "reads 1")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("key", [5, 1.5, None, (1, 2), True])
def test_keys_that_are_no_names(tmp_path, key):
    """Here, in the configuration and among the weights."""
    _, checkpoint = make_checkpoint()
    state = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
    torch.save({**state, key: 1}, tmp_path / "c.pt")
    refused(tmp_path / "c.pt", f"[{key!r}]")
    save(dataclasses.replace(checkpoint, model={**checkpoint.model, key: 1}), tmp_path / "c.pt")
    refused(tmp_path / "c.pt", "holds no weights")
    for config in ({**checkpoint.config, key: {}, 7: 8}, {"model": {key: 1}}):
        save(dataclasses.replace(checkpoint, config=config), tmp_path / "c.pt")
        with pytest.raises(UserError, match="configuration") as caught:
            open_run(tmp_path / "c.pt")
        assert str(tmp_path / "c.pt") in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(1).expand(1 << 40),  # a terabyte, it says, of four bytes
        torch.zeros(16, 16).t()[:, :8],
        torch.zeros(2, 2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.int64),
        None,
        [1.0],
    ],
)
def test_weights_that_are_not_what_they_say(tmp_path, weights):
    _, checkpoint = make_checkpoint()
    checkpoint.model["norm.weight"] = weights
    save(checkpoint, tmp_path / "c.pt")
    refused(tmp_path / "c.pt", "'norm.weight' holds no weights")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("step", 2.0),
        ("step", True),
        ("step", 10**30),
        ("best_val_loss", "low"),
        ("best_val_loss", 10**400),
        ("tokenizer", []),
        ("tokenizer", {"kind": "char", "format": 1}),
        ("optimizer", {}),
        ("counters", {"since_best": "x"}),
        ("dataset", None),
        ("scaler", 1),
    ],
)
def test_values_of_another_kind(tmp_path, name, value):
    save(dataclasses.replace(make_checkpoint()[1], **{name: value}), tmp_path / "c.pt")
    with pytest.raises(UserError, match=f"checkpoint: .*{name.partition('_')[0]}") as caught:
        open_run(tmp_path / "c.pt")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["model", "step", "optimizer", "tokenizer", "counters"])
def test_a_missing_key(tmp_path, name):
    _, checkpoint = make_checkpoint()
    state = {f.name: getattr(checkpoint, f.name) for f in dataclasses.fields(Checkpoint)}
    del state[name]
    torch.save(state, tmp_path / "c.pt")
    refused(tmp_path / "c.pt", name)
    torch.save({**state, name: getattr(checkpoint, name), "extra": 1}, tmp_path / "c.pt")
    refused(tmp_path / "c.pt", "extra")


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 32},
        {"n_layer": 2},
        {"context_length": 16},
        {"bias": False},
        {"mlp": "swiglu"},
        {"vocab_size": 255},
    ],
)
def test_other_shapes(tmp_path, change):
    save(make_checkpoint()[1], tmp_path / "c.pt")
    with pytest.raises(UserError, match="don't fit this model") as caught:
        load_weights(build(**change), load(tmp_path / "c.pt"), tmp_path / "c.pt")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", 5), ("model", None), ("model", {"embed.weight": 5}), ("config", [])],
)
def test_a_field_of_another_type(tmp_path, name, value):
    """Not by truncation, but by someone's hand: still two lines, and no traceback."""
    save(dataclasses.replace(make_checkpoint()[1], **{name: value}), tmp_path / "c.pt")
    with pytest.raises(UserError):
        open_run(tmp_path / "c.pt")


# --- whole or as it was ---


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    _, old = make_checkpoint(step=1)
    path = tmp_path / "c.pt"
    save(old, path)
    before = path.read_bytes()
    whole = torch.save

    def half(error):
        def write(state, file):
            buffer = io.BytesIO()
            whole(state, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            raise error

        return write

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error in (full, RuntimeError("unexpected pos 64 vs 0"), MemoryError(), KeyboardInterrupt()):
        monkeypatch.setattr(torch, "save", half(error))
        expected = OSError if isinstance(error, OSError | RuntimeError) else type(error)
        with pytest.raises(expected):
            save(make_checkpoint(step=2)[1], path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


def test_the_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    """A crash after the rename must not find an empty file under the good name."""
    calls, fsync, replace = [], os.fsync, os.replace

    def spy_fsync(descriptor):
        calls.append(
            "flush folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "flush file"
        )
        fsync(descriptor)

    def spy_replace(source, target):
        calls.append("rename")
        assert source != target
        assert load(source).step == 7  # whole already
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    save(make_checkpoint()[1], tmp_path / "c.pt")
    assert calls == ["flush file", "rename", "flush folder"]


# --- the thread that writes ---


def test_saver_writes_every_path_and_is_waited_for(tmp_path):
    saver = Saver()
    _, checkpoint = make_checkpoint()
    saver.save(checkpoint, tmp_path / "a.pt", tmp_path / "b.pt")
    saver.save(dataclasses.replace(checkpoint, step=8), tmp_path / "a.pt")
    saver.wait()
    assert (load(tmp_path / "a.pt").step, load(tmp_path / "b.pt").step) == (8, 7)


def test_saver_does_not_make_training_wait(tmp_path, monkeypatch):
    gate, running = threading.Event(), []

    def slow(checkpoint, path):
        running.append(threading.current_thread())
        assert gate.wait(30)

    monkeypatch.setattr(checkpoints, "save", slow)
    saver = Saver()
    saver.save(make_checkpoint()[1], tmp_path / "a.pt")  # returns though nothing can be written yet
    saver.check()
    assert saver.thread.is_alive()
    assert not saver.thread.daemon  # Python waits for it at exit
    gate.set()
    saver.wait()
    assert not saver.thread.is_alive()
    assert running == [saver.thread]


@pytest.mark.parametrize("call", ["save", "check", "wait"])
def test_a_failure_surfaces_at_the_next_call(tmp_path, monkeypatch, call):
    _, checkpoint = make_checkpoint()
    save(checkpoint, tmp_path / "c.pt")
    before = (tmp_path / "c.pt").read_bytes()

    def fail(state, file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", fail)
    saver = Saver()
    saver.save(checkpoint, tmp_path / "c.pt", tmp_path / "d.pt")
    saver.thread.join()
    arguments = (checkpoint, tmp_path / "c.pt") if call == "save" else ()
    with pytest.raises(MachineError, match="No space left") as caught:
        getattr(saver, call)(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "c.pt").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["c.pt"]


# --- a run or a file ---


def test_find(tmp_path):
    _, checkpoint = make_checkpoint()
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(UserError, match=r"neither best\.pt nor checkpoint\.pt"):
        find(folder)
    with pytest.raises(UserError, match="there is no run"):
        find(tmp_path / "none")
    save(checkpoint, folder / "checkpoint.pt")
    assert find(folder) == folder / "checkpoint.pt"
    save(dataclasses.replace(checkpoint, step=5), folder / "best.pt")
    assert find(str(folder)) == folder / "best.pt"
    assert find(folder / "checkpoint.pt") == folder / "checkpoint.pt"


def test_open_run(tmp_path):
    trained, checkpoint = make_checkpoint()
    save(checkpoint, tmp_path / "checkpoint.pt")
    for attend in (None, explicit_attention):
        model, tokenizer, found = open_run(tmp_path, **({"attend": attend} if attend else {}))
        assert not model.training
        assert (tokenizer.kind, found.step) == ("byte", 7)
        assert same_value(model.state_dict(), trained.state_dict())
    assert model.blocks[0].attention.attend is explicit_attention
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_open_run_does_not_hold_on_to_the_file(tmp_path):
    """Weights are copied out: a run that goes on and replaces its file changes no model that was
    opened before.
    """
    trained, checkpoint = make_checkpoint()
    save(checkpoint, tmp_path / "checkpoint.pt")
    model, _, _ = open_run(tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(bytes(path.stat().st_size))
    assert same_value(model.state_dict(), trained.state_dict())


def test_the_fingerprint_in_a_checkpoint_is_the_datasets(tmp_path):
    from helpers import train_here

    data = write_byte_corpus(tmp_path / "d", "some text, and some more of it.\n" * 30)
    assert train_here(make_config(data, tmp_path / "r", max_steps=1)) == 0
    state = assert_same_state(tmp_path / "r", tmp_path / "r")
    assert state.dataset == Dataset(data).fingerprint
    assert state.tokenizer == ByteTokenizer().spec()
    assert state.step == 1


def test_a_folder_that_refuses_to_be_flushed(tmp_path, monkeypatch):
    """Some network file systems do; the file itself is on the disk already."""
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    _, checkpoint = make_checkpoint()
    save(checkpoint, tmp_path / "c.pt")
    assert load(tmp_path / "c.pt").step == checkpoint.step
