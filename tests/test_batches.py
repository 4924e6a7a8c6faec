"""Batches as a pure function of (seed, step): windows counted by hand, slices of the global batch,
damaged folders.
"""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import nonsense, write_byte_corpus, write_corpus

from data import batches
from data.batches import n_windows, split_windows, training_batch
from data.dataset import Dataset
from errors import UserError


def starts(n_token, context_length, seed, epoch, batch_size=1):
    """Where the windows of an epoch start, in order; the tokens count up from 0, so a window's
    first token is its place.
    """
    tokens, windows = np.arange(n_token, dtype=np.uint16), n_windows(n_token, context_length)
    assert windows % batch_size == 0
    found = []
    for step in range(epoch * windows // batch_size, (epoch + 1) * windows // batch_size):
        inputs, targets = training_batch(tokens, context_length, batch_size, seed, step)
        assert inputs.shape == targets.shape == (batch_size, context_length)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(
            inputs, inputs[:, :1] + torch.arange(context_length)
        )  # consecutive tokens
        assert torch.equal(targets, inputs + 1)  # each input's successor
        found += inputs[:, 0].tolist()
    return found


# --- an epoch ---


@pytest.mark.parametrize(
    ("n_token", "context_length", "windows"),
    [
        (5, 4, 1),
        (8, 4, 1),
        (11, 4, 1),
        (12, 4, 2),
        (15, 4, 2),
        (16, 4, 3),
        (103, 10, 9),
        (2, 1, 1),
        (7, 1, 6),
    ],
)
def test_an_epoch_visits_side_by_side_windows_once(n_token, context_length, windows):
    # n // c - 1 windows, at least one: (103, 10) -> 9 of 10 tokens, starting anywhere from 0 to 103
    # - 1 - 90 = 12
    offsets = set()
    for epoch in range(60):
        found = starts(n_token, context_length, 3, epoch)
        assert len(found) == windows
        places = sorted(found)
        assert all(
            b - a == context_length for a, b in pairwise(places)
        )  # side by side: none twice, none overlapping
        assert places[0] >= 0
        assert places[-1] + context_length < n_token  # the last target exists
        offsets.add(places[0])
    slack = n_token - 1 - windows * context_length
    assert offsets <= set(range(slack + 1))
    # Any token can be the first or the last; 60 draws out of 13 at most miss one in 1 of 60 cases.
    assert {0, slack} <= offsets


def test_a_text_of_one_window():
    assert [starts(5, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)] == [[0]] * 4


def test_order_and_offset_change_with_epoch_and_seed():
    orders = {
        (seed, epoch): starts(1000, 10, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)
    }
    shuffles = {tuple((np.array(order) - min(order)).tolist()) for order in orders.values()}
    assert len(shuffles) == 6  # not merely moved by the offset
    assert len({min(order) for order in orders.values()}) > 1
    assert all(order != sorted(order) for order in orders.values())


def test_steps_run_through_the_epochs_end_to_end():
    tokens = np.arange(103, dtype=np.uint16)  # 9 windows an epoch: a batch of 4 straddles epochs
    seen = [int(row[0]) for step in range(9) for row in training_batch(tokens, 10, 4, 5, step)[0]]
    assert seen == [place for epoch in range(4) for place in starts(103, 10, 5, epoch)]


def test_a_batch_larger_than_an_epoch():
    tokens = np.arange(12, dtype=np.uint16)
    assert Counter(training_batch(tokens, 4, 6, 0, 0)[0][:, 0].tolist()).total() == 6


# --- a pure function ---


def test_depends_on_seed_and_step_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    wanted = {step: training_batch(tokens, 8, 4, 7, step)[0] for step in range(40)}
    torch.manual_seed(99)
    np.random.seed(99)
    for step in (39, 0, 17, 17, 3):  # any order, any number of times
        assert torch.equal(training_batch(tokens, 8, 4, 7, step)[0], wanted[step])
    assert not torch.equal(training_batch(tokens, 8, 4, 8, 0)[0], wanted[0])


def test_the_cache_of_epochs_changes_nothing():
    long, short = np.arange(1000, dtype=np.uint16), np.arange(500, dtype=np.uint16)
    mixed = [
        training_batch(t, c, 4, s, 1)[0] for s in (1, 2) for t in (long, short) for c in (4, 8)
    ]
    for index, (s, t, c) in enumerate(
        (s, t, c) for s in (1, 2) for t in (long, short) for c in (4, 8)
    ):
        batches._epoch.cache_clear()
        assert torch.equal(training_batch(t, c, 4, s, 1)[0], mixed[index])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_slices_make_up_the_global_batch(processes):
    tokens = np.arange(300, dtype=np.uint16)
    for step in range(30):
        inputs, targets = training_batch(tokens, 8, 8, 11, step)
        size = 8 // processes
        parts = [
            training_batch(tokens, 8, 8, 11, step, range(p * size, (p + 1) * size))
            for p in range(processes)
        ]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)


# --- the folder ---


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 2), ("uint32", 4)])
def test_reads_either_dtype(tmp_path, dtype, size):
    text = nonsense(500)
    data = Dataset(write_corpus(tmp_path / "d", text, dtype=dtype))
    assert (tmp_path / "d" / "train.bin").stat().st_size == 450 * size
    symbols = data.tokenizer_spec["symbols"]
    assert "".join(symbols[i] for i in data.tokens["train"]) == text[:450]
    assert "".join(symbols[i] for i in data.tokens["val"]) == text[450:]
    inputs, _ = training_batch(data.tokens["train"], 8, 4, 0, 0)
    assert "".join(symbols[i] for i in inputs[0]) in text


def test_tokens_beyond_16_bits(tmp_path):
    write_corpus(tmp_path, nonsense(100), dtype="uint32")
    np.full(90, 70_000, "<u4").tofile(tmp_path / "train.bin")
    assert training_batch(Dataset(tmp_path).tokens["train"], 8, 1, 0, 0)[0].unique().tolist() == [
        70_000
    ]


def test_bytes_per_token(tmp_path):
    data = Dataset(
        write_corpus(tmp_path, "\u00e9a" * 45, "\u00e9\u00e9\u00e9a")
    )  # 3 bytes in 2 characters; 7 in 4
    assert (data.bytes_per_token("train"), data.bytes_per_token("val")) == (1.5, 1.75)


def damage_nothing_there(folder):
    (folder / "dataset.json").unlink()


def damage_no_json(folder):
    (folder / "dataset.json").write_text("{")


def damage_no_text(folder):
    (folder / "dataset.json").write_bytes(b"\xff\xfe")


def damage_a_list(folder):
    (folder / "dataset.json").write_text("[1]")


def damage_format(folder):
    about = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps(about | {"format": 0}))


def damage_no_bin(folder):
    (folder / "val.bin").unlink()


def damage_truncated(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-1])


def damage_longer(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes() + b"\0\0")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_nothing_there, "no prepared data"),
        (damage_no_json, "no prepared data"),
        (damage_no_text, "no prepared data"),
        (damage_a_list, "in format None"),
        (damage_format, "in format 0, this version reads 1"),
        (damage_no_bin, r"val\.bin has 0 bytes, dataset\.json says 100"),
        (damage_truncated, r"train\.bin has 899 bytes, dataset\.json says 900"),
        (damage_longer, r"train\.bin has 902 bytes, dataset\.json says 900"),
    ],
)
def test_damaged_folders(tmp_path, damage, words):
    damage(write_corpus(tmp_path, nonsense(500)))
    with pytest.raises(UserError, match=words) as caught:
        Dataset(tmp_path)
    assert "prepare" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_fingerprint(tmp_path):
    text = nonsense(500)
    one = Dataset(write_corpus(tmp_path / "one", text)).fingerprint
    assert Dataset(write_corpus(tmp_path / "elsewhere" / "two", text)).fingerprint == one
    about = json.loads((tmp_path / "one" / "dataset.json").read_text())
    (tmp_path / "one" / "dataset.json").write_text(json.dumps(about | {"sources": [{"name": "x"}]}))
    assert Dataset(tmp_path / "one").fingerprint == one
    others = [
        write_corpus(
            tmp_path / "train", text[1] + text[0] + text[2:450], text[450:]
        ),  # two characters exchanged
        write_corpus(tmp_path / "val", text[:450], text[450:-2] + text[-1] + text[-2]),
        write_corpus(tmp_path / "cut", text[:449], text[449:]),
        write_byte_corpus(tmp_path / "tokenizer", text),
    ]
    assert text[0] != text[1]
    assert text[-1] != text[-2]
    assert len({one, *(Dataset(folder).fingerprint for folder in others)}) == 5


def test_fingerprint_depends_on_the_symbols(tmp_path):
    def symbols_of(folder, text):
        return Dataset(write_corpus(tmp_path / folder, text)).fingerprint

    assert symbols_of("ab", "ab" * 50) != symbols_of(
        "cd", "cd" * 50
    )  # the same ids, other characters


# --- the windows of an evaluation ---


@pytest.mark.parametrize(
    ("n_token", "context_length"), [(2, 8), (9, 8), (10, 8), (17, 8), (24, 8), (100, 7), (5, 1)]
)
def test_a_split_predicts_each_token_but_the_first_once(n_token, context_length):
    windows = split_windows(np.zeros(n_token), context_length)
    predicted = [place for start, end in windows for place in range(start + 1, end + 1)]
    assert predicted == list(range(1, n_token))
    assert all(end - start == context_length for start, end in windows[:-1])
    assert 1 <= windows[-1][1] - windows[-1][0] <= context_length


def test_split_windows_by_hand():
    assert split_windows(np.zeros(11), 4) == [(0, 4), (4, 8), (8, 10)]
