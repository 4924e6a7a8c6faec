"""Typing and writing on the page, in a browser: what it shows of a typed text, and what it writes, is
PyTorch's, on the weights as the page holds them; by pointer and by keyboard.
"""

import html
import json

import numpy as np
import pytest
import torch
from test_page_browser import CHROMIUM, browser, number, open_page, shown_as, sync_api
from test_page_model import SHAPES, opinionated
from test_viz_maps import NASTY

from data.tokenizer import CharTokenizer
from model.generate import generate, next_distribution
from model.sampling import Sampling
from viz.labels import label, word_index
from viz.living import as_held, put_into_page
from viz.maps import read_text
from viz.page import _texts, render_page
from viz.roles import ROLES, induction_scores, measure_roles

assert browser  # a fixture
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: no page can be tried"),
]
HOSTILE = "<script>&\x00\u202e\u0301\u05e9\U0001f600\ud7ff"
SYMBOLS = "".join(sorted(set("the cat sat on it, and slept.\n" + HOSTILE)))
FIRST = "the cat\nsat"
CONTEXT = 24
READY = "html[data-reading=no]"
NARROW = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A page that carries a small model over characters, its path, that model as the page holds it,
    and its tokenizer.
    """
    tokenizer = CharTokenizer(SYMBOLS)
    shape = SHAPES["llama"] | {"context_length": CONTEXT}
    model = opinionated(vocab_size=len(SYMBOLS), **shape)
    ids = tokenizer.encode(FIRST).tolist()
    living = put_into_page(model, tokenizer, ids, 10**7, examples=["on it, and", HOSTILE])
    maps = read_text(model, ids, tokenizer.decode_bytes)
    roles = measure_roles(maps, induction_scores(model))
    path = tmp_path_factory.mktemp("typing") / "page.html"
    text = render_page(maps, roles, title=NASTY, living=living)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path, as_held(model, living.told["bits"]), tokenizer


@pytest.fixture
def page(browser, made, request):
    with open_page(browser, made[0], READY, **getattr(request, "param", {})) as page:
        yield page


def typed(page, text):
    """Have the whole text typed at once."""
    page.fill("#typed", text)
    page.wait_for_function(
        "(text) => shown.typed === text && document.documentElement.dataset.reading === 'no'",
        arg=text,
    )


def shown_now(page):
    return page.evaluate(
        """() => ({ids: shown.ids, all: shown.all, from: shown.from, query: state.query,
            labels: shown.tokens.map(([label]) => label), losses: Array.from(shown.losses),
            logits: Array.from(shown.reading.logits)})"""
    )


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]))[0].double().numpy()


def check_shown(page, made, ids):
    """The page shows what the model makes of these ids: tokens, maps, predictions and losses."""
    _, model, tokenizer = made
    shown = shown_now(page)
    assert shown["ids"] == ids
    maps = read_text(model, ids, tokenizer.decode_bytes)
    assert shown["labels"] == maps.labels
    wanted = logits_of(model, ids)
    np.testing.assert_allclose(np.reshape(shown["logits"], wanted.shape), wanted, atol=1e-4)
    np.testing.assert_allclose(shown["losses"], maps.losses, atol=1e-4)
    weights = page.evaluate("() => HEADS.map((h) => Array.from(weights(h)))")
    wanted = np.stack([maps.weights(layer) for layer in maps.layers])
    np.testing.assert_allclose(np.reshape(weights, wanted.shape), wanted, atol=1e-4)
    if maps.losses:
        assert shown_as(page.locator("#text-loss b").inner_text(), np.mean(maps.losses), 1e-4)
    expected = page.evaluate("() => shown.predicted(shown.n - 1)")
    assert [name for name, _ in expected] == [label(piece) for piece, _ in maps.predictions[-1]]
    probabilities = [p for _, p in maps.predictions[-1]]
    np.testing.assert_allclose([p for _, p in expected], probabilities, atol=1e-4)


def test_a_typed_text_is_read_as_pytorch_reads_it(page, made):
    encode = made[2].encode
    check_shown(page, made, encode(FIRST).tolist())
    page.focus("#typed")
    page.keyboard.press("End")  # of its last line
    page.keyboard.type(", and", delay=15)
    text = FIRST + ", and"
    page.wait_for_function("(text) => shown.typed === text", arg=text)
    check_shown(page, made, encode(text).tolist())
    by_key = shown_now(page)
    edited = "the cat\nslept on it"
    typed(page, edited)  # rows that both have in common are kept
    check_shown(page, made, encode(edited).tolist())
    typed(page, "")
    typed(page, text)
    assert shown_now(page) == by_key  # bit for bit


def test_the_latest_key_wins(page):
    texts = ["the cat sat on it", "and slept on it", "the"]
    page.evaluate(
        """async (texts) => {
            const quick = readSliced;
            readSliced = (...call) => quick(...call.slice(0, 4), {...call[4], milliseconds: 0});
            await Promise.all(texts.map(readText));
        }""",
        texts,
    )
    assert page.evaluate("[shown.typed, document.documentElement.dataset.reading]") == [
        texts[-1],
        "no",
    ]


def test_what_the_tokenizer_does_not_know_is_marked_and_left_out(page, made):
    typed(page, "éthe QcatQ\U0001f600é")
    check_shown(page, made, made[2].encode("the cat\U0001f600").tolist())
    assert page.locator("#reader del").all_inner_texts() == ["é", "Q", "Q", "é"]
    reader = page.locator("#reader").text_content()
    assert reader == "éthe QcatQ\U0001f600é"
    notes = page.locator("#typing-notes").inner_text()
    assert notes.startswith("Left out: é (2 times) Q (2 times) ")
    typed(page, "the cat")
    assert page.locator("#typing-notes").inner_text() == ""


def test_a_text_longer_than_the_context_is_read_as_sample_py_reads_it(page, made):
    text = ("the cat sat on it, and slept.\n" * 2)[: CONTEXT + 1]
    ids = made[2].encode(text).tolist()
    typed(page, text[:-1])
    check_shown(page, made, ids[:-1])
    typed(page, text)
    check_shown(page, made, ids[-(CONTEXT // 2) :])
    notes = page.locator("#typing-notes").inner_text()
    assert f"{CONTEXT + 1} tokens" in notes
    assert f"all but the last {CONTEXT // 2}" in notes
    outside = page.locator("#reader .outside")
    assert outside.inner_text() == text[: -(CONTEXT // 2)]
    typed(page, "\u202e<c>" + text)
    assert outside.text_content().startswith("⟨U+202E⟩<c>the cat")


def test_an_empty_text_begins_as_sample_py_does(page, made):
    page.click("#examples button >> nth=0")
    page.wait_for_function("() => shown.typed === ''")
    check_shown(page, made, made[2].encode("\n").tolist())
    assert "begins with ↵" in page.locator("#typing-notes").inner_text()
    page.click("#tab-write")
    page.fill("#temperature", "0")
    page.click("#write-one")
    page.wait_for_function("() => shown.drawn.length === 1")
    assert page.input_value("#typed") == page.evaluate("textOfIds([shown.drawn[0].id])")


def test_examples_to_start_from(page, made):
    names = page.locator("#examples button").all_inner_texts()
    assert names[:3] == ["Empty", "This run\u2019s text", "on it, and"]
    page.click("#examples button >> nth=2")
    page.wait_for_function("() => shown.typed === 'on it, and'")
    check_shown(page, made, made[2].encode("on it, and").tolist())
    page.click("#examples button >> nth=3")
    page.wait_for_function("(text) => shown.typed === text", arg=HOSTILE)
    check_shown(page, made, made[2].encode(HOSTILE).tolist())
    assert "<script>&⟨U+0000⟩⟨U+202E⟩" in page.locator("#reader").text_content()
    for view in ("overview", "head", "equation", "write", "text"):
        page.click(f"#tab-{view}")


def test_roles_are_those_of_the_text(page, made):
    _, model, tokenizer = made
    text = "the cat, the cat.\nthe"
    typed(page, text)
    page.wait_for_selector("html[data-roles=measured]", state="attached")
    maps = read_text(model, tokenizer.encode(text).tolist(), tokenizer.decode_bytes)
    wanted = measure_roles(maps, induction_scores(model))
    found = page.evaluate("({heads: HEADS, uniform: shown.uniform})")
    scores = np.reshape([h["roles"] for h in found["heads"]], wanted.scores.shape)
    np.testing.assert_allclose(scores, wanted.scores, atol=1e-4)
    np.testing.assert_allclose(found["uniform"], wanted.uniform, atol=1e-6)
    entropy = [h["entropy"] for h in found["heads"]]
    np.testing.assert_allclose(entropy, wanted.entropy.ravel(), atol=1e-3)
    assert [h["called"] for h in found["heads"]] == wanted.names().ravel().tolist()
    page.click("#tab-overview")
    page.click("#table-of-roles summary")
    cells = page.locator("#roles tbody tr").nth(1).locator("td").all_inner_texts()
    assert shown_as(cells[2 + list(ROLES).index("local")], 100 * wanted.scores[0, 0, -1], 1e-3)


def test_labels_and_words_are_pythons(page):
    texts = [
        *(NASTY + HOSTILE + "a1 b_c\u2019s \x1c\u00a0\u2028\u0378\U000e0001 ½Ⅷ\u0e33").split(
            "\x07"
        ),
        "\u0301a\u0301",
        "\ufeff\ufffd",
    ]
    pieces = [text.encode() for text in texts]
    pieces += [character.encode() for character in "".join(texts)]
    pieces += [b"", b"\x80", b"\xc3", b"a\xe2\x80", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xff\xfe a"]
    found = page.evaluate(
        """(pieces) => {
            const bytes = pieces.map((piece) => Uint8Array.from(piece));
            return {texts: bytes.map(labelAndText), words: wordIndex(bytes)};
        }""",
        [list(piece) for piece in pieces],
    )
    assert found == {"texts": _texts(pieces), "words": word_index(pieces)}


def test_the_caret_and_the_chosen_token_go_together(page):
    typed(page, "the cat sat")
    assert shown_now(page)["query"] == 10
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert shown_now(page)["query"] == 6
    page.keyboard.type("s")
    page.wait_for_function("() => shown.typed === 'the cats sat'")
    assert shown_now(page)["query"] == 7
    page.hover("#reader [data-unit='2']")
    assert shown_now(page)["query"] == 2
    page.keyboard.type("s")  # while the mouse rests on the text
    page.wait_for_function("() => shown.typed === 'the catss sat'")
    page.wait_for_timeout(100)
    assert shown_now(page)["query"] == 8
    page.keyboard.press("Backspace")
    page.wait_for_function("() => shown.typed === 'the cats sat'")
    page.focus("#reader")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.type("hh")  # a key goes into the text behind the token chosen
    page.wait_for_function("() => shown.typed === 'thhhe cats sat'")
    page.focus("#reader")
    page.keyboard.press("Backspace")
    page.wait_for_function("() => shown.typed === 'thhe cats sat'")
    typed(page, "QtQhe")
    page.focus("#reader")
    page.keyboard.press("ArrowLeft")
    page.keyboard.type("t")  # behind the h
    page.wait_for_function("() => shown.typed === 'QtQhte'")


# ---------- writing ----------


def settings(page, temperature, top_k, top_p):
    page.fill("#temperature", str(temperature))
    page.fill("#top-k", str(top_k))
    page.fill("#top-p", str(top_p))


@pytest.mark.parametrize("setting", [(0.5, 0, 1), (2, 3, 1), (1, 0, 0.6), (1.2, 6, 0.8)])
def test_the_bars_are_what_sample_py_draws_from(page, made, setting):
    page.click("#tab-write")
    settings(page, *setting)
    row = torch.from_numpy(logits_of(made[1], made[2].encode(FIRST).tolist())[-1])
    kept = next_distribution(row[None], Sampling(*setting))[0]
    share = kept / kept.sum()
    order = row.argsort(descending=True).tolist()
    bars = page.locator("#candidates button")
    assert bars.count() == 10
    for bar, i in zip(bars.all(), order, strict=False):
        assert bar.locator("bdi").inner_text() == label(SYMBOLS[i].encode())
        told = bar.locator(".told").inner_text()
        assert told == "left out" if kept[i] == 0 else shown_as(told, 100 * share[i], 1e-3)
        widths = bar.evaluate(
            "(b) => ['raw', 'kept'].map((k) => b.querySelector('.' + k).style.width)"
        )
        raw = row.softmax(-1)[i]
        np.testing.assert_allclose(
            [number(w) for w in widths], [100 * raw, 100 * share[i]], atol=0.01
        )
    falls = page.evaluate("nextDraw().u * nextDraw().total")
    wanted = int((kept.cumsum(0) > falls).int().argmax())
    assert page.locator("#draw-told bdi").inner_text() == label(SYMBOLS[wanted].encode())
    assert page.locator("#the-draw .share").count() == int((kept > 0).sum())
    assert page.locator("#the-draw rect.hit").count() == 1
    page.click("#write-one")
    page.wait_for_function("() => shown.drawn.length === 1")
    assert shown_now(page)["all"][-1] == wanted


def test_written_at_temperature_0_it_is_what_generate_writes_past_the_context(page, made):
    _, model, tokenizer = made
    page.click("#tab-write")
    page.fill("#temperature", "0")
    assert "nothing is drawn" in page.locator("#draw-told").inner_text()
    page.evaluate("async () => { for (let i = 0; i < 30; i++) await writeOne(); }")
    ids = tokenizer.encode(FIRST).tolist()
    wanted = [row[0] for row in generate(model, [ids], 30, Sampling(temperature=0))]
    shown = shown_now(page)
    assert shown["all"] == ids + wanted
    assert shown["from"] > 0
    check_shown(page, made, shown["all"][shown["from"] :])
    page.evaluate("async () => { for (let i = 0; i < 10; i++) await stepBack(); }")
    page.evaluate("async () => { for (let i = 0; i < 10; i++) await writeOne(); }")
    assert shown_now(page) == shown
    page.evaluate("async () => { for (let i = 0; i < 30; i++) await stepBack(); }")
    assert page.locator("#write-back").is_disabled()
    check_shown(page, made, ids)


def test_steps_back_seeds_and_choices(page, made):
    page.click("#tab-write")
    page.evaluate("async () => { for (let i = 0; i < 6; i++) await writeOne(); }")
    first = shown_now(page)["all"]
    for left in (5, 4, 3):
        page.click("#write-back")
        page.wait_for_function("(left) => shown.drawn.length === left", arg=left)
    page.evaluate("async () => { for (let i = 0; i < 3; i++) await writeOne(); }")
    assert shown_now(page)["all"] == first  # the same seed draws the same again
    assert page.evaluate("nextDraw().u === uniform(1337, 6)")
    page.click("#write-back")
    page.wait_for_function("() => shown.drawn.length === 5")
    before = page.evaluate("nextDraw().u")
    page.fill("#seed", "7")
    assert page.evaluate("nextDraw().u") != before
    assert f"{page.evaluate('nextDraw().u'):.4f}" in page.locator("#draw-told").inner_text()
    page.locator("#candidates button").nth(4).focus()
    chosen = page.evaluate("candidateRows[4].id")
    page.keyboard.press("Enter")
    page.wait_for_function("() => shown.drawn.length === 6")
    assert shown_now(page)["all"] == [*first[:-1], chosen]
    assert page.evaluate("shown.drawn[5].u") is None
    assert page.locator("#written li").count() == 6
    page.fill("#seed", "")
    page.focus("#write-run")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#write-run")).to_have_text("Pause")
    page.wait_for_function("() => shown.drawn.length >= 8")
    page.click("#tab-overview")  # where nothing is written
    sync_api.expect(page.locator("#write-run")).to_have_text("Run")
    n_drawn = page.evaluate("shown.drawn.length")
    page.wait_for_timeout(250)
    assert page.evaluate("shown.drawn.length") <= n_drawn + 1
    page.click("#tab-write")
    typed(page, "the cat")  # a typed text is no written one
    assert page.locator("#written .nothing").count() == 1


# ---------- access ----------


@pytest.mark.parametrize("page", [NARROW | {"color_scheme": "dark"}], indirect=True)
def test_narrow_and_by_touch(page):
    for view in ("text", "write"):
        page.tap(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.tap("#write-one")
    page.wait_for_function("() => shown.drawn.length === 1")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea, [tabindex='0'], svg[role=img]")]
            .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
            .map((e) => e.outerHTML.slice(0, 90))"""
    )
    assert unnamed == []


def test_in_a_notebooks_frame_a_page_of_several_mb_can_be_typed_into(browser, made, tmp_path):
    text = made[0].read_text(encoding="utf-8")
    filler = json.dumps("x" * 4_000_000)
    text = text.replace("</body>", f'<script type="application/json">{filler}</script></body>')
    style = "width:100%;height:900px;border:0"
    frame = f'<iframe srcdoc="{html.escape(text)}" style="{style}"></iframe>'
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html>{frame}", encoding="utf-8")
    page = browser.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(path.as_uri())
    inside = page.frame_locator("iframe")
    inside.locator(READY).wait_for(state="attached")
    inside.locator("#typed").fill("the cat")
    sync_api.expect(inside.locator("#reader span")).to_have_count(7)
    page.close()
    assert wrong == []
