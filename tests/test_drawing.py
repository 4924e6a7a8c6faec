"""Groups that fit in memory, what happens where they don't, and logits that are no numbers."""

import contextlib

import pytest
import torch
from test_viz_maps import tiny_model

from errors import MachineError, UserError
from model.cache import KVCache
from model.config import ModelConfig
from ops.drawing import MOST, drawing_advice, explained, in_groups, row_bytes, rows_at_once
from ops.plan import limits

OUT = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")


@pytest.mark.parametrize(("n_prompt", "n_new"), [(1, 40), (10, 7), (30, 500), (100, 0)])
def test_a_row_takes_at_least_its_cache(n_prompt, n_new):
    """Twice the cache that generating makes for it: a part is read anew beside the whole."""
    model = tiny_model(context_length=48)
    capacity = min(48, n_prompt + n_new)
    cache = KVCache(1, capacity)
    n_read = min(n_prompt, capacity)
    model.features(torch.zeros(1, n_read, dtype=torch.int64), cache=cache)
    held = sum(2 * keys.numel() * keys.element_size() for keys, _ in cache.layers)
    found = row_bytes(model.config, 256, n_prompt, n_new, "cpu", "float32")
    assert 2 * held < found < 2 * held + 80 * 256 + 4 * n_read * 16 * 4 * model.config.d_model
    half = row_bytes(model.config, 256, 1, n_new, "cpu", "float32")
    assert row_bytes(model.config, 256, 1, n_new, "cpu", "bfloat16") < half


def test_gpt2_s_row():
    """By hand: 2 x 12 layers x 1,024 tokens x 768 numbers of 4 bytes are 75.5 MB of cache."""
    found = row_bytes(ModelConfig(bias=False), 50257, 1, 2000, "cpu", "float32")
    assert 2 * 75.49e6 + 80 * 50257 < found < 2 * 75.5e6 + 80 * 50257 + 1e5


def at_once(monkeypatch, n_text, free, ids=((1, 2, 3),), precision="float32"):
    model = tiny_model(context_length=48)
    monkeypatch.setattr(limits, "free_memory", lambda device: free)
    return rows_at_once(n_text, model, ids, 20, "cpu", precision)


def test_as_many_as_fit(monkeypatch, capsys):
    config = tiny_model(context_length=48).config
    each = row_bytes(config, 256, 3, 20, "cpu", "float32")
    assert at_once(monkeypatch, 10, 100 * each) == 10
    assert capsys.readouterr().err == ""
    assert at_once(monkeypatch, 10, 7 * each) == 3  # half of what is free
    said = capsys.readouterr().err
    assert said.startswith("note: 10 texts are drawn 3 at a time: each takes about 0.")
    assert said.count("\n") == 1
    for none in (0, each):
        assert at_once(monkeypatch, 10, none) == 1
        assert "10 texts are drawn 1 at a time" in capsys.readouterr().err
    assert at_once(monkeypatch, 1, 0) == 1
    assert capsys.readouterr().err == ""


def test_the_longest_prompt_counts(monkeypatch):
    free = 4 * row_bytes(tiny_model(context_length=48).config, 256, 3, 20, "cpu", "float32")
    assert at_once(monkeypatch, 10, free, ids=[[1], [2] * 40]) < at_once(monkeypatch, 10, free)


def test_no_more_than_most(monkeypatch, capsys):
    for free in (None, 1 << 50):
        assert at_once(monkeypatch, 1000, free) == MOST["cpu"]
        assert "1,000 texts are drawn 64 at a time: to show them" in capsys.readouterr().err


def test_rounding_is_said(monkeypatch, capsys):
    at_once(monkeypatch, 2, None, precision="bfloat16")
    assert "note: bfloat16 rounds by the number of texts" in capsys.readouterr().err
    at_once(monkeypatch, 1, None, precision="bfloat16")
    at_once(monkeypatch, 2, None)
    assert capsys.readouterr().err == ""


def test_free_memory(monkeypatch):
    """What may be held, less what is held."""
    monkeypatch.setattr(limits, "memory_limit", lambda device: 1 << 40)
    assert 0 < (1 << 40) - limits.free_memory("cpu") < 1 << 36
    monkeypatch.setattr(limits, "memory_limit", lambda device: 1)
    assert limits.free_memory("cpu") == 0
    monkeypatch.setattr(limits, "memory_limit", lambda device: 0)
    assert limits.free_memory("cpu") is None


def drawn(n_text, n_row, too_many):
    """The groups that are drawn where `too_many` texts at once are more than memory holds."""
    groups = []

    def draw(group):
        groups.append((group.start, group.stop))
        if len(group) >= too_many:
            raise OUT

    with contextlib.suppress(MachineError):
        in_groups(draw, n_text, n_row, "cpu", "float32")
    return groups


def test_groups():
    assert drawn(5, 2, 9) == [(0, 2), (2, 4), (4, 5)]
    assert drawn(4, 4, 9) == [(0, 4)]
    assert drawn(1, 64, 9) == [(0, 1)]


def test_smaller_groups_where_memory_runs_out(capsys):
    assert drawn(5, 4, 3) == [(0, 4), (0, 2), (2, 4), (4, 5)]
    assert capsys.readouterr().err == "note: out of memory: going on with 2 texts at a time\n"
    assert drawn(3, 3, 1) == [(0, 3), (0, 2), (0, 1)]  # not even one
    said = capsys.readouterr().err
    assert said.count("going on with") == 2


def test_other_errors_are_raised():
    def draw(group):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        in_groups(draw, 4, 4, "cpu", "float32")


def test_advice_names_nothing_that_was_done():
    here = drawing_advice("cpu", "bfloat16")
    assert here.endswith("one text at a time: shorten the prompt or --max-new-tokens")
    assert drawing_advice("cpu", "float32").endswith("take --precision bfloat16, half of it")
    assert drawing_advice("cuda:1", "bfloat16").endswith("draw with --device cpu")


@pytest.mark.parametrize(
    "error", [OUT, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_out_of_memory_gives_advice(error):
    with (
        pytest.raises(MachineError, match=r"^out of memory, reading r: close other"),
        explained("r"),
    ):
        raise error
    with (
        pytest.raises(MachineError, match=r"^out of memory, reading r: buy some"),
        explained("r", "buy some"),
    ):
        raise error


def test_logits_that_are_no_numbers_give_advice():
    error = FloatingPointError("the model's logits are not finite")
    with pytest.raises(UserError, match=r"^r: the model's logits are not finite"), explained("r"):
        raise error
    with pytest.raises(RuntimeError, match="other"), explained("r"):
        raise RuntimeError("other")
