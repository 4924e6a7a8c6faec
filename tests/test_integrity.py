"""A checkpoint file that was damaged, or is something else, is never taken for whole."""

import copy
import dataclasses
import io
import pickle
import random
import zipfile
import zlib

import pytest
import torch
from helpers import same_value
from test_checkpoint import make_checkpoint

from errors import UserError
from ops.checkpoint import Checkpoint, find, load, save
from ops.integrity import LABEL

BLOCK = 4096


@pytest.fixture(scope="module")
def kept():
    """A checkpoint with weights, moments and counters."""
    _, checkpoint = make_checkpoint()
    checkpoint.best_val_loss = 1.5
    checkpoint.counters = {"since_best": 3}
    return checkpoint


def write(checkpoint, path, sealed=True):
    """A file as this version writes it or, not sealed, as the one before did. Its bytes."""
    if sealed:
        save(checkpoint, path)
    else:
        torch.save({f.name: getattr(checkpoint, f.name) for f in fields()}, path)
    return path.read_bytes()


def fields():
    return dataclasses.fields(Checkpoint)


def is_refused(path, content, expected):
    """Whether a file of these bytes is refused; what loads must be as it was saved."""
    path.write_bytes(content)
    try:
        found = load(path)
    except UserError:
        return True
    for field in fields():
        assert same_value(getattr(found, field.name), getattr(expected, field.name)), field.name
    return False


def flip(content, draw):
    """The bytes with one bit flipped, at a random place."""
    damaged = bytearray(content)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


# --- the sum ---


def test_the_sum_is_that_of_the_bytes_before_it(tmp_path, kept):
    """And the file is a zip file still, which any tool reads and checks."""
    raw = write(kept, tmp_path / "c.pt")
    archive, found = raw.split(LABEL)
    assert found == b"%08x" % zlib.crc32(archive[:-2] + bytes(2))
    with zipfile.ZipFile(tmp_path / "c.pt") as file:
        assert file.comment == LABEL + found
        assert file.testzip() is None
    assert same_value(torch.load(tmp_path / "c.pt", weights_only=True)["model"], kept.model)


@pytest.mark.parametrize("seed", range(7))
def test_one_flipped_bit(tmp_path, kept, seed):
    raw, draw = write(kept, tmp_path / "c.pt"), random.Random(seed)
    for _ in range(10):
        assert is_refused(tmp_path / "d.pt", flip(raw, draw), kept)


def test_a_flipped_bit_in_the_seal(tmp_path, kept):
    raw = write(kept, tmp_path / "c.pt")
    for place in range(len(raw) - 50, len(raw)):
        damaged = raw[:place] + bytes([raw[place] ^ 32]) + raw[place + 1 :]  # a letter's other case
        assert is_refused(tmp_path / "d.pt", damaged, kept), place


def test_a_zeroed_block(tmp_path, kept):
    raw, draw = write(kept, tmp_path / "c.pt"), random.Random(0)
    for _ in range(10):
        start = draw.randrange(0, len(raw), BLOCK)
        block = raw[start : start + BLOCK]
        damaged = raw[:start] + bytes(len(block)) + raw[start + BLOCK :]
        assert is_refused(tmp_path / "d.pt", damaged, kept)


def test_two_halves_of_two_checkpoints(tmp_path, kept):
    """As after a copy that was begun again while the run went on."""
    one = write(kept, tmp_path / "c.pt")
    later = copy.deepcopy(kept)
    later.model["embed.weight"] += 1
    two = write(later, tmp_path / "c.pt")
    assert len(one) == len(two)
    assert is_refused(tmp_path / "d.pt", one[: len(one) // 2] + two[len(two) // 2 :], kept)
    assert is_refused(tmp_path / "d.pt", one + b"\n", kept)


# --- earlier versions ---


def test_an_earlier_version_loads_with_a_note(tmp_path, kept, capsys):
    raw = write(kept, tmp_path / "c.pt", sealed=False)
    assert not is_refused(tmp_path / "old.pt", raw, kept)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "old.pt is of an earlier version and holds no sum of its contents" in error
    assert not is_refused(tmp_path / "new.pt", write(kept, tmp_path / "c.pt"), kept)
    assert capsys.readouterr().err == ""


def test_an_earlier_version_is_held_against_its_archives_sums(tmp_path, kept):
    raw, draw = write(kept, tmp_path / "c.pt", sealed=False), random.Random(3)
    n_refused = sum(is_refused(tmp_path / "d.pt", flip(raw, draw), kept) for _ in range(70))
    assert n_refused > 50  # the rest fell between the parts, and changed nothing


# --- what to fall back on ---


@pytest.mark.parametrize(
    ("bad", "good"), [("best.pt", "checkpoint.pt"), ("checkpoint.pt", "best.pt")]
)
def test_the_other_checkpoint_is_named(tmp_path, kept, bad, good):
    write(dataclasses.replace(kept, step=1234), tmp_path / good)
    is_damaged = flip(write(kept, tmp_path / bad), random.Random(0))
    (tmp_path / bad).write_bytes(is_damaged)
    with pytest.raises(UserError) as caught:
        load(tmp_path / bad)
    first, second = str(caught.value).split("\n")
    assert first.startswith(f"{tmp_path / bad} can't be read as a checkpoint: it is damaged")
    assert second.startswith(f"{tmp_path / good} is whole (step 1,234): move {bad} away")
    (tmp_path / bad).unlink()
    assert find(tmp_path) == tmp_path / good  # as the message says
    write(kept, tmp_path / bad)
    (tmp_path / good).write_bytes(b"<html>")
    (tmp_path / bad).write_bytes(is_damaged)
    with pytest.raises(UserError, match="can't be read either"):
        load(tmp_path / bad)


def test_a_damaged_file_that_is_not_meant_is_not_in_the_way(tmp_path, kept):
    write(dataclasses.replace(kept, step=0), tmp_path / "best.pt")
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04")
    assert find(tmp_path) == tmp_path / "best.pt"


# --- other files ---


def archive_of(name, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr(name, b"1" * 1000)
    return buffer.getvalue()


def old_torch_format():
    buffer = io.BytesIO()
    torch.save({"model": torch.zeros(3)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2\nsize 12345\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (bytes(10_000), "it begins with 512 zero bytes"),
        (b"PK\x03\x04" + bytes(1000), "truncated"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html>", "a web page (HTML)"),
        (b"  <html><head><title>Sign in</title>", "a web page (HTML)"),
        (POINTER, "a Git LFS pointer"),
        (b'{"model": {"n_layer": 12}}', 'a text file, beginning \'{"model"'),
        ("C\u2019est une pipe. ".encode() * 30, "a text file, beginning 'C\\u2019est"),
        (b"\x1b[31mred\x1b[0m", "of another program"),
        (pickle.dumps({"a": [1, 2, 3]}), "a pickle of another program"),
        (pickle.dumps(Checkpoint, protocol=0), "a text file"),
        (old_torch_format(), "torch's old format"),
        (archive_of("arr_0.npy"), "a NumPy archive"),
        (archive_of("word/document.xml"), "a zip archive of other files"),
        (archive_of("a/data.pkl", zipfile.ZIP_DEFLATED), "damaged"),
        (b"\x1f\x8b\x08" + bytes(99), "gunzip"),
        ((40).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}', "safetensors"),
        (random.Random(0).randbytes(999), "of another program"),
    ],
)
def test_what_a_file_is_instead(tmp_path, content, words):
    path = tmp_path / "best.pt"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path} can't be read as a checkpoint: it ")
    assert words in message
    assert message.isprintable()
    assert len(message) < len(str(path)) + 200
    assert not any(word in message for word in ("weights_only", "mmap", "torch.load", "Error"))


def test_a_folder_in_its_place(tmp_path):
    (tmp_path / "best.pt").mkdir()
    with pytest.raises(UserError, match=r"there is no checkpoint .*: that is a folder"):
        load(tmp_path / "best.pt")
