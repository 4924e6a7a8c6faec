"""Pictures for papers and slides, PNG or SVG by the file's name. matplotlib is imported when one is
drawn.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from viz.colour import colour_scale
from viz.maps import AttentionMaps
from viz.probe import Probe
from viz.roles import ROLES, THRESHOLD, HeadRoles, excess

MAX_LABELS = 100
"""Tokens that one map's axes name; beyond, positions are numbered."""
_HATCHED = {"hatch": "////", "facecolor": "0.96", "edgecolor": "0.82", "linewidth": 0.0}


def make_figure(width: float, height: float, n_row: int = 1, n_column: int = 1):
    """A Figure without pyplot, its global state and third of a second to load, and its axes,
    (n_row, n_column).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(n_row, n_column, squeeze=False)


def save_figure(figure, path: Path) -> None:
    """Write beside `path` and rename, so that no half picture is left. The same picture is the same
    bytes.
    """
    import matplotlib

    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    dateless = {"Date": None} if path.suffix == ".svg" else None
    salt = {"svg.hashsalt": "glassgpt"}
    try:
        with warnings.catch_warnings(record=True) as caught, matplotlib.rc_context(salt):
            warnings.simplefilter("always")
            figure.savefig(temporary, dpi=160, metadata=dateless)
        if lacking := {str(each.message) for each in caught if "Glyph" in str(each.message)}:
            print(
                f"note: the font of {path.name} lacks {len(lacking)} of its characters: "
                "they are drawn as boxes",
                file=sys.stderr,
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # a token is text, never mathematics


def draw_maps(maps: AttentionMaps, roles: HeadRoles, title: str, path: Path) -> None:
    """The grid of maps, layers down and heads across; a single head is drawn large with its tokens'
    labels.
    """
    from matplotlib.colors import ListedColormap, PowerNorm

    n_layer, n_head, n_token = len(maps.layers), len(maps.heads), len(maps.tokens)
    single = n_layer * n_head == 1
    side = max(5.5, 0.16 * min(n_token, MAX_LABELS)) if single else 1.6 if n_layer > 1 else 2.6
    figure, axes = make_figure(side * n_head + 1.0, side * n_layer + 0.9, n_layer, n_head)
    colours, norm, called = (
        ListedColormap(colour_scale() / 255),
        PowerNorm(0.5, 0, 1),
        roles.names(),
    )
    for i, layer in enumerate(maps.layers):
        shown = np.ma.masked_array(
            maps.weights(layer), np.broadcast_to(~maps.allowed(), (n_head, n_token, n_token))
        )
        for j, head in enumerate(maps.heads):
            panel = axes[i, j]
            panel.patch.set(**_HATCHED)
            image = panel.imshow(shown[j], cmap=colours, norm=norm, interpolation="nearest")
            panel.set_title(f"L{layer} H{head}  {called[i, j]}", fontsize=11 if single else 7)
            panel.set(xticks=[], yticks=[])
    if single and n_token <= MAX_LABELS:
        names = [_plain(name) for name in maps.labels]
        panel.set_xticks(
            range(n_token), names, fontsize=7, rotation=90 if max(map(len, names)) > 1 else 0
        )
        panel.set_yticks(range(n_token), names, fontsize=7)
        panel.tick_params(length=0)
    elif single:
        panel.set(xticks=range(0, n_token, 64), yticks=range(0, n_token, 64))
    figure.supxlabel("key: the token looked at", fontsize=9)
    figure.supylabel("query: the token that looks", fontsize=9)
    bar = figure.colorbar(
        image, ax=axes, shrink=min(1.0, 3.0 / (side * n_layer)), ticks=[0, 0.01, 0.1, 0.3, 1]
    )
    bar.set_label("attention weight", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.suptitle(_plain(title), fontsize=11)
    save_figure(figure, path)


def draw_roles(
    roles: HeadRoles, layers: list[int], heads: list[int], title: str, path: Path
) -> None:
    """The role table: a line a head, a column a role, mean weight in percent; the ground is how far
    from uniform attention.
    """
    from matplotlib.colors import ListedColormap

    n_row = len(layers) * len(heads)
    share, scores = (
        x.reshape(n_row, -1) for x in (excess(roles.scores, roles.uniform), roles.scores)
    )
    figure, axes = make_figure(8.5, 1.3 + 0.24 * n_row)
    panel, entropy = axes[0, 0], roles.entropy.ravel()
    panel.imshow(
        share.clip(0, 1), cmap=ListedColormap(colour_scale() / 255), vmin=0, vmax=1, aspect="auto"
    )
    for (i, j), value in np.ndenumerate(scores):
        text = "" if np.isnan(value) else f"{100 * value:.0f}"
        panel.text(
            j,
            i,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if share[i, j] > 0.5 else "black",
        )
    uniform = [
        f"{role}\n({100 * value:.0f})" for role, value in zip(ROLES, roles.uniform, strict=True)
    ]
    panel.set_xticks(range(len(ROLES)), uniform, fontsize=8)
    panel.xaxis.tick_top()
    names = [f"L{layer} H{head}" for layer in layers for head in heads]
    panel.set_yticks(
        range(n_row),
        [f"{n}  {c}" for n, c in zip(names, roles.names().ravel(), strict=True)],
        fontsize=8,
    )
    right = panel.secondary_yaxis("right")
    right.set_yticks(range(n_row), [f"{bits:.1f} bits" for bits in entropy], fontsize=8)
    for axis in (panel, right):
        axis.tick_params(length=0)
    figure.suptitle(
        _plain(f"{title}: weight in % by role (uniform attention in brackets), entropy of a row"),
        fontsize=9,
    )
    save_figure(figure, path)


def draw_learning(
    probe: Probe, curve: Sequence[tuple[int, float, float]], title: str, path: Path
) -> None:
    """Loss over training, and how far the strongest head of each role has come from uniform
    attention to a perfect head.
    """
    figure, axes = make_figure(8, 5.6, 2)
    (loss,), (strength,) = axes
    steps = [step for step, _, _ in curve]
    for index, name in ((1, "training split"), (2, "validation split")):
        loss.plot(steps, [point[index] for point in curve], marker=".", label=name)
    loss.set(ylabel="loss (nats per token)", title=_plain(title))
    share = excess(probe.scores, probe.uniform)
    for index, role in enumerate(ROLES):
        strength.plot(probe.steps, share[..., index].max((1, 2)), marker=".", label=role)
    strength.axhline(THRESHOLD, color="0.6", linestyle=":", linewidth=1)
    strength.set(xlabel="step", ylabel="strongest head\n0 uniform, 1 perfect", ylim=(-0.05, 1.05))
    strength.sharex(loss)
    for panel in (loss, strength):
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_figure(figure, path)
