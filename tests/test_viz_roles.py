"""viz.roles: every score on hand-made maps whose answer is known."""

import numpy as np
import pytest
import torch
from test_viz_maps import tiny_maps, tiny_model
from torch import nn

from model.attention import CausalSelfAttention, Mask
from model.config import ModelConfig
from model.fast_attention import fast_attention
from viz import roles
from viz.roles import (
    ROLES,
    ablate_heads,
    induction_scores,
    measure_roles,
    name_roles,
    role_targets,
    target_weight,
)

TEXT = b"ab, ab,\nb"
ALLOWED = np.tri(len(TEXT), dtype=bool)
UNIFORM = ALLOWED / ALLOWED.sum(-1, keepdims=True)


def targets(text=TEXT):
    return role_targets(list(text), [bytes([b]) for b in text])


def test_the_roles_are_those_measured():
    assert set(targets()) == set(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_a_perfect_head_scores_1_and_a_uniform_head_the_baseline(role):
    target = targets()[role] & ALLOWED
    perfect = np.where(
        target.any(-1, keepdims=True),
        target / np.maximum(target.sum(-1, keepdims=True), 1),
        UNIFORM,
    )
    away = (ALLOWED & ~target) / np.maximum((ALLOWED & ~target).sum(-1, keepdims=True), 1)
    scores, uniform = target_weight(np.stack([perfect, UNIFORM, away]), targets()[role], ALLOWED)
    np.testing.assert_allclose(scores, [1, uniform, 0], atol=1e-12)
    assert 0 < uniform < 1


def test_targets_of_the_literal_text():
    """a b , ␣ a b , ↵ b: positions 0 to 8."""
    found = {
        role: [(t, s) for t, s in np.argwhere(target & ALLOWED).tolist()]
        for role, target in targets().items()
    }
    assert found["previous"] == [(t, t - 1) for t in range(1, 9)]
    assert found["first"] == [(t, 0) for t in range(9)]
    assert found["self"] == [(t, t) for t in range(9)]
    assert found["same"] == [(4, 0), (5, 1), (6, 2), (8, 1), (8, 5)]
    assert found["induction"] == [(4, 1), (5, 2), (6, 3), (8, 2), (8, 6)]
    assert [s for t, s in found["punctuation"] if t == 8] == [2, 6, 7]
    assert [s for t, s in found["local"] if t == 8] == list(range(1, 9))


def test_uniform_baselines_by_hand():
    """Row t allows t + 1 keys, of which one is the target; row 0, with nothing else to look at,
    doesn't count.
    """
    weights = np.stack([UNIFORM])
    by_hand = sum(1 / (t + 1) for t in range(1, 9)) / 8
    for role in ("previous", "first", "self"):
        assert target_weight(weights, targets()[role], ALLOWED)[1] == pytest.approx(by_hand)
    assert target_weight(weights, targets()["local"], ALLOWED)[1] == pytest.approx(
        8 / 9
    )  # the last row alone reaches farther


def test_a_role_without_targets_is_unknown():
    scores, uniform = target_weight(np.eye(3)[None], np.zeros((3, 3), bool), np.tri(3, dtype=bool))
    assert np.isnan(scores).all()
    assert np.isnan(uniform)


def test_punctuation_counts_marks_and_newlines_but_no_half_characters():
    pieces = [b"a", b".", b"\n", b" ", b"?!", b" ,", b"\xe2\x80", b"x.", "—".encode(), b"$"]
    target = role_targets(range(len(pieces)), pieces)["punctuation"][0]
    assert target.tolist() == [False, True, True, False, True, True, False, False, True, True]


def test_entropy_and_profile():
    even = np.array([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [1 / 3] * 3 + [0], [0.25] * 4])
    sharp = np.eye(4)
    assert roles.mean_entropy(np.stack([even, sharp])) == pytest.approx(
        [(0 + 1 + np.log2(3) + 2) / 4, 0]
    )
    profile = roles.distance_profile(np.stack([even, sharp]))
    by_hand = [
        (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4,
        (1 / 2 + 1 / 3 + 1 / 4) / 3,
        (1 / 3 + 1 / 4) / 2,
        1 / 4,
    ]
    np.testing.assert_allclose(profile[0], by_hand)
    np.testing.assert_allclose(profile[1], [1, 0, 0, 0])


def test_names_prefer_the_narrow_role_and_need_the_threshold():
    uniform = np.array([0.1] * 6 + [0.2])
    table = {  # share of the way to perfect, by role
        "previous": [0.5, 0, 0, 0, 0, 0, 0.9],
        "induction": [0.1, 0, 0, 0.2, 0.41, 0, 0],
        "local": [0.39, 0, 0.39, 0, 0, 0, 0.9],
        "mixed": [0.39, 0.39, 0, 0, 0, 0, 0.39],
    }
    scores = np.array(list(table.values())) * (1 - uniform) + uniform
    assert name_roles(scores, uniform).tolist() == list(table)
    scores[:, 0] = np.nan
    assert name_roles(scores, uniform).tolist() == ["local", "induction", "local", "mixed"]


class InductionModel(nn.Module):
    """One layer of two heads: head 0 looks from a token at what followed it before, head 1 at
    itself.
    """

    def __init__(self, vocab_size, context_length):
        super().__init__()
        self.config = ModelConfig(
            n_layer=1, n_head=2, d_model=2, context_length=context_length, window=0
        )
        self.vocab_size, self.embed = vocab_size, nn.Embedding(vocab_size, 2)
        self.layer = CausalSelfAttention(self.config, fast_attention)

    def forward(self, tokens):
        now = nn.functional.one_hot(tokens, self.vocab_size).float() * 200
        before = now.roll(1, dims=1)
        before[:, 0] = 0
        place = torch.eye(tokens.shape[1], self.vocab_size).expand_as(now) * 200
        q, k = torch.stack([now, place], 1), torch.stack([before, place], 1)
        return self.layer.attend(q, k, k, Mask(), 0.0)


def test_induction_on_a_head_built_for_it():
    scores, uniform = induction_scores(InductionModel(100, 64))
    np.testing.assert_allclose(scores, [[1, 0]], atol=1e-6)
    assert uniform == pytest.approx(np.mean([1 / (t + 1) for t in range(32, 64)]))


def test_induction_leaves_random_state_alone_and_runs_on_tiny_models():
    model = tiny_model(context_length=4)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    scores, _ = induction_scores(model)
    after = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert scores.shape == (2, 3)
    assert np.isfinite(scores).all()
    assert np.isnan(
        induction_scores(tiny_model(context_length=1))[0]
    ).all()  # nothing can be said twice
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])


def test_measured_on_a_text():
    maps = tiny_maps("to be, or not to be\n" * 3)
    measured = measure_roles(maps, (np.full((2, 3), 0.25), 0.02))
    order = list(ROLES)
    for layer in range(2):
        weights = maps.weights(layer)
        assert measured.scores[layer, :, order.index("previous")] == pytest.approx(
            np.diagonal(weights, -1, 1, 2).mean(-1)
        )
        assert measured.scores[layer, :, order.index("first")] == pytest.approx(
            weights[:, 1:, 0].mean(-1)
        )
    assert (measured.scores[..., order.index("induction")] == 0.25).all()
    assert measured.entropy.shape == (2, 3)
    part = measure_roles(maps.select([1], [2]), (np.arange(6).reshape(2, 3), 0.02))
    assert part.scores[0, 0, order.index("induction")] == 5
    report = roles.report(part, [1], [2])
    assert [(head["layer"], head["head"]) for head in report["heads"]] == [(1, 2)]
    assert report["heads"][0]["scores"]["previous"] == pytest.approx(
        measured.scores[1, 2, 0], abs=1e-6
    )


def test_ablating_is_zeroing_the_columns_that_read_the_head():
    model, tokens = tiny_model(), torch.randint(256, (2, 9))
    before = model(tokens)
    with ablate_heads(model, [(1, 0), (1, 2), (0, 1)]):
        ablated = model(tokens)
    assert torch.equal(model(tokens), before)
    for layer, heads in ((1, (0, 2)), (0, (1,))):
        for head in heads:
            model.blocks[layer].attention.project.weight.data[:, 8 * head : 8 * head + 8] = 0
    torch.testing.assert_close(ablated, model(tokens))
    assert not torch.allclose(ablated, before)


def test_ablating_a_head_that_is_not_there():
    expected = pytest.raises(
        ValueError,
        match=r"there is no head 2\.0; layers and heads are counted from 0, the last is 1\.2",
    )
    with expected, ablate_heads(tiny_model(), [(2, 0)]):
        pass
