"""One sequential colour scale for page and pictures: 0 is the paper, 1 the ink, equal steps look
equal.
"""

import numpy as np

N_COLOUR = 256


def colour_scale(dark: bool = False) -> np.ndarray:
    """sRGB of the scale from 0 to 1, uint8 of shape (256, 3), for a light or a dark background.

    Lightness runs evenly in OKLab (Ottosson 2020, "A perceptual color space for image processing"),
    so it is perceptually uniform and can be read in grey; hue and chroma only help.
    """
    t = np.linspace(0, 1, N_COLOUR)
    lightness = 0.225 + 0.745 * t if dark else 0.99 - 0.71 * t
    hue = np.deg2rad(270 - 80 * t if dark else 195 + 85 * t)
    chroma = (
        0.015 + 0.1 * np.sin(np.pi * t**0.9)
        if dark
        else 0.135 * np.sin(np.pi * (0.12 + 0.72 * t)) - 0.05 * (1 - t)
    )
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = np.stack(
        [
            4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
            -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
            -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
        ],
        axis=-1,
    ).clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(255 * encoded).astype(np.uint8)
