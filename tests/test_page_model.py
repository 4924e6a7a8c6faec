"""The model inside the page, in a browser, against PyTorch on the weights as the page holds them."""

import base64
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MODERN
from test_page_browser import CHROMIUM, browser

import viz
from model.config import ModelConfig
from model.gpt import GPT
from viz.living import BITS, as_held, matrices_and_vectors, pack

assert browser  # a fixture
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: no page can be tried")
WEB = Path(viz.__file__).parent / "web"
ENGINE = ["weights", "positions", "attention", "gpt", "sampling"]
V = 11
SHAPES = {
    "gpt2": {},
    "modern": MODERN | {"mlp": "relu2"},
    "llama": MODERN | {"n_head": 4, "n_kv_head": 2, "rope_base": 500.0, "norm_eps": 1e-2},
    "sines": {"positions": "sinusoidal", "mlp": "gelu_exact", "bias": False},
    "none": {"positions": "none", "norm": "rmsnorm", "mlp": "swiglu", "n_layer": 3},
    "window": {"window": 3, "n_head": 6, "d_model": 24, "n_kv_head": 3},
    "wide window": {"window": 12, "positions": "rotary", "tie_embeddings": False},
    "bigrams": {"bigrams": 13, "positions": "none", "mlp": "relu2"},
    "narrow": {"d_ff": 5, "positions": "sinusoidal", "mlp": "swiglu", "norm_eps": 1e-3},
    "odd": {"n_head": 1, "d_model": 7, "n_layer": 1, "context_length": 7},
    "all of it": MODERN | {"bias": True, "window": 5, "bigrams": 50, "n_kv_head": 1, "n_layer": 3},
    "long": {"context_length": 40, "d_model": 36, "qk_norm": True, "mlp": "gelu_exact"},
}


def opinionated(seed=0, vocab_size=V, **options):
    """A small model none of whose weights is 0, 1 or without effect."""
    torch.manual_seed(seed)
    shape = {"n_layer": 2, "n_head": 2, "d_model": 16, "context_length": 8} | options
    model = GPT(ModelConfig(**shape), vocab_size).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.3 if weight.ndim == 2 else 0.1)
            if name.endswith("norm.weight"):
                weight.add_(1)
    return model


def told(model, bits):
    """What `makeModel` and `readWeights` take."""
    tensors, block = pack(matrices_and_vectors(model), bits)
    config = dataclasses.asdict(model.config)
    return {
        "told": {"config": config, "vocabSize": model.vocab_size, "tensors": tensors},
        "block": base64.b64encode(block).decode(),
    }


@pytest.fixture(scope="module")
def page(browser):
    """A blank page with the engine's files in it."""
    page = browser.new_page()
    page.set_default_timeout(15_000)
    for name in ENGINE:
        page.add_script_tag(path=WEB / f"{name}.js")
    page.evaluate(
        """() => {
            window.loaded = ({told, block}) => makeModel(told, readWeights(told.tensors, fromBase64(block)));
            window.same = (a, b) => a.length === b.length && a.every((x, i) => Object.is(x, b[i]));
            window.sameReading = (a, b) => same(a.x_embed, b.x_embed) && same(a.features, b.features)
                && same(a.logits, b.logits) && a.layers.every((rows, layer) =>
                    Object.keys(rows).every((name) => same(rows[name], b.layers[layer][name])));
        }"""
    )
    yield page
    page.close()


def texts(model, n=5, seed=1):
    """Token ids of several lengths, some longer than the context."""
    context = model.config.context_length
    draw = np.random.default_rng(seed)
    return [
        draw.integers(model.vocab_size, size=size).tolist()
        for size in [1, context, context - 1, context + 1, 3 * context][:n]
    ]


def within(ids, context):
    """What `generate` has the model read of a row."""
    return ids if len(ids) <= context else ids[-(context // 2) :]


@torch.no_grad()
def reference(model, ids, mask=None):
    """logits (T, V) in float64."""
    return model.double()(torch.tensor([ids]), mask)[0].numpy()


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_pytorchs(page, name):
    """Of 60 texts over 12 architectures; and typed, the same bit for bit as pasted."""
    model = opinionated(**SHAPES[name])
    bits = BITS[list(SHAPES).index(name) % len(BITS)]
    told_ids = texts(model)
    found = page.evaluate(
        """([given, texts]) => {
            const model = loaded(given), limit = model.config.context_length;
            return texts.map((all) => {
                const ids = withinContext(all, limit), whole = read(model, ids);
                let typed = null;
                for (let n = 0; n <= ids.length; n++) typed = read(model, ids.slice(0, n), NO_CHANGES, typed);
                const edited = read(model, ids.map((id, t) => t < ids.length / 2 ? id : 0), NO_CHANGES, typed);
                const back = read(model, ids, NO_CHANGES, edited);
                return {logits: Array.from(whole.logits), loss: lossOf(whole).mean, ids: whole.ids,
                        same: sameReading(whole, typed) && sameReading(whole, back)};
            });
        }""",
        [told(model, bits), told_ids],
    )
    held = as_held(model, bits)
    for ids, got in zip(told_ids, found, strict=True):
        ids = within(ids, model.config.context_length)
        assert got["ids"] == ids
        assert got["same"]
        wanted = reference(held, ids)
        np.testing.assert_allclose(np.reshape(got["logits"], wanted.shape), wanted, atol=1e-5)
        if len(ids) > 1:
            loss = torch.nn.functional.cross_entropy(
                torch.from_numpy(wanted[:-1]), torch.tensor(ids[1:])
            )
            assert got["loss"] == pytest.approx(loss.item(), abs=1e-5)
