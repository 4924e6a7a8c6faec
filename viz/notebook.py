"""Attention maps that show themselves in a notebook: the page, in a frame."""

from collections.abc import Sequence
from html import escape

from model.gpt import GPT
from viz import maps
from viz.maps import AttentionMaps, Decode
from viz.page import render_page


class PageMaps(AttentionMaps):
    """Attention maps whose picture in a notebook is the attention page."""

    def _repr_html_(self) -> str:
        style = "width:100%;height:900px;border:0"
        page = escape(render_page(self))
        return f'<iframe srcdoc="{page}" style="{style}" title="Attention maps"></iframe>'


def read_text(model: GPT, tokens: Sequence[int], decode: Decode) -> AttentionMaps:
    """As `viz.maps.read_text`, but what comes back shows itself.

    Raises FloatingPointError where the model's logits are no finite numbers.
    """
    return maps.read_text(model, tokens, decode, PageMaps, must_be_finite=True)
