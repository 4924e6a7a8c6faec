"""viz.figures: every picture is drawn, says what it shows, and is written whole."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from test_viz_maps import tiny_maps, tiny_model

from viz import figures
from viz.colour import colour_scale
from viz.probe import load_probe, save_probe
from viz.roles import measure_roles

pytestmark = pytest.mark.slow

TEXT = "to be $x$ <b>\n"


def lightness(scale):
    """OKLab's L of sRGB bytes."""
    x = scale / 255
    linear = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    red, green, blue = linear.T
    long = 0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue
    medium = 0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue
    short = 0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue
    return np.cbrt(np.stack([long, medium, short], -1)) @ np.array(
        [0.2104542553, 0.7936177850, -0.0040720468]
    )


@pytest.mark.parametrize("dark", [False, True])
def test_the_scale_is_even_in_lightness(dark):
    steps = np.diff(lightness(colour_scale(dark).astype(float))) * 255
    assert (np.sign(steps.mean()), abs(steps.mean()) > 0.65) == (1 if dark else -1, True)
    smooth = np.convolve(steps, np.ones(16) / 16, "valid")
    assert abs(smooth / steps.mean() - 1).max() < 0.1


def shown_text(path):
    """The comments that matplotlib writes beside each text it draws as outlines."""
    return " ".join(re.findall(r"<!-- (.*?) -->", path.read_text(encoding="utf-8"), re.DOTALL))


@pytest.mark.parametrize(("layers", "heads"), [([], []), ([1], []), ([1], [2])])
def test_grid_layer_and_head(tmp_path, layers, heads):
    maps = tiny_maps(TEXT).select(layers, heads)
    for name in ("maps.svg", "maps.png"):
        figures.draw_maps(maps, measure_roles(maps), r"$\frac{$", tmp_path / name)
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "maps.svg")
    text = shown_text(tmp_path / "maps.svg")
    assert all(f"L{layer} H{head}" in text for layer in maps.layers for head in maps.heads)
    assert ("␣" in text) == bool(heads)  # the tokens stand beside a single head
    assert text.count("L1 H") == len(maps.heads)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["maps.png", "maps.svg"]


def test_the_same_picture_is_the_same_bytes(tmp_path):
    maps = tiny_maps(TEXT)
    for name in ("a.svg", "b.svg"):
        figures.draw_maps(maps, measure_roles(maps), "title", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_forbidden_cells_are_hatched_and_zero_is_not(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: drawn.append(figure))
    maps = tiny_maps("abcd", window=2).select([0], [0])
    figures.draw_maps(maps, measure_roles(maps), "title", tmp_path / "x.png")
    panel = drawn[0].axes[0]
    assert panel.patch.get_hatch() == "////"
    image = panel.images[0].get_array()
    assert image.mask.tolist() == (~maps.allowed()).tolist()
    assert np.array_equal(image.filled(0), maps.weights(0)[0])


def test_role_table(tmp_path):
    maps = tiny_maps(TEXT)
    measured = measure_roles(maps)
    figures.draw_roles(measured, maps.layers, maps.heads, "title", tmp_path / "roles.svg")
    text = shown_text(tmp_path / "roles.svg")
    assert "previous (" in text.replace("\n", " ")
    assert f"{100 * measured.scores[1, 2, 0]:.0f}" in text.split()
    assert f"{measured.entropy[0, 1]:.1f} bits" in text


def test_learning_picture(tmp_path):
    model = tiny_model()
    for step in (0, 10):
        save_probe(tmp_path / "attention", step, model, list(TEXT.encode()) * 5)
    probe = load_probe(tmp_path / "attention", bytes)
    figures.draw_learning(
        probe, [(0, 4.0, 4.1), (10, 3.0, 3.2)], "title", tmp_path / "learning.svg"
    )
    text = shown_text(tmp_path / "learning.svg")
    assert "validation split" in text
    assert "induction" in text
