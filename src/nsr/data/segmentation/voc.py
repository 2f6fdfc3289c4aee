"""Pascal VOC 2012: 21 classes, 1,464 images to train on and 1,449 to validate with.

Read from the official tree::

    <folder>/VOCdevkit/VOC2012/{JPEGImages/*.jpg, SegmentationClass/*.png, ImageSets/Segmentation/{train,val}.txt}

or from a packed copy, ``<folder>/voc2012/{train,val}.npz``: ``ids``; ``image_bytes`` and ``image_offsets``, encoded
images one after the other, item ``i`` being ``bytes[offsets[i]:offsets[i + 1]]``; ``mask_bytes`` and ``mask_offsets``
likewise. The tree is preferred where there are both.
"""

from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from nsr.data.folder import read_npz
from nsr.data.segmentation.split import Item, Split, paired

NUM_CLASSES = 21
URL = "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar"
SHA256 = "e14f763270cf193d0b5f74b169f44157a4b0c6efa708f4dd0ff78ee691763bcb"


def voc(folder: Path, split: Literal["train", "val"]) -> Split:
    """VOC 2012 below ``folder``, from the official tree or the packed copy.

    Raises:
        ValueError: There is neither; says where to get it and where to put it.
    """
    tree = folder / "VOCdevkit" / "VOC2012"
    packed = folder / "voc2012" / f"{split}.npz"
    if tree.is_dir():
        return _from_tree(tree, split)
    if packed.is_file():
        return _from_packed(packed, split)
    raise ValueError(
        f"VOC 2012 is neither at {tree} nor at {packed}. Fetch {URL} (2 GB) and unpack it in {folder}; "
        "nsr.data.segmentation.upstream.fetch_voc does both."
    )


def _from_tree(tree: Path, split: str) -> Split:
    listing = tree / "ImageSets" / "Segmentation" / f"{split}.txt"
    if not listing.is_file():
        raise ValueError(f"{listing} is missing: the VOC tree at {tree} is incomplete.")
    ids = listing.read_text().split()
    pairs = [(tree / "JPEGImages" / f"{name}.jpg", tree / "SegmentationClass" / f"{name}.png") for name in ids]
    return paired(f"voc2012 {split}", NUM_CLASSES, pairs, train_id=None)


def _from_packed(path: Path, split: str) -> Split:
    keys = ("ids", "image_bytes", "image_offsets", "mask_bytes", "mask_offsets")
    file = read_npz(path, keys, "It is not a packed copy of VOC 2012: fetch it anew.")
    ids = file["ids"]
    images = _slices(path, file["image_bytes"], file["image_offsets"])
    masks = _slices(path, file["mask_bytes"], file["mask_offsets"])
    if not len(ids) == len(images) == len(masks):
        raise ValueError(f"{path} holds {len(ids)} ids, {len(images)} images and {len(masks)} masks: it is damaged.")
    items = [
        Item(image, mask, f"{path} image {name}", f"{path} mask {name}")
        for name, image, mask in zip(ids, images, masks, strict=True)
    ]
    return Split(f"voc2012 {split}", NUM_CLASSES, items)


def _slices(path: Path, data: np.ndarray, offsets: np.ndarray) -> list[bytes]:
    if len(offsets) < 1 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{path} is not a packed copy of VOC 2012: its offsets do not fit its bytes.")
    return [data[begin:end].tobytes() for begin, end in pairwise(offsets)]
