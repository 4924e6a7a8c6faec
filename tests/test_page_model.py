"""The model inside the page, in a browser, against PyTorch on the weights as the page holds them."""

import base64
import dataclasses
import json
import math
import random
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import MODERN
from test_page_browser import CHROMIUM, browser
from test_tokenizer import TRAINING_TEXT, adversarial, gpt2
from test_viz_maps import NASTY

import attention_map
import viz
from benchmarks import page as benchmark
from data import tokenizer as tk
from data.patterns import GPT2
from model.attention import Mask, explicit_attention
from model.config import ModelConfig
from model.generate import next_distribution, next_token
from model.gpt import GPT
from model.sampling import Sampling
from viz.living import BITS, as_held, matrices_and_vectors, pack
from viz.record import record_attention
from viz.roles import ablate_heads

assert browser  # fixtures
assert gpt2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: the model is not tried in a page"
    ),
]
WEB = Path(viz.__file__).parent / "web"
ENGINE = ["weights", "positions", "attention", "gpt", "sampling", "tokenizer"]
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
            window.sameReading = (a, b) => same(a.x_embed, b.x_embed) && same(a.features, b.features) && same(a.losses, b.losses)
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


@pytest.mark.parametrize("name", ["gpt2", "all of it", "window"])
def test_a_reading_holds_what_the_model_computes(page, name):
    model = as_held(opinionated(**SHAPES[name]), 16)
    ids = texts(model)[1]
    found = page.evaluate(
        """([given, ids]) => {
            const model = loaded(given), got = read(model, ids), {n_layer, n_head} = model.config;
            const layers = got.layers.map((rows, layer) => {
                const out = Object.fromEntries(Object.entries(rows).map(([name, x]) => [name, Array.from(x)]));
                const each = (f) => Array.from({length: n_head}, (_, h) => ids.map((_, t) => Array.from(f(model, got, layer, h, t))));
                const lensed = ids.map((_, t) => Array.from(lens(model, got, layer, t)));
                return {...out, weights: each(headWeights), mix: each(headMix), lens: lensed,
                        scores: each(headScores).map((rows) => rows.map((row) => row.map((x) => Number.isFinite(x) ? x : null)))};
            });
            const last = layers[n_layer - 1].lens.flat();
            return {layers, features: Array.from(got.features), x_embed: Array.from(got.x_embed),
                    embedded: ids.map((_, t) => Array.from(lens(model, got, -1, t))), last: same(last, Array.from(got.logits))};
        }""",
        [told(model, 16), ids],
    )
    streams, written = [], []
    for block in model.double().blocks:
        for norm in (block.attention_norm, block.mlp_norm):
            norm.register_forward_pre_hook(lambda _, x: streams.append(x[0][0]))
        for part in (block.attention, block.mlp):
            part.register_forward_hook(lambda _, x, y: written.append(y[0]))
    model.norm.register_forward_pre_hook(lambda _, x: streams.append(x[0][0]))
    with torch.no_grad(), record_attention(model) as record:
        features = model.features(torch.tensor([ids]))[0]

    def close(got, wanted):
        np.testing.assert_allclose(np.reshape(got, wanted.shape), wanted, atol=1e-5)

    close(found["features"], features)
    close(found["x_embed"], streams[0])
    for layer, (got, kept) in enumerate(zip(found["layers"], record, strict=True)):
        group = model.config.n_head // model.config.n_key_head
        close(got["q"], kept.q[0].transpose(0, 1))
        close(got["k"], kept.k[0, ::group].transpose(0, 1))
        close(got["v"], kept.v[0, ::group].transpose(0, 1))
        close(got["weights"], kept.weights()[0])
        close(got["mix"], (kept.weights() @ kept.v)[0])
        scores = kept.scores()[0]
        close(np.array(got["scores"], float), scores.masked_fill(scores.isinf(), torch.nan))
        close(got["written_attention"], written[2 * layer])
        close(got["written_mlp"], written[2 * layer + 1])
        close(got["x_after_attention"], streams[2 * layer + 1])
        close(got["x_after"], streams[2 * layer + 2])
        with torch.no_grad():
            close(got["lens"], model.unembed(model.norm(streams[2 * layer + 2])))
    with torch.no_grad():
        close(found["embedded"], model.unembed(model.norm(streams[0])))
    assert found["last"]


def unscaled(q, k, v, mask, dropout=0.0):
    return explicit_attention(q * math.sqrt(q.shape[-1]), k, v, mask, dropout)


@contextmanager
def changed(model, changes):
    """A model with the page's changes, by PyTorch's means, and the mask to give it."""
    fields = {"positions": "none", "rope_base": 10_000.0} if changes.get("noPositions") else {}
    config = dataclasses.replace(model.config, **fields)
    attend = unscaled if changes.get("unscaled") else explicit_attention
    other = GPT(config, model.vocab_size, attend).double().eval()
    other.load_state_dict(
        {name: x for name, x in model.state_dict().items() if name in other.state_dict()}
    )
    mask = Mask(causal=not changes.get("lookAhead"), window=config.window)
    for layer in changes.get("attentions", []):
        other.blocks[layer].attention.register_forward_hook(lambda _, x, y: torch.zeros_like(y))
    for layer in changes.get("mlps", []):
        other.blocks[layer].mlp.register_forward_hook(lambda _, x, y: torch.zeros_like(y))
    heads = [tuple(map(int, name.split("."))) for name in changes.get("heads", [])]
    with ablate_heads(other, heads):
        yield other, mask


CHANGES = [
    {"heads": ["0.1"]},
    {"heads": ["1.0", "0.0", "1.1"]},
    {"attentions": [1]},
    {"mlps": [0]},
    {"attentions": [0], "mlps": [1], "heads": ["1.1"]},
    {"lookAhead": True},
    {"unscaled": True},
    {"noPositions": True},
    {"noPositions": True, "lookAhead": True, "unscaled": True, "heads": ["1.0"]},
]


@pytest.mark.parametrize("name", ["gpt2", "all of it", "sines"])
def test_what_if_is_a_model_changed_likewise(page, name):
    """Also read on from the unchanged reading, of which the layers below a change are kept."""
    model = as_held(opinionated(**SHAPES[name]), 16).double()
    ids = texts(model)[1]
    found = page.evaluate(
        """([given, ids, changes]) => {
            const model = loaded(given), plain = read(model, ids);
            return changes.map((some) => {
                const all = {...NO_CHANGES, ...some}, got = read(model, ids, all);
                const first = read(model, ids.slice(0, 3), all), typed = read(model, ids, all, first);
                return {logits: Array.from(got.logits), loss: lossOf(got).mean,
                        same: sameReading(got, read(model, ids, all, plain)) && sameReading(got, typed)
                            && sameReading(plain, read(model, ids, NO_CHANGES, got))};
            });
        }""",
        [told(model.float(), 16), ids, CHANGES],
    )
    tokens = torch.tensor([ids])
    for changes, got in zip(CHANGES, found, strict=True):
        with torch.no_grad(), changed(model.double(), changes) as (other, mask):
            wanted = other(tokens, mask)[0]
        np.testing.assert_allclose(np.reshape(got["logits"], wanted.shape), wanted, atol=1e-5)
        loss = torch.nn.functional.cross_entropy(wanted[:-1], tokens[0, 1:]).item()
        assert got["loss"] == pytest.approx(loss, abs=1e-5)
        assert got["same"]


def test_a_head_switched_off_changes_the_loss_as_ablate_says(page):
    """attention_map.py --ablate 0.1 1.0: each alone, then both."""
    model = as_held(opinionated(**SHAPES["modern"]), 16)
    ids = texts(model)[1]
    checkpoint = SimpleNamespace(config={"data": {"data": "nowhere"}})
    results = attention_map.ablate(("0.1", "1.0"), model, checkpoint, ids)
    wanted = [result["loss"]["text"] for result in results]
    found = page.evaluate(
        """([given, ids, each]) => {
            const model = loaded(given);
            return each.map((heads) => lossOf(read(model, ids, {...NO_CHANGES, heads})).mean);
        }""",
        [told(model, 16), ids, [result["ablated"] for result in results]],
    )
    assert len(found) == 4
    assert found == pytest.approx(wanted, abs=1e-5)
    deltas = np.array(found) - found[0]
    np.testing.assert_allclose(deltas, np.array(wanted) - wanted[0], atol=1e-5)
    assert abs(deltas[1:]).min() > 1e-3


def test_the_benchmark_measures_a_page(browser, tmp_path):
    config = ModelConfig(n_layer=1, n_head=2, d_model=16, context_length=32)
    path = tmp_path / "page.html"
    path.write_text(benchmark.fresh_page(config, tk.ByteTokenizer(), 1), encoding="utf-8")
    found = benchmark.measure(browser, path, 1)
    row = benchmark.row("small", found)
    n_parameter = sum(x.numel() for x in GPT(config, 256).parameters())
    assert row["parameters"] == f"{n_parameter:,}"
    assert row["page, MB"] == f"{path.stat().st_size / 1e6:.1f}"
    assert (len(found["tokens"]), row["context"], row["bits"]) == (24, 32, 8)


def test_slices_give_the_same_and_can_be_stopped(page):
    """What was stopped, and what was read on in two ways, leaves an earlier reading as it was."""
    model = opinionated(**SHAPES["long"])
    found = page.evaluate(
        """async ([given, ids]) => {
            const model = loaded(given), whole = read(model, ids), other = [...ids.slice(0, 20), 0, 1, 2];
            const early = ids.slice(0, 20), base = read(model, early, NO_CHANGES, read(model, ids.slice(0, 10)));
            const wish = {milliseconds: 0, stopped: () => false};
            let turns = 0;
            const stopped = await readSliced(model, ids, NO_CHANGES, base, {...wish, stopped: () => ++turns > 40});
            return {stopped, sliced: sameReading(whole, await readSliced(model, ids, NO_CHANGES, base, wish)),
                    other: sameReading(read(model, other), read(model, other, NO_CHANGES, base)),
                    again: sameReading(whole, read(model, ids, NO_CHANGES, base)),
                    base: sameReading(base, read(model, early)), turns};
        }""",
        [told(model, 16), texts(model)[1]],
    )
    same = {"sliced": True, "other": True, "again": True, "base": True}
    assert found == {"stopped": None, "turns": 41, **same}


SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for temperature in (0, 0.01, 0.7, 1, 2.5)
    for top_k in (0, 1, 3, 100)
    for top_p in (1, 0.9, 0.5, 1e-9)
]


def test_the_next_token_is_drawn_as_sample_py_does(page):
    """Distributions within 1e-12, and the same token for the same uniform number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 40, generator=generator) * torch.tensor([[0.5], [4], [300]])
    uniforms = torch.rand(3, generator=generator, dtype=torch.float64)
    found = page.evaluate(
        """([rows, settings, uniforms]) => JSON.stringify(rows.map((row) => settings.map(({temperature, top_k, top_p}) => {
            const {raw, kept, order} = nextDistribution(Float32Array.from(row), {temperature, topK: top_k, topP: top_p});
            return {raw: Array.from(raw), kept: Array.from(kept), order, drawn: uniforms.map((u) => draw(kept, u).id)};
        })))""",
        [logits.tolist(), SETTINGS, uniforms.tolist()],
    )
    for row, each in zip(logits, json.loads(found), strict=True):
        raw = row.double().softmax(-1)
        for setting, got in zip(SETTINGS, each, strict=True):
            np.testing.assert_allclose(got["raw"], raw, atol=1e-12)
            assert got["order"] == row.argsort(descending=True).tolist()
            if setting["temperature"] > 0:
                wanted = next_distribution(row[None], Sampling(**setting))[0]
                np.testing.assert_allclose(got["kept"], wanted, atol=1e-12)
            drawn = []
            for u in uniforms:
                with mock.patch("torch.rand", return_value=u[None]):
                    drawn += next_token(row[None], Sampling(**setting))
            assert got["drawn"] == drawn


def test_uniform_numbers_are_uniform_and_belong_to_seed_and_step(page):
    numbers = page.evaluate(
        "() => [0, 1, 1337].map((seed) => Array.from({length: 2000}, (_, step) => uniform(seed, step)))"
    )
    assert numbers == page.evaluate(
        "() => [0, 1, 1337].map((seed) => Array.from({length: 2000}, (_, step) => uniform(seed, step)))"
    )
    for one in numbers:
        assert len(set(one)) == 2000
        assert min(one) >= 0
        assert max(one) < 1
        counts = np.histogram(one, bins=10, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 27.9  # chi-squared, 9 degrees: p = 0.001
    assert abs(np.corrcoef(numbers)[np.triu_indices(3, 1)]).max() < 0.1
    assert page.evaluate("() => uniform(2 ** 31 + 5, 0) !== uniform(5, 0)")


def test_logits_that_are_no_numbers_are_refused(page):
    with pytest.raises(Exception, match="the model's logits are not finite"):
        page.evaluate("() => nextDistribution(Float32Array.of(0, NaN, 1), {temperature: 1})")


def tokenizer_of(kind, request):
    """A tokenizer for every kind that the page rebuilds, and both patterns of a BPE."""
    with_long_s = [*TRAINING_TEXT, "\u017ftill \u017ftone \u017ftand " * 99]
    makers = {
        "char": lambda: tk.CharTokenizer("".join(sorted({*NASTY, "\u00e9", "\u0301"})), True),
        "byte": tk.ByteTokenizer,
        "bpe gpt2": lambda: tk.train_bpe(with_long_s, 290, "gpt2"),
        "bpe gpt4": lambda: tk.train_bpe(with_long_s, 290, "gpt4"),
        "gpt2": lambda: request.getfixturevalue("gpt2"),
    }
    return makers[kind]()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe gpt2", "bpe gpt4", "gpt2"])
def test_ids_are_pythons_on_hostile_unicode(page, kind, request):
    """White space, cases, numbers, marks and scripts of all sorts; every tenth code point up to
    U+3000 in several surroundings; a long run.
    """
    tokenizer, rng = tokenizer_of(kind, request), random.Random(0)
    told_texts = ["", NASTY, "<|endoftext|>", "\ufeff\u0085\u2028", "IT'S it\u017f I'\u017ftone"]
    told_texts += [adversarial(rng) for _ in range(1000)]
    for place in range(rng.randrange(10), 0x3000, 10):
        one = chr(place)
        told_texts.append(f"a{one}b1{one}{one} {one}\n{one} '{one}")
    told_texts.append("".join(rng.choices("abc", k=3000)))
    page.evaluate("(spec) => { window.tokenizer = makeTokenizer(spec); }", tokenizer.spec())
    found = page.evaluate(  # as JSON, which playwright passes on faster
        "(texts) => JSON.stringify(JSON.parse(texts).map((text) => tokenizer.encode(text)))",
        json.dumps(told_texts),
    )
    for text, got in zip(told_texts, json.loads(found), strict=True):
        known = text
        if kind == "char":
            known = "".join(character for character in text if character in tokenizer.ids)
        assert got["ids"] == tokenizer.encode(known).tolist()
        units = text.encode("utf-16-le")
        for start, end in reversed(got["unknown"]):
            units = units[: 2 * start] + units[2 * end :]
        assert units.decode("utf-16-le") == known
    assert page.evaluate("tokenizer.vocabSize") == tokenizer.vocab_size
    ids = list(range(tokenizer.vocab_size))[-300:]
    pieces = page.evaluate("(ids) => ids.map((id) => Array.from(tokenizer.piece(id)))", ids)
    assert [bytes(piece) for piece in pieces] == [tokenizer.decode_bytes([id]) for id in ids]


def test_a_piece_that_is_a_token_is_one_even_where_no_pairs_lead_to_it(page):
    tokenizer = tk.BPETokenizer("bpe", GPT2, [*tk.ALL_BYTES, b"abc"])
    found = page.evaluate("(spec) => makeTokenizer(spec).encode('abc,abcd').ids", tokenizer.spec())
    assert found == tokenizer.encode("abc,abcd").tolist()
    assert found[0] == 256


@pytest.mark.parametrize("kind", ["char", "byte", "bpe gpt2"])
def test_half_a_surrogate_pair_is_left_out_and_named(page, kind, request):
    tokenizer = tokenizer_of(kind, request)
    found = page.evaluate(
        "(spec) => makeTokenizer(spec).encode('a\\ud83d\\ud83db\\ude00\ud83d\ude00')",
        tokenizer.spec(),
    )
    assert found["ids"] == tokenizer.encode("ab\U0001f600").tolist()
    assert found["unknown"] == [[1, 3], [4, 5]]
