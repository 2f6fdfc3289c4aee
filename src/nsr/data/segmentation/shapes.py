"""Textured shapes: a generated data set of five classes, so that every experiment runs anywhere in a minute.

A noisy background (class 0) carries disks, squares, triangles and rings (classes 1 to 4), each with a texture of its
own and a random colour; later shapes cover earlier ones, and a thin border around each is ignored, as in VOC.
"""

import io
from typing import Literal

import numpy as np
from PIL import Image

from nsr.data.segmentation.split import IGNORE, Item, Split

NUM_CLASSES = 5
_SIZES = {"train": 96, "val": 48}
_STREAM = {"train": 0, "val": 1}


def shapes(split: Literal["train", "val"], count: int | None = None, seed: int = 0) -> Split:
    """The generated split; item ``i`` depends on ``(seed, split, i)`` alone.

    Args:
        split: Which part.
        count: Images; by default 96 to train on and 48 to validate with.
        seed: Of the generator.
    """
    items = []
    for index in range(_SIZES[split] if count is None else count):
        image, labels = draw(np.random.default_rng([seed, _STREAM[split], index]))
        name = f"shapes {split} {index}"
        items.append(Item(_png(image), _png(labels), f"{name} image", f"{name} mask"))
    return Split(f"shapes {split}", NUM_CLASSES, items)


def draw(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One image ``[H, W, 3]`` and its labels ``[H, W]``; sides between 64 and 96 pixels."""
    height, width = rng.integers(64, 97, size=2)
    y, x = np.mgrid[:height, :width].astype(np.float64)
    image = rng.uniform(60, 200, size=3) + rng.normal(0, 12, size=(height, width, 1))
    labels = np.zeros((height, width), dtype=np.uint8)
    for _ in range(rng.integers(2, 5)):
        kind = int(rng.integers(1, NUM_CLASSES))
        radius = rng.uniform(10, 24)
        dy, dx = y - rng.uniform(0, height), x - rng.uniform(0, width)
        distance = _distance(kind, dy, dx, radius)
        inside, border = distance < -1, np.abs(distance) <= 1
        shading = _texture(kind, y, x)[..., None]
        colour = rng.uniform(30, 225, size=3) + 60 * shading + rng.normal(0, 8, size=(height, width, 1))
        image = np.where((inside | border)[..., None], colour, image)
        labels = np.where(inside, np.uint8(kind), np.where(border, np.uint8(IGNORE), labels))
    return image.clip(0, 255).astype(np.uint8), labels


def _distance(kind: int, dy: np.ndarray, dx: np.ndarray, radius: float) -> np.ndarray:
    """Signed distance to the outline, negative inside: disk, square, triangle, ring."""
    if kind == 1:
        return np.hypot(dy, dx) - radius
    if kind == 2:
        return np.maximum(np.abs(dy), np.abs(dx)) - 0.8 * radius
    if kind == 3:
        return np.maximum(dy, np.abs(dx) * 0.87 - dy * 0.5) - 0.5 * radius
    return np.abs(np.hypot(dy, dx) - 0.75 * radius) - 0.25 * radius


def _texture(kind: int, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Between -1 and 1: horizontal stripes, vertical stripes, a checkerboard, diagonals."""
    phase = {1: y, 2: x, 4: x + y}
    if kind == 3:
        return np.sign(np.sin(y * 1.2) * np.sin(x * 1.2))
    return np.sin(phase[kind] * 1.2)


def _png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
