"""Weights and the model they are for: what differs is said in the configuration's fields, and no
size that a file claims is believed.
"""

import dataclasses

import pytest
import torch
from test_checkpoint import build, make_checkpoint

from configs import OptimConfig
from errors import UserError
from model.config import ModelConfig
from ops import fitting
from ops.checkpoint import load_weights, open_run, save
from ops.fitting import check_sizes, restore_moments
from training.optimizer import make_optimizers


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ({"d_model": 32}, {}, "d_model is 32 there and 16 here; train with --d-model 32"),
        ({"n_layer": 3}, {}, "n_layer is 3 there and 1 here; train with --n-layer 3"),
        ({"n_head": 4}, {}, "n_head is 4 there and 2 here; train with --n-head 4"),
        ({"qk_norm": True}, {}, "qk_norm is True there and False here; train with --qk-norm"),
        ({"bias": False}, {}, "bias is False there and True here; train with --no-bias"),
        ({"bigrams": 5}, {}, "bigrams is 5 there and 0 here; train with --bigrams 5"),
        ({}, {"bigrams": 5}, "bigrams is 0 there and 5 here; train with --bigrams 0"),
        ({"mlp": "swiglu"}, {}, "mlp is swiglu there and gelu here; train with --mlp swiglu"),
        ({"norm": "rmsnorm"}, {}, "norm is rmsnorm there and layernorm here; train with --norm"),
        ({}, {"positions": "none"}, "positions is learned there and none here; train with --pos"),
        ({"tie_embeddings": False}, {}, "tie_embeddings is False there and True here"),
        (
            {},
            {"context_length": 64},
            "context_length is 8 there and 64 here; train with --context-length 8",
        ),
        ({"n_kv_head": 1}, {}, "n_kv_head is 1 there and 2 here; train with --n-kv-head 1"),
        ({}, {"d_ff": 9}, "d_ff is 64 there and 9 here; train with --d-ff 64"),
        ({"vocab_size": 300}, {}, "vocab_size is 300 there and 256 here"),
        (
            {"d_model": 32, "n_layer": 2},
            {},
            "n_layer is 2 there and 1 here, d_model is 32 there and 16 here; "
            "train with --n-layer 2 --d-model 32",
        ),
    ],
)
def test_the_fields_that_differ_are_named(source, target, words):
    _, checkpoint = make_checkpoint(**source)
    model = build(**target)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(model, checkpoint, "runs/a/best.pt")
    message = str(caught.value)
    assert message.startswith(f"the weights in runs/a/best.pt don't fit this model: {words}")
    assert len(message.splitlines()) == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_options_named_make_the_model_fit():
    _, checkpoint = make_checkpoint(d_model=32, bias=False, mlp="swiglu", positions="rotary")
    options = {"d_model": 32, "bias": False, "mlp": "swiglu", "positions": "rotary"}
    assert load_weights(build(**options), checkpoint, "x") == []


@pytest.mark.parametrize("context_length", [1, 3, 7])
def test_a_shorter_context_takes_the_first_positions(context_length):
    trained, checkpoint = make_checkpoint()
    model = build(context_length=context_length)
    (note,) = load_weights(model, checkpoint, "x")
    assert f"of 8 learned positions the first {context_length} are taken" in note
    tokens = torch.arange(context_length)[None]
    assert torch.equal(model.eval()(tokens), trained.eval()(tokens))  # dropout is zero
    assert len(checkpoint.model["positions.table.weight"]) == 8  # the source is as it was


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal", "none"])
@pytest.mark.parametrize("context_length", [4, 64])
def test_other_positions_fit_any_context(positions, context_length):
    _, checkpoint = make_checkpoint(positions=positions)
    model = build(positions=positions, context_length=context_length)
    assert load_weights(model, checkpoint, "x") == []


def test_weights_that_fit_and_mean_something_else_are_noted():
    _, checkpoint = make_checkpoint(positions="rotary", rope_base=5e5, norm_eps=1e-6, window=4)
    model = build(positions="none", mlp="relu2")
    (note,) = load_weights(model, checkpoint, "runs/a")
    assert "positions is rotary there and none here" in note
    assert "rope_base is 500000.0 there and 10000.0 here, norm_eps is 1e-06 there" in note
    assert "mlp is gelu there and relu2 here, window is 4 there and 0 here" in note


def test_tied_weights_fit_a_model_of_two_matrices():
    _, checkpoint = make_checkpoint()
    model = build(tie_embeddings=False)
    assert load_weights(model, checkpoint, "x") == []
    assert torch.equal(model.unembed.weight, model.embed.weight)
    assert model.unembed.weight is not model.embed.weight


# --- sizes that a file claims ---


@pytest.mark.parametrize("name", ["d_model", "n_layer", "context_length", "bigrams"])
@pytest.mark.parametrize("size", [10**9, 10**18, 10**30])
def test_absurd_sizes_are_refused_before_anything_is_built(tmp_path, name, size, monkeypatch):
    _, checkpoint = make_checkpoint()
    checkpoint.config["model"][name] = size
    save(checkpoint, tmp_path / "c.pt")
    monkeypatch.setattr(fitting, "GPT", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(UserError, match="doesn't fit together") as caught:
        open_run(tmp_path / "c.pt")
    assert len(str(caught.value).splitlines()) == 1
    assert f"{size:,}" in str(caught.value) or name == "bigrams"


def test_many_tiny_blocks_are_no_deep_model():
    """Their number is believed, their size is not: no model of this depth is built."""
    config = ModelConfig(n_layer=10_000, n_head=1, d_model=2, context_length=4)
    weights = {f"blocks.{i}.norm": torch.zeros(1) for i in range(10_000)}
    weights |= {"embed.weight": torch.zeros(9, 2), "positions.table.weight": torch.zeros(4, 2)}
    with pytest.raises(ValueError, match=r"blocks\.0\.attention_norm\.weight is missing"):
        check_sizes(config, 9, weights)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("blocks.0.mlp.up.weight", torch.zeros(64, 15), "is 64 x 15 there, 64 x 16 by the"),
        ("blocks.0.mlp.up.weight", torch.tensor(1.0), "is a number there, 64 x 16 by the"),
        ("head.weight", torch.zeros(3), "there is no place for 'head.weight'"),
    ],
)
def test_one_tensor_that_does_not_fit(name, tensor, words):
    model, checkpoint = make_checkpoint()
    with pytest.raises(UserError, match=words):
        load_weights(
            model, dataclasses.replace(checkpoint, model=checkpoint.model | {name: tensor}), "x"
        )


# --- moments ---


@pytest.mark.parametrize(
    "moments",
    [
        [],
        [{}],
        [1],
        [{"state": {}, "param_groups": []}],
        make_checkpoint(d_model=32)[1].optimizer,
        make_checkpoint("muon")[1].optimizer,
    ],
)
def test_moments_of_another_run(moments):
    model, checkpoint = make_checkpoint()
    optimizers = make_optimizers(model, OptimConfig())
    with pytest.raises(UserError, match="the optimizer's moments in runs/a don't fit this run"):
        restore_moments(optimizers, moments, "runs/a")
    restore_moments(optimizers, checkpoint.optimizer, "runs/a")
