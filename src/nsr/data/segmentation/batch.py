"""What a model is given: normalised pixels and labels."""

from typing import NamedTuple

import torch
from torch import Tensor

MEAN = (0.485, 0.456, 0.406)  # ImageNet's channel means and deviations, of pixels between 0 and 1
DEVIATION = (0.229, 0.224, 0.225)


class Batch(NamedTuple):
    """Crops and their labels.

    Attributes:
        image: Normalised, ``[B, 3, H, W]``, float32; 0 outside the image.
        labels: ``[B, H, W]``, int64; :data:`~.split.IGNORE` outside the image.
    """

    image: Tensor
    labels: Tensor


def normalise(rgb: Tensor) -> Tensor:
    """Pixels between 0 and 255 to ImageNet's scale, ``[B, 3, H, W]``."""
    # numbers rather than a tensor of them, whose copy to the device could not be part of a captured step
    scaled = [(rgb[:, c] / 255 - MEAN[c]) / DEVIATION[c] for c in range(3)]
    return torch.stack(scaled, dim=1)
