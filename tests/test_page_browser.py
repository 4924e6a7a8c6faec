"""The attention page in a real browser: every view, by pointer and by keyboard; the numbers shown
are the model's.
"""

import re
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from test_viz_maps import NASTY, tiny_maps, tiny_model

from viz.labels import word_index
from viz.page import render_page
from viz.probe import load_probe, save_probe
from viz.roles import ROLES, measure_roles

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: the page is not tried in a browser"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium here: the page is not tried in a browser"
    ),
]
TEXT = "The cat, the cat sat.\n" + NASTY


@pytest.fixture(scope="module")
def maps():
    return tiny_maps(TEXT)


@pytest.fixture(scope="module")
def roles(maps):
    """As measured, save that heads 1.1 and 0.2 have a role."""
    measured = measure_roles(maps, (np.full((2, 3), 0.1), 0.05))
    measured.scores[1, 1, 0], measured.scores[0, 2, 0], measured.scores[0, 2, 4] = 0.9, 0.6, 0.95
    assert measured.names().ravel().tolist() == [
        "mixed",
        "mixed",
        "induction",
        "mixed",
        "previous",
        "mixed",
    ]
    return measured


@pytest.fixture(scope="module")
def path(maps, roles, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for step, seed in ((0, 0), (50, 1), (200, 2)):
        save_probe(folder, step, tiny_model(seed=seed), list(TEXT.encode()))
    curve = [(0, 4.25, 4.5), (50, 3.25, 3.5), (120, float("nan"), float("inf")), (200, 2.25, 2.75)]
    text = render_page(maps, roles, TEXT, ["a fact"], load_probe(folder, bytes), curve)
    (folder / "page.html").write_text(text, encoding="utf-8", newline="\n")
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)


@contextmanager
def open_page(browser, path, ready, **options):
    """A page that must end without an error, a dialog, or a request for anything but itself. It is
    open when `ready`, a selector, is there.
    """
    options = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"} | options
    context = browser.new_context(**options)
    context.set_default_timeout(15_000)
    page, wrong = context.new_page(), []
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: asked.url != path.as_uri() and wrong.append(asked.url))
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    page.goto(path.as_uri())
    page.wait_for_selector(ready, state="attached")
    yield page
    assert page.locator("img").count() == 0
    context.close()
    assert wrong == []


@pytest.fixture
def opened(browser, path, request):
    """The page of this file, opened with the options of an indirect parameter."""
    ready = "html[data-drawn=yes]"
    with open_page(browser, path, ready, **getattr(request, "param", {})) as page:
        yield page


def number(text):
    return float(re.search(r"[-\u2212]?\d+(\.\d+)?", text)[0].replace("\u2212", "-"))


def shown_as(text, value, slack=2e-6):
    """Whether `text` is `value` at the digits it shows, up to the order of float32 sums."""
    digits = re.search(r"[-\u2212]?\d+(?:\.(\d+))?", text)[1] or ""
    return abs(number(text) - value) <= 0.5 * 10.0 ** -len(digits) + slack * max(1, abs(value))


def looks(page, name):
    """(share of weight as text) of each line of a list of bars."""
    return page.locator(f"{name} .bars > span:nth-child(3n)").all_inner_texts()


def place(page, query, key, name="#weights-map"):
    """Where the middle of a cell of a large map lies in the window."""
    return page.evaluate(
        """([name, query, key]) => {
            const v = {"#weights-map": weightsView, "#scores-map": scoresView, "#big-map": bigView}[name];
            const box = v.canvas.getBoundingClientRect();
            return [box.left + v.gutter + (key + 0.5) * v.cell, box.top + v.top + (query + 0.5) * v.cell];
        }""",
        [name, query, key],
    )


def point(page, query, key, name="#weights-map"):
    """Move the pointer to a cell of a large map."""
    page.mouse.move(*place(page, query, key, name))


def test_overview(opened, maps, roles):
    buttons = opened.locator("#grid button")
    assert buttons.count() == 6
    assert opened.locator("h1").inner_text().startswith("The cat, the cat sat.")
    assert f"{len(maps.tokens)} tokens" in opened.locator("#facts").inner_text()
    buttons.nth(4).hover()
    assert "Layer 1, head 1" in opened.locator("#hovered").inner_text()
    column = list(ROLES).index("previous")
    told = opened.locator("#hovered").inner_text()
    assert f"mean entropy {roles.entropy[1, 1]:.2f} bits" in told
    assert (
        f"previous: {100 * roles.scores[1, 1, column]:.1f} % of its weight goes to the token "
        "just before" in told
    )
    opened.select_option("#sort", label="most previous first")
    order = np.argsort(-roles.scores[..., column].ravel(), kind="stable")
    assert [text.split("\n")[0] for text in buttons.all_inner_texts()] == [
        f"L{i // 3} H{i % 3}" for i in order
    ]
    opened.select_option("#sort", label="narrowest look first")
    order = np.argsort(roles.entropy.ravel(), kind="stable")
    assert [text.split("\n")[0] for text in buttons.all_inner_texts()] == [
        f"L{i // 3} H{i % 3}" for i in order
    ]
    opened.select_option("#sort", value="")
    opened.select_option("#filter", label="induction (1)")
    assert buttons.all_inner_texts() == ["L0 H2\ninduction 95 %"]
    opened.select_option("#filter", value="")
    opened.click("#table-of-roles summary")
    cells = opened.locator("#roles tbody tr").nth(1 + 4).locator("td").all_inner_texts()
    assert cells[0] == "L1 H1"
    assert shown_as(cells[2 + column], 100 * roles.scores[1, 1, column], 1e-5)
    buttons.nth(4).click()
    assert opened.locator("#head").is_visible()
    assert opened.locator("#pick").input_value() == "4"


def test_head_by_pointer(opened, maps):
    opened.click("#tab-head")
    opened.select_option("#pick", "4")
    weights, scores = maps.weights(1)[1], maps.scores(1)[1]
    for name in ("#weights-map", "#scores-map"):
        for query, key in ((30, 12), (17, 17), (50, 0)):
            point(opened, query, key, name)
            line = opened.locator("#looks .cell").inner_text()
            assert f"({query}) → {maps.labels[key]} ({key})" in line
            assert shown_as(line.split("score ")[1], scores[query, key])
            assert shown_as(line.split("weight ")[1], 100 * weights[query, key], 1e-5)
    point(opened, 30, 12)
    shown, expected = looks(opened, "#looks"), np.sort(weights[30])[::-1]
    assert len(shown) == 9
    assert all(
        shown_as(text, 100 * value, 1e-5) for text, value in zip(shown, expected[:8], strict=False)
    )
    assert shown_as(shown[8], 100 * expected[8:].sum(), 1e-4)
    row = weights[30, :31].astype(float)
    assert shown_as(
        opened.locator("#looks .note").inner_text(),
        -(row * np.log2(np.maximum(row, 1e-30))).sum(),
        1e-4,
    )
    point(opened, 20, 40)
    assert "forbidden; score \u2212∞, weight 0" in opened.locator("#looks .cell").inner_text()


def test_forbidden_is_hatched_and_zero_is_plain(opened):
    opened.click("#tab-head")
    colours = opened.evaluate(
        """() => {
            const v = weightsView, side = 15 * v.cell * devicePixelRatio;
            v.matrix.fill(0);
            v.set(v.matrix, v.n, v.labels, v.forbidden, v.index);
            v.mark(null, null);
            const colours = (query, key) => {
                const canvas = Object.assign(document.createElement("canvas"), {width: side, height: side});
                const context = canvas.getContext("2d", {willReadFrequently: true});
                const at = [v.gutter + key * v.cell, v.top + query * v.cell].map((x) => -x * devicePixelRatio);
                context.drawImage(v.canvas, ...at);
                return new Set(new Uint32Array(context.getImageData(0, 0, side, side).data.buffer)).size;
            };
            return [colours(5, 40), colours(45, 5)];
        }"""
    )
    assert colours[0] > 1  # stripes
    assert colours[1] == 1


def test_head_click_keeps_a_row_and_escape_lets_go(opened):
    opened.click("#tab-head")
    opened.mouse.click(*place(opened, 30, 12))
    point(opened, 44, 3)
    assert "(token 30)" in opened.locator("#looks h2").inner_text()
    opened.keyboard.press("Escape")
    point(opened, 45, 3)
    assert "(token 45)" in opened.locator("#looks h2").inner_text()


def test_keyboard_alone(opened, maps):
    opened.focus("#tab-overview")
    opened.keyboard.press("ArrowRight")
    assert opened.locator("#head").is_visible()
    assert opened.evaluate("document.activeElement.id") == "tab-head"
    opened.focus("#weights-map")
    last = len(maps.tokens) - 1
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
        opened.keyboard.press(key)
    assert f"(token {last - 2})" in opened.locator("#looks h2").inner_text()
    said = opened.locator("#live").inner_text()
    query, key = last - 2, opened.evaluate("state.key")
    assert f"{100 * maps.weights(0)[0][query, key]:.1f} %" in said
    opened.focus("#next")
    opened.keyboard.press("Enter")
    assert opened.locator("#pick").input_value() == "1"
    opened.focus("#tab-text")
    opened.keyboard.press("Enter")
    opened.focus("#reader")
    opened.keyboard.press("Home")
    opened.keyboard.press("ArrowRight")
    assert opened.locator("#reader .query").get_attribute("data-unit") == "1"
    opened.focus("#tab-overview")
    opened.keyboard.press("Enter")
    opened.focus("#grid button >> nth=5")
    assert "Layer 1, head 2" in opened.locator("#hovered").inner_text()
    opened.keyboard.press("Enter")
    assert opened.locator("#pick").input_value() == "5"


def test_every_control_has_a_name(opened):
    unnamed = opened.evaluate(
        """() => [...document.querySelectorAll("button, select, input, [tabindex='0'], svg[role=img]")]
            .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
            .map((e) => e.outerHTML.slice(0, 90))"""
    )
    assert unnamed == []


def test_zoom_shows_more_of_less(opened):
    opened.click("#tab-head")
    cell = opened.evaluate("weightsView.cell")
    for _ in range(4):
        opened.click("#zoom-in")
    assert opened.evaluate("weightsView.cell") == pytest.approx(cell * 1.6**4)
    opened.evaluate("scoresView.root.scrollTop = 200")
    sync_api.expect(opened.locator("#weights-map")).to_have_js_property(
        "scrollTop", 200
    )  # the two maps move together
    opened.focus("#weights-map")
    opened.keyboard.press("End")
    below = "weightsView.n * weightsView.cell - (weightsView.root.scrollTop + weightsView.height - weightsView.top)"
    assert opened.evaluate(below) <= 0


def light(page, unit):
    return page.locator(f"#reader [data-unit='{unit}']").evaluate("(e) => e.style.background")


def test_text(opened, maps):
    opened.click("#tab-text")
    opened.select_option("#pick", "1")
    opened.hover("#reader [data-unit='18']")
    row = maps.weights(0)[1][18]
    assert shown_as(looks(opened, "#text-looks")[0], 100 * row.max(), 1e-5)
    assert light(opened, int(row.argmax())) != ""
    assert [light(opened, s) for s in range(19, len(maps.tokens))] == [""] * (len(maps.tokens) - 19)
    assert opened.locator("#reader .later").count() == len(maps.tokens) - 19
    expected = maps.predictions[18]
    tokens = opened.locator("#predicted .tok").all_inner_texts()[-6:-1]
    assert len(tokens) == 5
    for text, (_, p) in zip(
        opened.locator("#predicted .bars > span").all_inner_texts(), expected, strict=True
    ):
        assert shown_as(text, 100 * p, 1e-5)
    loss = opened.locator("#predicted .loss b").inner_text()
    assert shown_as(loss, maps.losses[18])
    held = opened.locator("#predicted .loss").inner_text().split("held ")[1]
    assert shown_as(held, 100 * np.exp(-maps.losses[18]), 1e-5)


def test_layer_mean_and_rollout(opened, maps):
    opened.click("#tab-text")
    opened.select_option("#pick", "4")
    means = [maps.weights(layer).mean(0) for layer in (0, 1)]
    opened.select_option("#source", "layer")
    opened.hover("#reader [data-unit='40']")
    assert shown_as(looks(opened, "#text-looks")[0], 100 * means[1][40].max(), 1e-5)
    opened.select_option("#source", "rollout")
    opened.hover("#reader [data-unit='39']")
    mixed = [0.5 * mean + 0.5 * np.eye(len(mean)) for mean in means]
    expected = np.sort((mixed[1] @ mixed[0])[39])[::-1]
    for text, value in zip(looks(opened, "#text-looks")[:8], expected, strict=False):
        assert shown_as(text, 100 * value, 1e-5)
    assert "Abnar" in opened.locator("#source-about").inner_text()


def test_whole_words(opened, maps):
    words = word_index(maps.pieces)
    opened.click("#tab-head")
    opened.check("#words")
    assert opened.evaluate("weightsView.n") == words[-1] + 1
    assert not opened.locator("#scores-map").is_visible()
    member = np.eye(words[-1] + 1)[words]
    merged = (
        (member / member.sum(0)).T @ maps.weights(0)[0] @ member
    )  # to a word weights add up, from a word they are averaged
    np.testing.assert_allclose(merged.sum(-1), 1, atol=1e-5)
    key = int(merged[4, :4].argmax())
    point(opened, 4, key)
    line = opened.locator("#looks .cell").inner_text()
    assert line.startswith(f"␣cat (4) → {['The', '␣cat', ',', '␣the'][key]} ({key})")
    assert shown_as(line.split("weight ")[1], 100 * merged[4, key], 1e-5)
    opened.click("#tab-text")
    assert opened.locator("#reader span").count() == words[-1] + 1
    opened.hover("#reader [data-unit='5']")
    assert shown_as(looks(opened, "#text-looks")[0], 100 * merged[5].max(), 1e-5)


def test_equation(opened, maps):
    opened.click("#tab-equation")
    opened.select_option("#pick", "5")
    opened.click("#chooser [data-unit='25']")
    opened.click("#toggle-vectors")
    opened.click("#toggle-keys")
    q, k, v = (x[1, 2].astype(float) for x in (maps.q, maps.k, maps.v))
    products = k[:26] @ q[25]
    scores = products / np.sqrt(8)
    exponentials = np.exp(scores - scores.max())
    weights = exponentials / exponentials.sum()
    np.testing.assert_allclose(
        weights, maps.weights(1)[2][25, :26], atol=1e-5
    )  # the model's, in float32

    def vector(text):
        return text.split("[")[1].split("]")[0].split(", ")

    assert all(map(shown_as, vector(opened.locator("#query-vector").inner_text()), q[25]))
    rows = opened.locator("#computation tr[data-key]")
    assert rows.count() == 26
    for s, cells in enumerate(
        rows.evaluate_all(
            "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
    ):
        assert cells[0] == f"{s} {maps.labels[s]}"
        assert all(map(shown_as, vector(cells[1]), k[s]))
        expected = (products[s], scores[s], scores[s] - scores.max(), exponentials[s], weights[s])
        assert [
            shown_as(text, value) for text, value in zip(cells[2:7], expected, strict=True)
        ] == [True] * 5
        assert len(cells[6].split(".")[1]) == 4
    total = opened.locator("#computation .total td").all_inner_texts()
    assert shown_as(total[3], scores.max())
    assert shown_as(total[5], exponentials.sum())
    assert shown_as(total[6], 1.0)
    output = vector(opened.locator("#output-vector").inner_text())
    assert len(output) == 8
    assert all(map(shown_as, output, weights @ v[:26]))
    assert f"{len(maps.tokens) - 26} forbidden keys" in opened.locator("#computation").inner_text()
    opened.click("#toggle-keys")
    assert rows.count() == 10
    kept = opened.locator("#computation .rest").first.locator("td").all_inner_texts()
    assert kept[0] == "16 other keys"
    assert shown_as(kept[6], np.sort(weights)[:16].sum())


def test_learning(opened, path):
    probe = load_probe(path.parent, bytes)
    opened.click("#tab-learning")
    label = opened.locator("#moment-label")
    sync_api.expect(label).to_have_text("step 200")
    assert opened.locator("#snapshots button").count() == 6

    def cell(query, key):
        point(opened, query, key, "#big-map")
        return opened.locator("#big-title").inner_text()

    first = 30 * 31 // 2  # of row 30 in the lower triangle
    for step, index, loss in ((200, 2, "2.750"), (50, 1, "3.500"), (0, 0, "4.500")):
        assert label.inner_text() == f"step {step}"
        row = probe.maps[index][0, 0, first : first + 31].astype(int)
        assert cell(30, int(row.argmax())).endswith(f" {round(100 * row.max() / 255)} %")
        assert f"validation {loss}" in opened.locator("#loss").text_content()
        x = float(opened.locator("#loss .now").get_attribute("x1"))
        assert x == pytest.approx(40 + 410 * step / 200)
        opened.focus("#moment")
        opened.keyboard.press("ArrowLeft")
    formed = opened.locator("#formed").inner_text()
    for role, found in probe.forming().items():
        if found:
            assert f"First {role} head: L{found[1]} H{found[2]}, at step {found[0]}" in formed
        else:
            assert role in formed.split("Not reached in this run: ")[1]
    opened.click("#snapshots button >> nth=4")
    assert cell(30, 28).startswith("Layer 1, head 1")
    assert cell(28, 30).endswith("forbidden")
    opened.click("#play")
    sync_api.expect(label).to_have_text("step 200")
    sync_api.expect(opened.locator("#play")).to_have_text("Play")
    assert opened.locator("#forming polyline").count() == len(ROLES)
    opened.locator("#loss").click(position={"x": 5, "y": 30})
    assert label.inner_text() == "step 0"


def test_theme_switches_and_follows_the_system(opened):
    root = opened.locator("html")
    assert root.get_attribute("data-theme") == "light"
    colours = "[getComputedStyle(document.documentElement).backgroundColor, paletteCss[0]]"
    before = opened.evaluate(colours)
    opened.click("#theme")
    assert root.get_attribute("data-theme") == "dark"
    after = opened.evaluate(colours)
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("opened", [{"color_scheme": "dark"}], indirect=True)
def test_dark_where_the_system_is(opened):
    assert opened.locator("html").get_attribute("data-theme") == "dark"


PHONE = {"viewport": {"width": 375, "height": 720}, "has_touch": True, "is_mobile": True}


@pytest.mark.parametrize("opened", [PHONE], indirect=True)
def test_on_a_phone_nothing_is_cut_off_and_a_tap_is_enough(opened):
    for view in ("overview", "head", "text", "equation", "learning"):
        opened.tap(f"#tab-{view}")
        assert opened.evaluate("document.documentElement.scrollWidth") <= 375
        assert opened.locator("footer").is_visible()
    opened.tap("#tab-head")
    opened.locator("#weights-map").scroll_into_view_if_needed()
    opened.touchscreen.tap(*place(opened, 40, 10))
    assert "(40) →" in opened.locator("#looks .cell").inner_text()


def test_nasty_text_is_shown_as_it_is(opened, maps):
    opened.click("#tab-text")
    labels = opened.locator("#reader span").evaluate_all(
        "(all) => all.map((e) => e.getAttribute('aria-label'))"
    )
    assert labels == maps.labels
    text = opened.locator("#reader").text_content()
    assert "</script><img src=x onerror=alert(1)>" in text
    assert "⟨U+0007⟩" in text
    assert "⟨D7⟩⟨A9⟩" in text  # half characters, a byte a token
