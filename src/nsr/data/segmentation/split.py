"""A split of a segmentation data set: images and label maps, decoded one by one and checked as they are."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

IGNORE = 255  # the label that neither the loss nor the metrics see

Encoded = Path | bytes


@dataclass(frozen=True)
class Item:
    """One image and its label map, still encoded.

    Attributes:
        image: A file, or the bytes of one.
        mask: Likewise; a single-channel image whose values are class ids of the data set.
        image_name: What to call the image in an error.
        mask_name: What to call the mask in an error.
    """

    image: Encoded
    mask: Encoded
    image_name: str
    mask_name: str


@dataclass(frozen=True)
class Split:
    """Images with label maps of ``num_classes`` classes.

    Args:
        name: What the split is called, such as ``"voc2012 train"``.
        num_classes: Classes ``K``; labels are ``0 … K - 1`` and :data:`IGNORE`.
        items: What to decode.
        train_id: The label of every possible value of a mask, ``[256]``, uint8; a value outside ``0 … K - 1`` that is
            not :data:`IGNORE` marks one that must not occur. ``None`` where masks hold labels already.
    """

    name: str
    num_classes: int
    items: Sequence[Item]
    train_id: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not self.items:
            raise ValueError(f"{self.name} is empty: no image was found. Check the folder it was read from.")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Image ``[H, W, 3]`` and labels ``[H, W]``, both uint8.

        Raises:
            ValueError: A file is missing, damaged, of another size than its partner, or names a class that is not.
        """
        item = self.items[index]
        image = _decode(item.image, item.image_name, lambda picture: picture.convert("RGB"))
        mask = _decode(item.mask, item.mask_name, _single_channel(item.mask_name))
        if image.shape[:2] != mask.shape:
            raise ValueError(
                f"{item.image_name} has {image.shape[1]} × {image.shape[0]} pixels, its mask {item.mask_name} "
                f"{mask.shape[1]} × {mask.shape[0]}: they must be equal."
            )
        labels = mask if self.train_id is None else self.train_id[mask]
        wrong = (labels >= self.num_classes) & (labels != IGNORE)
        if wrong.any():
            raise ValueError(
                f"{item.mask_name} holds the id {mask[wrong][0]}, which {self.name} does not have: its "
                f"{self.num_classes} classes and {IGNORE} (ignored) are all there is."
            )
        return image, labels

    def size(self, index: int) -> tuple[int, int]:
        """Height and width, from the header alone."""
        item = self.items[index]
        with _open(item.image, item.image_name) as picture:
            return picture.height, picture.width


def paired(name: str, num_classes: int, pairs: Sequence[tuple[Path, Path]], train_id: np.ndarray | None) -> Split:
    """A split of image files with a mask file each.

    Raises:
        ValueError: A file is missing.
    """
    for path in (path for pair in pairs for path in pair):
        if not path.is_file():
            raise ValueError(f"{name}: {path} is missing.")
    return Split(name, num_classes, [Item(a, b, str(a), str(b)) for a, b in pairs], train_id)


def _open(source: Encoded, name: str) -> Image.Image:
    try:
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except FileNotFoundError:
        raise ValueError(f"{name} is missing.") from None
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{name} is not a readable image ({error}).") from error


def _decode(source: Encoded, name: str, convert: Callable[[Image.Image], Image.Image]) -> np.ndarray:
    with _open(source, name) as picture:
        try:
            return np.array(convert(picture))
        except (OSError, SyntaxError) as error:  # PIL reports damaged PNG chunks as a SyntaxError
            raise ValueError(f"{name} is damaged or truncated ({error}).") from error


def _single_channel(name: str) -> Callable[[Image.Image], Image.Image]:
    def check(picture: Image.Image) -> Image.Image:
        if picture.mode not in ("P", "L"):
            raise ValueError(
                f"{name} is a mask of mode {picture.mode}; expected one channel of class ids (paletted or grey, 8 bit)."
            )
        return picture

    return check
