"""Which part of which image a model sees, and when: drawn on the host, a pure function of (seed, epoch).

A crop is six integers: the image, the height and width it is resized to, the window's top and left corner in the
resized image, and whether the window is mirrored. Everything random about the geometry is in them, so that any two
models, devices and loaders that are given the same rows see the same pixels, and a resumed run draws what it would have
drawn. Where the resized image is smaller than the window, it is padded at the right and the bottom.
"""

import numpy as np
import torch
from torch import Tensor

IMAGE, HEIGHT, WIDTH, TOP, LEFT, MIRRORED = range(6)


def epoch_crops(
    sizes: np.ndarray,
    window: tuple[int, int],
    seed: int,
    epoch: int,
    *,
    shorter_side: int | None = None,
    scale: tuple[float, float] = (0.5, 2.0),
) -> Tensor:
    """A random crop of every image, in random order.

    Args:
        sizes: Height and width of each image, ``[n, 2]``.
        window: Height and width of the crops.
        seed: Of the run.
        epoch: Counted from 0.
        shorter_side: The shorter side of an image at scale 1, so that what is seen does not depend on the resolution
            that images are stored at; ``None``: that of the image itself.
        scale: The image is resized by a factor drawn uniformly from this range, its aspect ratio kept.

    Returns:
        ``[n, 6]``, int64.
    """
    # RandomState is frozen: these draws are the same with every version of numpy
    rng = np.random.RandomState([seed, epoch])
    count = len(sizes)
    order = rng.permutation(count)
    factor = rng.uniform(*scale, size=count)
    corner = rng.random_sample((count, 2))
    mirrored = rng.random_sample(count) < 0.5
    if shorter_side is not None:
        factor = factor * shorter_side / sizes[order].min(axis=1)
    resized = np.maximum(1, np.rint(sizes[order] * factor[:, None])).astype(np.int64)
    free = np.maximum(resized - np.array(window), 0)  # how far the window can move
    start = np.floor(corner * (free + 1)).astype(np.int64)
    return torch.from_numpy(np.column_stack([order, resized, start, mirrored]).astype(np.int64))


def centre_crops(sizes: np.ndarray, window: tuple[int, int]) -> Tensor:
    """The window at the centre of each image, resized so that their shorter sides are equal: ``[n, 6]``."""
    factor = min(window) / sizes.min(axis=1, keepdims=True)
    resized = np.maximum(np.rint(sizes * factor), min(window)).astype(np.int64)
    start = np.maximum(resized - np.array(window), 0) // 2
    count = len(sizes)
    columns = [np.arange(count), resized, start, np.zeros(count)]
    return torch.from_numpy(np.column_stack(columns).astype(np.int64))


def epoch_colours(count: int, seed: int, epoch: int) -> Tensor:
    """A photometric distortion for every crop of an epoch, ``[n, 5]``: see :func:`~.photometric.distort`.

    Each of brightness, contrast, saturation and hue changes with probability one half.
    """
    rng = np.random.RandomState([seed, epoch, 1])
    changes = rng.random_sample((count, 4)) < 0.5
    drawn = rng.uniform([-32, 0.5, 0.5, -36], [32, 1.5, 1.5, 36], size=(count, 4))
    values = np.where(changes, drawn, [0, 1, 1, 0])
    contrast_last = rng.random_sample((count, 1)) < 0.5
    return torch.from_numpy(np.concatenate([values, contrast_last], axis=1).astype(np.float32))
