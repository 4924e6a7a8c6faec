"""What a notebook shows."""

import html
import re

from test_viz_maps import tiny_model

from data.tokenizer import ByteTokenizer
from viz.notebook import read_text


def test_a_notebook_shows_the_page_in_a_frame():
    shown = read_text(
        tiny_model(), list(b"a <b> onerror"), ByteTokenizer().decode_bytes
    )._repr_html_()
    frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*" title="[^"]*"></iframe>', shown)
    page = html.unescape(frame[1])
    assert page.startswith("<!doctype html>")
    assert "onerror" not in re.sub(r'<script type="application/json".*?</script>', "", page)


def test_a_selection_shows_itself_too():
    shown = read_text(tiny_model(), list(b"abc"), ByteTokenizer().decode_bytes)
    page = html.unescape(shown.select([1], [2])._repr_html_())
    assert 'id="head-1-2"' in page
    assert 'id="head-0-0"' not in page
