"""Micro-batches drawn ahead are the same micro-batches."""

import threading

import pytest
import torch

from ops.feeding import N_AHEAD, Feeder


def rows(step, index):
    """Inputs and targets of one row, telling of what they are."""
    texts = 1000 * step + 10 * index + torch.arange(4)[None]
    return texts[:, :-1], texts[:, 1:]


@pytest.fixture
def feed():
    """Makes feeders, and ends their threads."""
    made = []

    def make(draw, indices=range(2, 4)):
        made.append(Feeder(draw, indices, "cpu"))
        return made[-1]

    yield make
    for feeder in made:
        feeder.close()


def test_the_same_in_any_order(feed):
    """In that of a run, from a step in the middle, again, and backwards."""
    feeder = feed(rows)
    in_order = [(step, index) for step in (5, 6, 7) for index in (2, 3)]
    for key in [(0, 0), *in_order, in_order[-1], *reversed(in_order), (2, 3)]:
        for found, wanted in zip(feeder(*key), rows(*key), strict=True):
            assert torch.equal(found, wanted)


def test_drawn_once_and_before_it_is_asked_for(feed):
    seen, ready = [], threading.Event()

    def draw(step, index):
        seen.append((step, index))
        if len(seen) == 2 + N_AHEAD:
            ready.set()
        return rows(step, index)

    feeder = feed(draw)
    feeder(0, 2)
    feeder(0, 3)
    assert ready.wait(10)
    assert seen == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_no_more_is_held_than_comes_next(feed):
    """What was drawn for a place that was left is let go."""
    feeder = feed(rows)
    for step in (0, 9, 3, 30):
        feeder(step, 2)
        assert len(feeder.drawn) == N_AHEAD


def test_an_error_is_raised_where_its_batch_is_asked_for(feed):
    def draw(step, index):
        if step == 1:
            raise OSError("the disk is gone")
        return rows(step, index)

    feeder = feed(draw, range(1))
    feeder(0, 0)
    with pytest.raises(OSError, match="the disk is gone"):
        feeder(1, 0)


def test_no_thread_is_left(feed):
    before = set(threading.enumerate())
    feeder = feed(rows)
    feeder(0, 2)
    assert len(set(threading.enumerate()) - before) == 1
    feeder.close()
    assert set(threading.enumerate()) == before
