"""ADE20K scene parsing: 150 classes, 20,210 images to train on and 2,000 to validate with.

The SceneParsing layout::

    <folder>/ADEChallengeData2016/{images,annotations}/{training,validation}/*.{jpg,png}

Masks hold 0 for what belongs to no class and 1 … 150; labels are 0 … 149.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from nsr.data.segmentation.split import IGNORE, Split, paired

NUM_CLASSES = 150
URL = "http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip"
SHA1 = "219e1696abb36c8ba3a3afe7fb2f4b4606a897c7"

# 0 wraps to 255, which is ignored; an id above 150 stays above every label and is refused
TRAIN_ID = np.concatenate([[IGNORE], np.arange(255)]).astype(np.uint8)


def ade20k(folder: Path, split: Literal["train", "val"]) -> Split:
    """ADE20K below ``folder``.

    Raises:
        ValueError: It is not there, or an image has no mask.
    """
    tree = folder / "ADEChallengeData2016"
    part = {"train": "training", "val": "validation"}[split]
    images = tree / "images" / part
    if not images.is_dir():
        raise ValueError(f"There is no ADE20K at {images}. Fetch {URL} (1 GB) and unpack it in {folder}.")
    pairs = [(image, tree / "annotations" / part / f"{image.stem}.png") for image in sorted(images.glob("*.jpg"))]
    return paired(f"ade20k {split}", NUM_CLASSES, pairs, TRAIN_ID)
