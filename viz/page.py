"""The attention page: one HTML file that holds its data and needs no network.

It carries queries, keys and values; the browser computes scores, weights and all that follows: one
source for what is shown.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np

from errors import UserError
from viz.colour import colour_scale
from viz.labels import SIGNS, label, word_index
from viz.living import Living
from viz.maps import AttentionMaps
from viz.probe import Probe
from viz.roles import ROLES, THRESHOLD, HeadRoles, measure_roles, name_roles

MAX_BYTES = 15_000_000
TOLERANCE = 5e-4
"""Half a unit of the last digit of a weight (0.1 %): 16 bits are enough where no weight is off by
more.
"""
LEARNING_SHARE = 0.25
"""Of the page's bytes, at most, for maps over training."""
LEARNING_BYTES = 1_000_000
"""The most for them in a page that holds the model, which takes most of it."""
WEB = Path(__file__).parent / "web"
SCRIPTS = [
    # The model: no page in these files, to be read beside the Python they mirror.
    *["weights", "positions", "attention", "gpt", "sampling", "tokenizer"],
    # What is shown, and what all views draw with.
    *["helpers", "labels", "reading", "roles", "drawing", "maps"],
    # The views, and the frame around them.
    "text",
    "overview",
    "head",
    "equation",
    "learning",
    "typing",
    "write",
    *["flow_numbers", "flow_boxes", "flow"],
    *["lens", "what_if"],
    "frame",
]
"""The page's scripts, viz/web/NAME.js, in the order in which they are joined into one."""
VIEWS = ["text", "flow", "overview", "head", "equation", "lens", "what_if", "write", "learning"]
"""The views, viz/web/NAME.html, in the order of their tabs."""
STYLES = ["page", "typing", "write", "flow", "lens", "what_if"]
"""The page's style sheets, viz/web/NAME.css."""


def render_page(
    maps: AttentionMaps,
    roles: HeadRoles | None = None,
    title: str = "attention",
    facts: Sequence[str] = (),
    probe: Probe | None = None,
    curve: Sequence[tuple[int, float, float]] = (),
    max_bytes: int = MAX_BYTES,
    living: Living | None = None,
) -> str:
    """The page as HTML text of at most `max_bytes`. `roles` are measured on the text if not given;
    `facts` stand under the title.

    With `living` the page holds the model itself, which reads the text anew; else what it made of
    this text alone. The Learning view plays `probe` beside `curve`, evaluations as (step, train
    loss, validation loss).

    Recorded numbers are float32 if all fit so; else 16-bit integers with a scale per head and
    channel, if that holds (TOLERANCE; float16 is ten times coarser), without values if need be;
    else queries and keys in float32. Raises UserError where none fits.
    """
    roles = roles or measure_roles(maps)
    facts = [*facts, living.fact] if living else list(facts)
    room = 0.97 * max_bytes - beside_numbers()
    if living:
        blocks = {"weights": living.block}
        storage = {"bits": 32, "values": True, "error": 0.0}
        room = min(room - living.size, LEARNING_BYTES)
    else:
        blocks, storage = _store(maps, room, max_bytes)
        room -= sum(len(block) for block in blocks.values()) * 4 / 3
        room = min(room, LEARNING_SHARE * max_bytes)
    told, snapshots = _learning(probe, curve, room) if probe else (None, {})
    words = word_index(maps.pieces)
    data = {
        "title": title,
        "facts": facts,
        "layers": maps.layers,
        "heads": maps.heads,
        "whole": maps.whole,
        "dHead": maps.q.shape[-1],
        "causal": maps.causal,
        "window": maps.window,
        **storage,
        "tokens": _texts(maps.pieces),
        "words": words,
        "wordTokens": _texts(
            [
                b"".join(maps.pieces[words.index(i) :][: words.count(i)])
                for i in range(words[-1] + 1)
            ]
        ),
        "predictions": [
            [[label(piece), _short(p)] for piece, p in row] for row in maps.predictions
        ],
        "losses": _short(maps.losses),
        "roles": {
            "names": list(ROLES),
            "about": list(ROLES.values()),
            "threshold": THRESHOLD,
            "called": roles.names().tolist(),
        }
        | {
            "scores": _short(roles.scores),
            "uniform": _short(roles.uniform),
            "entropy": _short(roles.entropy),
        },
        "learning": told,
        "model": living.told if living else None,
        "scale": {
            "light": colour_scale().tobytes().hex(),
            "dark": colour_scale(dark=True).tobytes().hex(),
        },
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )  # nothing can end the script element
    held = [f'<script type="application/json" id="data">{text}</script>']
    for name, block in (blocks | snapshots).items():
        held.append(
            f'<script type="text/plain" id="{name}">{base64.b64encode(block).decode()}</script>'
        )
    style = _join(STYLES, "css")
    script = _join(SCRIPTS, "js")
    parts = {"TITLE": escape(title), "STYLE": style, "SCRIPT": script, "DATA": "\n".join(held)}
    parts |= {"STYLE_HASH": _csp_hash(style), "SCRIPT_HASH": _csp_hash(script)}
    parts["VIEWS"] = _join(VIEWS, "html")
    frame = (WEB / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"@@([A-Z_]+)@@", lambda match: parts[match[1]], frame)
    if (size := len(page.encode())) > max_bytes:
        raise _too_large(maps, size, max_bytes)
    return page


def beside_numbers() -> int:
    """Bytes of a page without its numbers: scripts, styles and views, and about what a text's
    labels and predictions take.
    """
    files = _join(SCRIPTS, "js") + _join(STYLES, "css") + _join(VIEWS, "html")
    return len(files.encode()) + 70_000


def _join(names: Sequence[str], suffix: str) -> str:
    """The text of these files of viz/web/, one after another."""
    return "\n".join((WEB / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names)


def _csp_hash(text: str) -> str:
    """How a Content-Security-Policy names this inline text, and no other (W3C, CSP Level 3, section
    2.3.1).
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _short(values):
    """Numbers at seven significant digits, those not finite as None, for JSON."""
    if isinstance(values, list | tuple | np.ndarray):
        return [_short(value) for value in values]
    return float(f"{values:.7g}") if np.isfinite(values) else None


def _texts(pieces: Sequence[bytes]) -> list[list[str]]:
    """[label, text as it reads] of each token; no text where it is no more than the label or can't
    be shown plainly.
    """
    texts = []
    for piece in pieces:
        shown = label(piece)
        plain = piece.decode("utf-8", "replace")
        signs = plain.translate(str.maketrans(SIGNS))
        texts.append([shown, plain] if shown == signs != plain else [shown])
    return texts


def _store(maps: AttentionMaps, room: float, limit: int) -> tuple[dict[str, bytes], dict]:
    """The bytes of each head, `room` in all as base64, and how to read them: bits, whether values
    are there, a weight's error.

    A head is its q, k and v, each (T, K); as 16-bit integers they follow their scales, (K,) float32
    each.
    """
    arrays, width, error = [maps.q, maps.k, maps.v], 4, 0.0

    def size(n_array: int, width: int) -> float:
        return n_array * width * maps.q.size * 4 / 3

    scales: list[np.ndarray] = []
    if size(3, 4) > room:
        n_array = 3 if size(3, 2) <= room else 2
        scales = [
            np.maximum(np.abs(x).max(2, keepdims=True), 1e-30) / np.float32(32767)
            for x in arrays[:n_array]
        ]
        whole = [
            np.round(x / scale).astype(np.int16) for x, scale in zip(arrays, scales, strict=False)
        ]
        q, k = (x * scale for x, scale in zip(whole[:2], scales, strict=False))
        kept = replace(maps, q=q, k=k)
        error = float(
            np.max(
                [np.abs(kept.weights(layer) - maps.weights(layer)).max() for layer in maps.layers]
            )
        )
        arrays, width = (whole, 2) if error <= TOLERANCE else (arrays[:2], 4)
        if size(len(arrays), width) > room:
            raise _too_large(maps, size(len(arrays), width) + 200_000, limit)
    blocks = {}
    for i, layer in enumerate(maps.layers):
        for j, head in enumerate(maps.heads):
            blocks[f"head-{layer}-{head}"] = b"".join(
                x[i, j].tobytes() for x in (scales if width == 2 else []) + arrays
            )
    return blocks, {
        "bits": 8 * width,
        "values": len(arrays) == 3,
        "error": _short(error) if width == 2 else 0.0,
    }


def _too_large(maps: AttentionMaps, size: float, limit: int) -> UserError:
    shape = f"{len(maps.layers)} layers x {len(maps.heads)} heads x {len(maps.tokens):,} tokens"
    return UserError(
        f"{shape} make a page of {size / 1e6:.1f} MB; the limit is {limit / 1e6:.1f} MB\n"
        "choose fewer with --layer, --head or --tokens FIRST:END, or allow more with --max-mb"
    )


def _learning(
    probe: Probe, curve: Sequence[tuple], room: float
) -> tuple[dict | None, dict[str, bytes]]:
    """The Learning view's data and its compressed snapshots: as many, spread over training, as
    `room` bytes of base64 hold.
    """
    packed = [zlib.compress(weights.tobytes(), 9) for weights in probe.maps]
    count = len(packed)
    while count and sum(len(packed[i]) for i in _spread(len(packed), count)) * 4 / 3 > room:
        count -= 1
    keep = _spread(len(packed), count)
    told = {
        "steps": [probe.steps[i] for i in keep],
        "tokens": _texts(probe.pieces),
        "called": name_roles(probe.scores, probe.uniform)[keep].tolist(),
        "scores": _short(probe.scores[keep]),
        "uniform": _short(probe.uniform),
        "forming": probe.forming(),
        "curve": _short(curve[:: max(1, len(curve) // 500)]),
    }
    return (told if keep else None), {f"snapshot-{n}": packed[i] for n, i in enumerate(keep)}


def _spread(n: int, count: int) -> list[int]:
    """`count` of the numbers below n, evenly spread, the last among them."""
    return [n - 1 - (i * (n - 1) // max(1, count - 1)) for i in range(count)][::-1]
