"""viz.page: what the file holds, what it can't be made to do, and how large it may be."""

import base64
import hashlib
import json
import re
import zlib
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from test_viz_maps import NASTY, tiny_maps, tiny_model

from errors import UserError
from model.attention import Mask, attention_weights
from viz import page
from viz.maps import read_text
from viz.page import render_page
from viz.probe import load_probe, save_probe
from viz.roles import measure_roles


class Elements(HTMLParser):
    """Every element of a page: (tag, attributes, text of scripts and styles)."""

    def __init__(self, text):
        super().__init__()
        self.found, self.texts, self.open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.open = len(self.found)
        self.found.append((tag, dict(attributes)))
        self.texts[self.open] = ""

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, text):
        if self.open is not None:
            self.texts[self.open] += text

    def scripts(self):
        return {
            a.get("id"): self.texts[i] for i, (tag, a) in enumerate(self.found) if tag == "script"
        }


def held(text):
    """The page's data, and the numbers of each head as the browser unpacks them: id -> {q, k, v},
    (T, K).
    """
    scripts = Elements(text).scripts()
    data, heads = json.loads(scripts["data"]), {}
    n_token, d_head, names = len(data["tokens"]), data["dHead"], "qkv" if data["values"] else "qk"
    for name in scripts:
        if name and name.startswith("head-"):
            block = base64.b64decode(scripts[name])
            scales = np.ones((len(names), 1, d_head), np.float32)
            if data["bits"] == 16:
                scales = np.frombuffer(block[: scales.nbytes], np.float32).reshape(scales.shape)
                block = block[scales.nbytes :]
            array = np.frombuffer(block, np.float32 if data["bits"] == 32 else np.int16).reshape(
                len(names), n_token, d_head
            )
            heads[name] = dict(zip(names, array * scales, strict=True))
    return data, heads


def weights(head, data):
    import torch

    q, k = (torch.from_numpy(np.array(head[name]))[None, None] for name in "qk")
    return attention_weights(q, k, Mask(data["causal"], data["window"]))[0, 0].numpy()


def test_the_numbers_held_give_the_models_weights():
    maps = tiny_maps(window=9)
    data, heads = held(render_page(maps))
    assert (data["bits"], data["values"], data["window"]) == (32, True, 9)
    assert len(heads) == 6
    for layer in (0, 1):
        for head in (0, 1, 2):
            assert np.array_equal(
                weights(heads[f"head-{layer}-{head}"], data), maps.weights(layer)[head]
            )
            assert np.array_equal(heads[f"head-{layer}-{head}"]["v"], maps.v[layer, head])


def test_sixteen_bits_where_they_hold_and_values_left_out_where_they_must(monkeypatch):
    maps = tiny_maps("the same words again and again, " * 4)
    exact = sum(x.nbytes for x in (maps.q, maps.k, maps.v)) * 4 / 3
    for share, values in ((0.6, True), (0.4, False)):
        monkeypatch.setattr(page, "_texts", lambda pieces: [["x"]] * len(pieces))
        limit = int((exact * share + page.beside_numbers()) / 0.97)
        data, heads = held(render_page(maps, max_bytes=limit))
        assert (data["bits"], data["values"]) == (16, values)
        found = {name: weights(head, data) for name, head in heads.items()}
        errors = [
            np.abs(found[f"head-{i}-{j}"] - maps.weights(i)[j]).max()
            for i in (0, 1)
            for j in (0, 1, 2)
        ]
        assert max(errors) == pytest.approx(data["error"], abs=1e-6)
        assert 0 < max(errors) <= page.TOLERANCE
    monkeypatch.setattr(page, "TOLERANCE", 1e-9)
    data, _ = held(render_page(maps, max_bytes=int((exact * 0.7 + page.beside_numbers()) / 0.97)))
    assert (data["bits"], data["values"]) == (32, False)


def test_too_much_is_refused_with_the_way_out():
    maps = tiny_maps("a" * 128)
    with pytest.raises(
        UserError,
        match=r"2 layers x 3 heads x 128 tokens .* \d\.\d MB; the limit is 0\.2 MB\nchoose",
    ):
        render_page(maps, max_bytes=160_000)


def test_the_page_may_load_nothing_and_run_only_itself():
    text = render_page(tiny_maps())
    elements = Elements(text)
    policy = next(
        a["content"]
        for tag, a in elements.found
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        run = [
            elements.texts[i]
            for i, (found, a) in enumerate(elements.found)
            if found == tag and "type" not in a
        ]
        assert len(run) == 1
        assert (
            rules[rule]
            == f"'sha256-{base64.b64encode(hashlib.sha256(run[0].encode()).digest()).decode()}'"
        )
    for tag, attributes in elements.found:
        assert not {"src", "srcset", "style", "action", "data", "poster"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
        assert "href" not in attributes or tag == "a"
    assert text.index("Content-Security-Policy") < text.index("<title>") < text.index("<style>")


def test_text_can_not_become_markup():
    plain, nasty = (
        Elements(render_page(tiny_maps(text), title=text))
        for text in ("x" * len(NASTY.encode()), NASTY)
    )
    assert [tag for tag, _ in nasty.found] == [tag for tag, _ in plain.found]
    assert NASTY.split(" ")[0] in nasty.texts[[tag for tag, _ in nasty.found].index("title")]


def test_the_script_writes_no_markup():
    script = page._join(page.SCRIPTS, "js")
    sinks = "innerHTML outerHTML insertAdjacentHTML document.write eval( Function( "
    sinks += "fetch( XMLHttpRequest import( WebSocket"
    assert [sink for sink in sinks.split() if sink in script] == []


def test_no_two_scripts_give_the_same_name():
    """They are joined into one, in which a later function silently takes an earlier's place."""
    given = []
    for name in page.SCRIPTS:
        script = (page.WEB / f"{name}.js").read_text(encoding="utf-8")
        given += re.findall(r"^(?:async )?(?:function\*?|const|let|class) ([\w$]+)", script, re.M)
    assert len(given) > 200
    assert [name for name, count in Counter(given).items() if count > 1] == []


def test_both_sides_of_the_dispute_are_always_in_view():
    text = render_page(tiny_maps())
    footer = text[text.index("<footer>") : text.index("</footer>")]
    assert "where a value came from, not why the model answered" in footer
    assert "arxiv.org/abs/1902.10186" in footer
    assert "arxiv.org/abs/1908.04626" in footer
    assert "hidden" not in footer


def test_labels_words_and_predictions():
    model = tiny_model()
    maps = read_text(model, list(b"It is\nso\xe2\x80"), bytes)
    data, _ = held(render_page(maps, measure_roles(maps), facts=["a fact"]))
    assert data["tokens"] == [
        ["I"],
        ["t"],
        ["␣", " "],
        ["i"],
        ["s"],
        ["↵", "\n"],
        ["s"],
        ["o"],
        ["⟨E2⟩"],
        ["⟨80⟩"],
    ]
    assert data["words"] == [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert data["wordTokens"] == [["It"], ["␣is", " is"], ["↵", "\n"], ["so⟨E2 80⟩"]]
    assert [len(row) for row in data["predictions"]] == [5] * 10
    assert data["losses"] == pytest.approx(maps.losses, rel=1e-6)
    assert data["facts"] == ["a fact"]


def test_a_run_that_diverged_still_makes_a_page(tmp_path):
    model = tiny_model()
    for weight in (model.unembed.weight, model.blocks[1].attention.query.weight):
        weight.data[:] = float("nan")
    save_probe(tmp_path, 0, model, [1, 2, 3])
    curve = [(0, 4.0, float("inf")), (5, float("nan"), 1)]
    data, _ = held(
        render_page(
            read_text(model, [1, 2, 3], bytes), probe=load_probe(tmp_path, bytes), curve=curve
        )
    )
    assert data["losses"] == [None, None]
    assert data["learning"]["curve"] == [[0, 4, None], [5, None, 1]]


def test_one_token_makes_a_page():
    data, heads = held(render_page(tiny_maps("a")))
    assert data["roles"]["scores"][0][0] == [None] * 7
    assert weights(heads["head-0-0"], data).tolist() == [[1.0]]


def test_snapshots_are_held_as_room_allows(tmp_path):
    model, tokens = tiny_model(), list(b"a probe text, said twice. " * 3)
    for step in range(0, 90, 10):
        save_probe(tmp_path, step, model, tokens)
    probe, maps = load_probe(tmp_path, bytes), read_text(model, tokens, bytes)
    curve = [(step, 3.0 - step / 100, 3.1 - step / 100) for step in range(0, 90, 10)]
    whole = render_page(maps, probe=probe, curve=curve)
    data, _ = held(whole)
    assert data["learning"]["steps"] == list(range(0, 90, 10))
    assert data["learning"]["curve"] == [pytest.approx(list(point)) for point in curve]
    assert (
        zlib.decompress(base64.b64decode(Elements(whole).scripts()["snapshot-3"]))
        == probe.maps[3].tobytes()
    )
    some, files = page._learning(
        probe, curve, 4.5 / 9 * sum(len(zlib.compress(x.tobytes(), 9)) for x in probe.maps) * 4 / 3
    )
    assert some["steps"] == [0, 30, 60, 80]
    assert len(files) == len(some["scores"]) == len(some["called"]) == 4
    assert page._learning(probe, curve, 10) == (None, {})
