"""Cityscapes with fine annotations: 19 classes, 2,975 images to train on and 500 to validate with.

The official layout::

    <folder>/cityscapes/leftImg8bit/{train,val}/<city>/<name>_leftImg8bit.png
    <folder>/cityscapes/gtFine/{train,val}/<city>/<name>_gtFine_labelIds.png

Masks hold 34 label ids; the 19 that are evaluated become 0 … 18, the others are ignored.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from nsr.data.segmentation.split import IGNORE, Split, paired

NUM_CLASSES = 19
URL = "https://www.cityscapes-dataset.com"

# label ids of road, sidewalk, building, wall, fence, pole, traffic light, traffic sign, vegetation, terrain, sky,
# person, rider, car, truck, bus, train, motorcycle, bicycle
EVALUATED = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_IDS = 34
_UNKNOWN = IGNORE - 1


def _train_id() -> np.ndarray:
    table = np.full(256, _UNKNOWN, dtype=np.uint8)
    table[:_IDS] = IGNORE
    table[IGNORE] = IGNORE  # how an 8-bit image stores the licence plate's -1
    table[list(EVALUATED)] = np.arange(NUM_CLASSES)
    return table


TRAIN_ID = _train_id()


def cityscapes(folder: Path, split: Literal["train", "val"]) -> Split:
    """Cityscapes below ``folder``.

    Raises:
        ValueError: It is not there, or an image has no mask.
    """
    tree = folder / "cityscapes"
    images = tree / "leftImg8bit" / split
    if not images.is_dir():
        raise ValueError(
            f"There is no Cityscapes at {images}. Its licence asks everybody to register: get "
            f"leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from {URL} and unpack both in {tree}."
        )
    pairs = []
    for image in sorted(images.glob("*/*_leftImg8bit.png")):
        name = image.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
        pairs.append((image, tree / "gtFine" / split / image.parent.name / name))
    return paired(f"cityscapes {split}", NUM_CLASSES, pairs, TRAIN_ID)
