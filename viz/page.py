"""The attention page: one HTML file that holds its data and needs no network.

It carries queries, keys and values; the browser computes scores, weights and all that follows, so there is one source for what is shown.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from errors import UserError
from viz.colour import colour_scale
from viz.maps import AttentionMaps, label, word_index
from viz.probe import Probe
from viz.roles import LOCAL, ROLES, THRESHOLD, HeadRoles, measure_roles, name_roles

MAX_BYTES = 15_000_000
TOLERANCE = 5e-4
"""Half a unit of the last digit a weight is shown with (0.1 %): float16 is used only where no weight is off by more."""
LEARNING_SHARE = 0.25
"""Of the page's bytes, at most, for maps over training."""


@dataclass(frozen=True)
class Learning:
    """What the Learning view plays: snapshots, the bytes of their tokens, and evaluations as (step, train loss, validation loss)."""

    probe: Probe
    pieces: list[bytes]
    curve: list[tuple[int, float, float]]


def render_page(
    maps: AttentionMaps,
    roles: HeadRoles | None = None,
    title: str = "attention",
    facts: Sequence[str] = (),
    learning: Learning | None = None,
    max_bytes: int = MAX_BYTES,
) -> str:
    """The page as HTML text of at most `max_bytes`. `roles` are measured on the text if not given; `facts` stand below the title.

    q, k and v are stored as float32 if that fits, else as float16 if that holds (TOLERANCE), v left out if need be. Raises UserError
    where nothing fits.
    """
    roles = roles or measure_roles(maps)
    arrays, storage = _choose_storage(maps, int(0.97 * max_bytes) - 150_000)
    blocks = {
        f"head-{layer}-{head}": b"".join(array[i, j].tobytes() for array in arrays)
        for i, layer in enumerate(maps.layers)
        for j, head in enumerate(maps.heads)
    }
    room = min(LEARNING_SHARE * max_bytes, 0.97 * max_bytes - 150_000 - sum(len(block) for block in blocks.values()) * 4 / 3)
    told, snapshots = _learning(learning, room) if learning else (None, {})
    words = word_index(maps.pieces)
    data = {
        "title": title,
        "facts": list(facts),
        "layers": maps.layers,
        "heads": maps.heads,
        "whole": maps.whole,
        "dHead": maps.q.shape[-1],
        "causal": maps.causal,
        "window": maps.window,
        **storage,
        "tokens": _texts(maps.pieces),
        "words": words,
        "wordTokens": _texts([b"".join(maps.pieces[words.index(i) : words.index(i) + words.count(i)]) for i in range(words[-1] + 1)]),
        "predictions": [[[label(piece), _short(p)] for piece, p in row] for row in maps.predictions],
        "losses": _short(maps.losses),
        "roles": {"names": list(ROLES), "about": list(ROLES.values()), "threshold": THRESHOLD, "local": LOCAL}
        | {"scores": _short(roles.scores), "uniform": _short(roles.uniform), "called": roles.names().tolist()},
        "learning": told,
        "scale": {"light": colour_scale().tobytes().hex(), "dark": colour_scale(dark=True).tobytes().hex()},
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # nothing can end the script element
    held = "\n".join(
        f'<script type="text/plain" id="{name}">{base64.b64encode(block).decode()}</script>' for name, block in (blocks | snapshots).items()
    )
    folder = Path(__file__).parent
    style, script = (f"\n{(folder / name).read_text(encoding='utf-8')}" for name in ("page.css", "page.js"))
    parts = {
        "TITLE": escape(title),
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_HASH": _csp_hash(style),
        "SCRIPT_HASH": _csp_hash(script),
        "DATA": f'<script type="application/json" id="data">{text}</script>\n{held}',
    }
    template = (folder / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"@@([A-Z_]+)@@", lambda match: parts[match[1]], template)
    if len(page.encode()) > max_bytes:
        raise _too_large(maps, len(page.encode()), max_bytes)
    return page


def _csp_hash(text: str) -> str:
    """The source expression that lets a Content-Security-Policy admit this inline text and no other (W3C CSP Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _short(values):
    """Numbers at seven significant digits, NaN as None, for JSON."""
    if isinstance(values, list | np.ndarray):
        return [_short(value) for value in values]
    return None if values != values else float(f"{values:.7g}")


def _texts(pieces: Sequence[bytes]) -> list[list[str]]:
    """[label, text as it reads] of each token; the text is left out where it is no more than the label, or can't be shown plainly."""
    texts = []
    for piece in pieces:
        shown, plain = label(piece), piece.decode("utf-8", "replace")
        signs = plain.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")
        texts.append([shown, plain] if shown == signs != plain else [shown])
    return texts


def _choose_storage(maps: AttentionMaps, room: int) -> tuple[list[np.ndarray], dict]:
    """The arrays to embed in `room` bytes of base64 and how to read them: dtype, whether values are there, largest error of a weight."""
    single, n_number = [maps.q, maps.k, maps.v], maps.q.size
    if 3 * n_number * 4 * 4 / 3 <= room:
        return single, {"dtype": "float32", "values": True, "error": 0.0}
    if 2 * n_number * 2 * 4 / 3 > room:
        raise _too_large(maps, int(2 * n_number * 2 * 4 / 3) + 200_000, room)
    with np.errstate(over="ignore"):
        half = [array.astype(np.float16) for array in single]
    kept = replace(maps, q=half[0].astype(np.float32), k=half[1].astype(np.float32))
    error = float(np.max([np.abs(kept.weights(layer) - maps.weights(layer)).max() for layer in maps.layers]))  # NaN holds nothing
    if error <= TOLERANCE:
        values = 3 * n_number * 2 * 4 / 3 <= room
        return half[: 2 + values], {"dtype": "float16", "values": values, "error": _short(error)}
    if 2 * n_number * 4 * 4 / 3 > room:
        raise _too_large(maps, int(2 * n_number * 4 * 4 / 3) + 200_000, room)
    return single[:2], {"dtype": "float32", "values": False, "error": 0.0}


def _too_large(maps: AttentionMaps, size: int, limit: int) -> UserError:
    shape = f"{len(maps.layers)} layers x {len(maps.heads)} heads x {len(maps.tokens):,} tokens"
    return UserError(
        f"{shape} make a page of {size / 1e6:.1f} MB; the limit is {limit / 1e6:.1f} MB\n"
        "choose fewer with --layer, --head or --tokens FIRST:END, or allow more with --max-mb"
    )


def _learning(learning: Learning, room: float) -> tuple[dict | None, dict[str, bytes]]:
    """The Learning view's data and its compressed snapshots: as many, evenly spread over training, as `room` bytes of base64 hold."""
    probe = learning.probe
    packed = [zlib.compress(weights.tobytes(), 9) for weights in probe.maps]
    keep = list(range(len(packed)))
    while sum(len(packed[i]) for i in keep) * 4 / 3 > room and len(keep) > 1:
        keep = keep[::2] if keep[-1] == keep[::2][-1] else [*keep[::2], keep[-1]]
        if len(keep) == 2:
            keep = keep[-1:]
    if sum(len(packed[i]) for i in keep) * 4 / 3 > room:
        return None, {}
    told = {
        "steps": [probe.steps[i] for i in keep],
        "tokens": _texts(learning.pieces),
        "called": name_roles(probe.scores, probe.uniform)[keep].tolist(),
        "scores": _short(probe.scores[keep]),
        "uniform": _short(probe.uniform),
        "forming": probe.forming(),
        "curve": learning.curve[:: max(1, len(learning.curve) // 500)],
    }
    return told, {f"snapshot-{n}": packed[i] for n, i in enumerate(keep)}
