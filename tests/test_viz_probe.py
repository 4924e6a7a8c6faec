"""viz.probe: snapshots are true to 1/255, whole, bounded, and disturb nothing."""

import numpy as np
import pytest
import torch
from helpers import write_byte_corpus
from test_viz_maps import tiny_model

from data.dataset import Dataset
from data.tokenizer import ByteTokenizer
from viz import probe, roles
from viz.maps import read_text
from viz.probe import Watch, cut_probe, load_probe, probe_length, save_probe
from viz.roles import ROLES, induction_scores, measure_roles

TOKENS = list(b"First: second, third.\nFirst: second, third.\n" * 4)


def test_a_snapshot_holds_the_maps_and_scores(tmp_path):
    model = tiny_model()
    save_probe(tmp_path / "attention", 40, model, TOKENS)
    found = load_probe(tmp_path / "attention", bytes)
    assert (found.steps, found.tokens) == ([40], TOKENS[:128])
    assert found.pieces[:3] == [b"F", b"i", b"r"]
    maps = read_text(model, TOKENS[:128], bytes)
    lower = np.tril_indices(128)
    for layer in range(2):
        np.testing.assert_allclose(
            found.maps[0][layer] / 255, maps.weights(layer)[:, *lower], atol=0.5 / 255 + 1e-6
        )
    measured, marks = measure_roles(maps, induction_scores(model)), list(ROLES).index("punctuation")
    np.testing.assert_allclose(
        np.delete(found.scores[0], marks, -1), np.delete(measured.scores, marks, -1), atol=1e-6
    )
    np.testing.assert_allclose(
        found.scores[0, ..., marks], measured.scores[..., marks], atol=0.03
    )  # from the 8-bit maps
    np.testing.assert_allclose(found.uniform, measured.uniform, atol=1e-6)
    np.testing.assert_allclose(found.entropy[0], measured.entropy, atol=1e-5)


def test_saving_touches_no_random_state_and_leaves_nothing_half_written(tmp_path):
    model = tiny_model(dropout=0.5).train()
    state = torch.get_rng_state()
    attends = [block.attention.attend for block in model.blocks]
    save_probe(tmp_path, 0, model, TOKENS)
    assert torch.equal(state, torch.get_rng_state())
    assert [block.attention.attend for block in model.blocks] == attends
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000.npz"]
    maps = read_text(model.eval(), TOKENS[:128], bytes)
    np.testing.assert_allclose(
        load_probe(tmp_path, bytes).entropy[0, 1], roles.mean_entropy(maps.weights(1)), atol=1e-5
    )


def test_short_contexts_and_many_heads_read_fewer_tokens(tmp_path, monkeypatch):
    save_probe(tmp_path / "short", 0, tiny_model(context_length=16), TOKENS)
    assert len(load_probe(tmp_path / "short", bytes).tokens) == 16
    monkeypatch.setattr(probe, "MAX_SNAPSHOT", 6 * 30 * 31 // 2)
    save_probe(tmp_path / "many", 0, tiny_model(), TOKENS)
    found = load_probe(tmp_path / "many", bytes)
    assert 28 <= len(found.tokens) <= 30
    assert found.maps[0].size <= probe.MAX_SNAPSHOT


def test_the_folder_is_bounded_and_thinned_evenly(tmp_path, monkeypatch):
    model = tiny_model(context_length=16)
    save_probe(tmp_path, 0, model, TOKENS)
    size = (tmp_path / "step-000000000.npz").stat().st_size
    monkeypatch.setattr(probe, "MAX_FOLDER", 6 * size + 40)
    for step in range(100, 3300, 100):
        save_probe(tmp_path, step, model, TOKENS)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * size + 40
    steps = load_probe(tmp_path, bytes).steps
    assert (steps[0], steps[-1], len(steps)) == (0, 3200, 6)
    gaps = np.diff(steps)
    assert gaps.max() <= 4 * gaps[:-1].min()  # the last gap grows anew with each snapshot


def test_cut_goes_back_to_a_step(tmp_path):
    model = tiny_model(context_length=16)
    for step in (0, 5, 10, 15):
        save_probe(tmp_path, step, model, TOKENS)
    cut_probe(tmp_path, 10)
    assert load_probe(tmp_path, bytes).steps == [0, 5, 10]
    cut_probe(tmp_path / "missing", 10)


def test_damaged_and_foreign_snapshots_are_left_out(tmp_path):
    assert load_probe(tmp_path, bytes) is None
    model = tiny_model(context_length=16)
    save_probe(tmp_path, 0, model, TOKENS[1:])  # another text
    for step in (5, 10):
        save_probe(tmp_path, step, model, TOKENS)
    (tmp_path / "step-000000007.npz").write_bytes(
        (tmp_path / "step-000000005.npz").read_bytes()[:300]
    )
    (tmp_path / "step-000000008.npz").write_bytes(b"")
    assert load_probe(tmp_path, bytes).steps == [5, 10]


def test_forming_names_the_first_step_and_head():
    uniform = np.full(len(ROLES), 0.1)
    scores = np.full((3, 2, 2, len(ROLES)), 0.1)
    induction = list(ROLES).index("induction")
    scores[1, 1, 0, induction], scores[2, 1, 0, induction], scores[2, 0, 1, induction] = (
        0.47,
        0.5,
        0.9,
    )
    found = probe.Probe([0, 50, 100], [], [], [], scores, uniform, np.zeros((3, 2, 2))).forming()
    assert found["induction"] == (50, 1, 0)  # 0.47 is 0.41 of the way from 0.1 to 1
    assert found["previous"] is None


def test_window_models_are_measured_within_their_window(tmp_path):
    save_probe(tmp_path, 0, tiny_model(window=4), TOKENS)
    found = load_probe(tmp_path, bytes)
    assert found.uniform[list(ROLES).index("previous")] == pytest.approx(
        np.mean([1 / 2, 1 / 3] + [1 / 4] * 125), abs=1e-6
    )
    target = [b in b":,.\n" for b in TOKENS[:128]]
    shares = [np.mean(target[max(0, t - 3) : t + 1]) for t in range(128)]
    assert found.uniform[list(ROLES).index("punctuation")] == pytest.approx(
        np.mean([x for x in shares if 0 < x < 1]), abs=1e-6
    )


def test_the_text_is_as_long_as_the_context_allows():
    assert probe_length(tiny_model()) == 128
    assert probe_length(tiny_model(), 64) == 64
    assert probe_length(tiny_model(context_length=400)) == 256
    assert probe_length(tiny_model(n_layer=8, n_head=8, context_length=400)) == 181  # 64 heads


@pytest.fixture
def watch(tmp_path):
    """Makes a Watch of `n_token` tokens over one corpus, into one folder."""
    data = write_byte_corpus(tmp_path / "data", "A title.\n" + "Anna: so.\nBeth: no.\n" * 99)
    return lambda n_token: Watch(tmp_path / "a", Dataset(data), ByteTokenizer(), n_token)


def test_a_run_is_watched_early_and_at_evaluations(watch):
    due = [step for step in range(3001) if watch(64).is_due(step, is_evaluated=step == 7)]
    assert due == [0, 7, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert not watch(0).is_due(0, is_evaluated=True)


def test_a_run_that_goes_on_is_watched_on_the_same_text(watch, tmp_path):
    model = tiny_model(context_length=48)
    watch(256).look(0, model)
    found = load_probe(tmp_path / "a", bytes)
    assert len(found.tokens) == 48
    assert b"".join(found.pieces).startswith((b"Anna: so.\nBeth: no.", b"Beth: no.\nAnna: so."))
    # As a version before this one left it: the first tokens of the split.
    save_probe(tmp_path / "a", 10, model, TOKENS[:20])
    (tmp_path / "a" / "step-000000011.npz").write_bytes(b"damaged")
    watch(256).look(20, model)
    found = load_probe(tmp_path / "a", bytes)
    assert (found.steps, found.tokens) == ([10, 20], TOKENS[:20])
