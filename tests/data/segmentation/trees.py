"""Small data sets in the official layouts, written by the tests themselves."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def save(path: Path, array: np.ndarray, palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    if palette:
        image = Image.frombytes("P", (array.shape[1], array.shape[0]), array.tobytes())
        image.putpalette([i % 256 for i in range(768)])
    image.save(path)


def voc_tree(folder: Path, masks: dict[str, np.ndarray], split: str = "train") -> Path:
    tree = folder / "VOCdevkit" / "VOC2012"
    for index, (name, mask) in enumerate(masks.items()):
        save(tree / "JPEGImages" / f"{name}.jpg", picture(mask.shape, index))
        save(tree / "SegmentationClass" / f"{name}.png", mask, palette=True)
    listing = tree / "ImageSets" / "Segmentation" / f"{split}.txt"
    listing.parent.mkdir(parents=True, exist_ok=True)
    listing.write_text("".join(f"{name}\n" for name in masks))
    return tree


def encoded(array: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format=kind, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def packed_voc(folder: Path, masks: dict[str, np.ndarray], split: str = "train") -> Path:
    images = [encoded(picture(mask.shape, index), "WEBP") for index, mask in enumerate(masks.values())]
    labels = [encoded(mask, "PNG") for mask in masks.values()]
    arrays = {"ids": np.array(list(masks))}
    for name, parts in (("image", images), ("mask", labels)):
        arrays[f"{name}_bytes"] = np.frombuffer(b"".join(parts), dtype=np.uint8)
        arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, parts)])
    path = folder / "voc2012" / f"{split}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path
