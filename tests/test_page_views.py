"""What if, Lens and Flow, in a browser: the numbers shown are PyTorch's, on the weights as the page
holds them; by pointer and by keyboard.
"""

import ast
import re
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from helpers import ROOT
from test_page_browser import CHROMIUM, browser, number, open_page, shown_as
from test_page_model import SHAPES, changed, opinionated
from test_viz_maps import NASTY

from data.tokenizer import ByteTokenizer
from viz.living import as_held, put_into_page
from viz.maps import read_text
from viz.page import render_page
from viz.record import record_attention
from viz.roles import ablate_heads

assert browser  # a fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: no page can be tried"),
]
IDS = list(("the cat, the cat\n" + NASTY).encode())
NARROW = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}


def living_page(folder, name):
    """A page that carries a small model over bytes, and that model as the page holds it."""
    shape = SHAPES[name] | {"context_length": 128}
    model = opinionated(vocab_size=256, **shape)
    tokenizer = ByteTokenizer()
    living = put_into_page(model, tokenizer, IDS, 15_000_000)
    maps = read_text(model, IDS, tokenizer.decode_bytes)
    path = folder / "page.html"
    text = render_page(maps, title=NASTY, living=living)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path, as_held(model, living.told["bits"]).double()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return living_page(tmp_path_factory.mktemp("llama"), "llama")


@contextmanager
def opened(browser, path, view, **options):
    with open_page(browser, path, "html[data-reading=no]", **options) as page:
        page.click(f"#tab-{view}")
        yield page


def wait_for_change(page, words):
    page.wait_for_function(
        "(words) => document.getElementById('changed').innerText.includes(words)", arg=words
    )


def drawn(page):
    page.wait_for_selector("html[data-drawn=yes]", state="attached")


@torch.no_grad()
def loss_of(model, mask=None):
    """Losses (T - 1,) of the page's text."""
    tokens = torch.tensor([IDS])
    logits = model(tokens, mask)[0]
    return torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")


# ---------- lens ----------


@torch.no_grad()
def streams(model):
    """The stream (layers + 1, T, D), from before the first block to after the last."""
    kept = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0][0]))
    hooks = [hook]
    hooks += [
        block.register_forward_hook(lambda *call: kept.append(call[-1][0]))
        for block in model.blocks
    ]
    model(torch.tensor([IDS]))
    for hook in hooks:
        hook.remove()
    return torch.stack(kept)


def test_lens_is_pytorchs(browser, llama):
    path, model = llama
    stream = streams(model)
    with torch.no_grad():
        chances = model.unembed(model.norm(stream)).softmax(-1).numpy()
    came = np.array(IDS[1:])
    of_next = np.take_along_axis(chances[:, :-1], came[None, :, None], axis=2)[..., 0]
    ranks = 1 + (chances[:, :-1] > of_next[..., None]).sum(-1)
    with opened(browser, path, "lens") as page:
        drawn(page)
        held = page.evaluate(
            "() => Object.fromEntries(['ranks', 'probabilities', 'likeliest', 'highest'].map("
            "(name) => [name, Array.from(lensTable(shown.reading)[name])]))"
        )
        table = {name: np.reshape(values, (3, len(IDS))) for name, values in held.items()}
        np.testing.assert_allclose(table["probabilities"][:, :-1], of_next, atol=1e-6)
        np.testing.assert_allclose(table["highest"], chances.max(-1), atol=1e-6)
        assert np.array_equal(table["ranks"][:, :-1], ranks)
        assert np.array_equal(table["likeliest"], chances.argmax(-1))
        page.select_option("#lens-cells", "rank")
        drawn(page)
        cells = page.locator("#lens-table tbody td").all_inner_texts()
        shown = np.reshape(cells, (3, len(IDS)))
        assert shown[:, :-1].tolist() == ranks.astype(str).tolist()
        assert set(shown[:, -1]) == {""}
        assert page.locator("#lens-table td.right").count() == (ranks == 1).sum()
        page.locator('#lens-table td[data-layer="0"][data-t="5"]').click()
        likeliest = chances[1, 5].argsort()[::-1][:8]
        listed = page.locator("#lens-guesses [data-id]")
        for token, text in zip(likeliest, listed.all_inner_texts(), strict=False):
            assert shown_as(text, 100 * chances[1, 5, token])
        grown = page.locator(".growth > span:nth-child(3n + 2)").all_inner_texts()
        for layer, text in enumerate(grown):
            assert shown_as(text, 100 * of_next[layer, 5])
            assert text.endswith(f"rank {ranks[layer, 5]}")
        lengths = stream.norm(dim=-1).numpy()
        rows = page.locator(".lengths tbody tr").all_inner_texts()
        assert [number(row.split()[-1]) for row in rows] == pytest.approx(lengths[:, 5], abs=0.006)
        page.select_option("#lens-whose", "text")
        rows = page.locator(".lengths tbody tr").all_inner_texts()
        means = lengths.mean(1)
        assert [number(row.split()[-1]) for row in rows] == pytest.approx(means, abs=0.006)


# ---------- what if ----------


def test_what_if_is_pytorchs(browser, llama):
    path, model = llama
    whole = loss_of(model)
    with ablate_heads(model, [(0, 1)]):
        without = loss_of(model)
    attention = [(1, head) for head in range(4)]
    with opened(browser, path, "what_if") as page:
        drawn(page)
        assert shown_as(page.inner_text(".lost-loss"), whole.mean().item())
        assert page.locator("#changed").is_hidden()
        page.click('[data-part="heads 0.1"]')
        wait_for_change(page, "head L0 H1 off")
        difference = (without.mean() - whole.mean()).item()
        assert shown_as(page.inner_text("#lost-difference"), difference)
        drawn(page)
        assert page.inner_text('[data-part="heads 0.1"] .told') == "off"
        most = int((without - whole).abs().argmax())
        first = page.locator(".most-changed button").first
        assert first.get_attribute("data-t") == str(most + 1)
        first.click()
        came = page.locator(f'.compared [data-id="{IDS[most + 1]}"]').inner_text().split("→")
        for text, loss in zip(came, (whole[most], without[most]), strict=True):
            assert shown_as(text, 100 * loss.neg().exp().item())
        page.click("#measure")
        page.wait_for_function(
            "() => document.getElementById('measured').innerText.startsWith('Under each')"
        )
        with ablate_heads(model, attention):
            alone = (loss_of(model).mean() - whole.mean()).item()
        assert shown_as(page.inner_text('[data-part="attentions 1"] .told'), alone)
        page.click('[data-part="attentions 1"]')
        wait_for_change(page, "attention of layer 1 off")
        with ablate_heads(model, [(0, 1), *attention]):
            both = (loss_of(model).mean() - whole.mean()).item()
        assert shown_as(page.inner_text("#lost-difference"), both)
        page.click('[data-part="heads 0.1"]')
        page.wait_for_selector('[data-part="heads 0.1"][aria-checked="true"]')
        assert shown_as(page.inner_text("#lost-difference"), alone)
        for view in ("flow", "overview", "lens", "text"):
            page.click(f"#tab-{view}")
            assert page.locator("#changed").is_visible()
        page.click("#undo")
        page.wait_for_selector("#changed", state="hidden")
        page.click("#tab-what_if")
        assert shown_as(page.inner_text(".lost-loss"), whole.mean().item())


def test_rules_are_pytorchs(browser, llama):
    path, model = llama
    whole = loss_of(model)
    with opened(browser, path, "what_if") as page:
        for rule in ("lookAhead", "unscaled", "noPositions"):
            with changed(model, {rule: True}) as (other, mask):
                difference = (loss_of(other, mask).mean() - whole.mean()).item()
            page.check(f"#rule-{rule}")
            page.wait_for_selector("#lost-difference")
            assert shown_as(page.inner_text("#lost-difference"), difference, slack=2e-5)
            page.click("#lost-undo")
            page.wait_for_selector("#changed", state="hidden")
            assert not page.is_checked(f"#rule-{rule}")


# ---------- flow ----------


@torch.no_grad()
def recorded(model, layer):
    """What the modules of a block put out, and as "into NAME" what they take in, by the modules'
    names, for the page's text; and what its attention is given.
    """
    kept = {}

    def keep(name):
        def hook(_, inputs, output):
            kept[name] = output[0]
            kept[f"into {name}"] = inputs[0][0]

        return hook

    block = model.blocks[layer]
    hooks = [module.register_forward_hook(keep(name)) for name, module in block.named_modules()]
    with record_attention(model) as record:
        model(torch.tensor([IDS]))
    for hook in hooks:
        hook.remove()
    return kept, record[layer]


def on_the_way(config, kept, name, t, head, final):
    """A query or key of one head from its projection on: (name, vector) of each stage."""
    letter, first = name[0], head * config.d_head
    stages = [("projected", kept[f"attention.{name}"][t, first : first + config.d_head])]
    if config.qk_norm:
        stages.append(("normed", kept[f"attention.{name}_norm"][head, t]))
    if config.positions == "rotary":
        stages.append(("turned", final))
    named = [(f"{letter} {stage}", vector) for stage, vector in stages[:-1]]
    return [*named, (letter, stages[-1][1])]


def steps_of(model, t, layer, head):
    """What the Flow's boxes of one layer are to show, in their order: (name, vector); and products,
    scores and weights of the keys.
    """
    config = model.config
    kept, met = recorded(model, layer)
    group = head * config.n_key_head // config.n_head
    weights = met.weights()[0, head, t]
    heaviest = weights.argsort(descending=True)[: min(2, t + 1)].tolist()
    own = slice(head * config.d_head, (head + 1) * config.d_head)
    shared = slice(group * config.d_head, (group + 1) * config.d_head)
    gate = [("gate", kept["mlp.gate"][t])] if config.mlp == "swiglu" else []
    steps = [
        ("normed", kept["attention_norm"][t]),
        *on_the_way(config, kept, "query", t, head, met.q[0, head, t]),
        *on_the_way(config, kept, "key", t, group, met.k[0, head, t]),
        ("v", kept["attention.value"][t, shared]),
        *[("v", met.v[0, head, s]) for s in heaviest],
        ("mix", kept["into attention.project"][t, own]),
        ("written", kept["attention"][t]),
        ("x", kept["into mlp_norm"][t]),
        ("normed", kept["mlp_norm"][t]),
        ("up", kept["mlp.up"][t]),
        *gate,
        ("h", kept["into mlp.project"][t]),
        ("written", kept["mlp"][t]),
        ("x", kept[""][t]),
    ]
    dots = met.k[0, head] @ met.q[0, head, t]
    return steps, dots, met.scores()[0, head, t], weights


def numbers_of(text):
    return [float(n.replace("\u2212", "-")) for n in re.findall(r"[-\u2212]?\d+\.\d+", text)]


def assert_vectors(shown, wanted):
    """`shown`: (name, text) of each vector; its four digits are those of `wanted`."""
    assert [name for name, _ in shown] == [name for name, _ in wanted]
    for (name, text), (_, vector) in zip(shown, wanted, strict=True):
        np.testing.assert_allclose(numbers_of(text), vector, atol=7e-5, rtol=1e-5, err_msg=name)


def vectors_in(page, selector):
    return page.eval_on_selector_all(
        f"{selector} .vector-line",
        "(all) => all.map((line) => [line.dataset.vector, line.querySelector('.vector').textContent])",
    )


@pytest.mark.parametrize(
    ("name", "t", "layer", "head"),
    [
        ("llama", 20, 1, 3),
        ("gpt2", 7, 0, 1),
        ("all of it", 30, 2, 0),
        ("sines", 0, 1, 0),
        ("window", 25, 1, 4),
    ],
)
def test_flow_is_pytorchs(browser, tmp_path, name, t, layer, head):
    path, model = living_page(tmp_path, name)
    steps, dots, scores, weights = steps_of(model, t, layer, head)
    config = model.config
    with opened(browser, path, "flow") as page:
        page.select_option("#flow-head", f"{layer}.{head}")
        page.select_option("#flow-numbers", "all")
        page.click(f"#flow-text-{t}")
        assert page.locator(f"#flow-inside-{layer}").is_visible()
        assert_vectors(vectors_in(page, f"#flow-inside-{layer}"), steps)
        rows = page.locator(f"#flow-inside-{layer} .keys tbody tr")
        seen = [s for s in range(t + 1) if not config.window or t - s < config.window]
        assert [int(row.get_attribute("data-key")) for row in rows.all()] == seen
        for s, text in zip(seen, rows.all_inner_texts(), strict=True):
            dot, score, weight = numbers_of(text.split("\t", 1)[1])
            assert dot == pytest.approx(dots[s].item(), abs=7e-5)
            assert score == pytest.approx(scores[s].item(), abs=7e-5)
            assert weight == pytest.approx(100 * weights[s].item(), abs=0.051)
        with torch.no_grad():
            first = streams(model)[0, t]
            features = model.features(torch.tensor([IDS]))[0, t]
            logits = model.unembed(features)
        assert_vectors(
            vectors_in(page, "#flow-way > .box")[-2:], [("normed", features), ("logits", logits)]
        )
        variance = streams(model)[-1, t].var(correction=0)
        if config.norm == "rmsnorm":
            variance = streams(model)[-1, t].square().mean()
        told = page.locator("#flow-way > .box .words", has_text="Norm: ").inner_text()
        assert f" divided by {(variance + config.norm_eps).sqrt():.3f}," in told
        start = [("embedding", model.embed.weight[IDS[t]].detach())]
        if config.bigrams:
            pair = ((IDS[t - 1] if t else 0) * 256 + IDS[t]) % config.bigrams
            start.append(("pair", model.bigrams.weight[pair].detach()))
        if config.positions in ("learned", "sinusoidal"):
            before = sum(vector for _, vector in start)
            start += [("position", first - before), ("x", first)]
        elif config.bigrams:
            start.append(("x", first))
        assert_vectors(vectors_in(page, "#flow-way > .box")[:-2], start)
        assert page.inner_text("#flow-id").startswith(f"id {IDS[t]}")
        chances = logits.softmax(-1)
        assert shown_as(
            page.inner_text(f'.chance[data-id="{IDS[t + 1]}"]'), 100 * chances[IDS[t + 1]].item()
        )
        told = page.inner_text("#flow-outcome")
        assert shown_as(told.split("=")[1], -chances[IDS[t + 1]].log().item())
        assert f"place {1 + int((logits > logits[IDS[t + 1]]).sum())}." in told
        shapes = page.locator(f"#flow-inside-{layer} .shape").all_inner_texts()
        n_key_head = f"{config.n_key_head} \u00d7 {len(IDS)} \u00d7 {config.d_head}"
        assert f"v_B{'GT' if config.n_kv_head else 'HS'}K 1 \u00d7 {n_key_head}" in shapes


def test_sources_are_there(browser, llama):
    """Every function that the views name is in that file, and the line shown in that function."""
    with opened(browser, llama[0], "flow") as page:
        named = page.evaluate(
            "() => [...Object.values(SOURCES), ...Object.values(RULES).map((rule) => rule.source)]"
        )
    assert len(named) > 30
    for file, where, *lines in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        node = ast.parse(text)
        for part in where.split("."):
            node = next(child for child in node.body if getattr(child, "name", None) == part)
        plain = re.sub(r"\s+", "", ast.get_source_segment(text, node))
        for line in lines:
            assert re.sub(r"\s+", "", line) in plain, (file, where, line)


# ---------- keyboard, width, names ----------


def test_by_keyboard_in_the_dark_on_a_narrow_screen(browser, llama):
    path, model = llama
    whole = loss_of(model).mean().item()
    with opened(browser, path, "flow", **NARROW) as page:
        press = page.keyboard.press
        page.focus("#flow-text")
        press("Home")
        press("ArrowRight")
        press("ArrowRight")
        assert page.inner_text("#flow-token").startswith("e")
        assert "token 2" in page.inner_text("#flow-token")
        page.focus("#flow-layer-1")
        press("Enter")
        assert page.evaluate("document.activeElement.id") == "flow-layer-1"
        assert page.get_attribute("#flow-layer-1", "aria-expanded") == "true"
        page.focus("#flow-head-1-2")
        press("Enter")
        assert page.evaluate("document.activeElement.id") == "flow-head-1-2"
        assert page.input_value("#flow-head") == "1.2"
        page.focus("#tab-flow")
        for _ in ("overview", "head", "equation", "lens"):
            press("ArrowRight")
        assert page.get_attribute("#tab-lens", "aria-selected") == "true"
        drawn(page)
        page.focus('#lens-table td[tabindex="0"]')
        for key in ("Home", "ArrowRight", "ArrowUp"):
            press(key)
        cell = page.evaluate("({...document.activeElement.dataset})")
        assert cell == {"layer": "0", "t": "1"}
        press("ArrowRight")
        press("ArrowUp")
        told = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert told.startswith("embedding, token 2 \u2068e\u2069: says ")
        page.focus("#tab-lens")
        press("ArrowRight")
        assert page.get_attribute("#tab-what_if", "aria-selected") == "true"
        part = page.locator('[data-part="mlps 0"]')
        part.focus()
        press("Space")
        wait_for_change(page, "MLP of layer 0 off")
        assert part.get_attribute("aria-checked") == "false"
        assert page.evaluate("document.activeElement.dataset.part") == "mlps 0"
        page.focus("#undo")
        press("Enter")
        page.wait_for_selector("#changed", state="hidden")
        assert shown_as(page.inner_text(".lost-loss"), whole)
        for view in ("flow", "lens", "what_if"):
            page.click(f"#tab-{view}")
            page.click("#theme")
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            nameless = page.evaluate(
                """(view) => Array.from(document.querySelectorAll(`#${view} button, #${view} select, #${view} input`))
                    .filter((one) => one.checkVisibility() && !one.innerText.trim() && !one.ariaLabel && !one.labels?.length)
                    .map((one) => one.id)""",
                view,
            )
            assert nameless == []
