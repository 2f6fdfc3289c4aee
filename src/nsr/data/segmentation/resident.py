"""A whole split in the memory of the device that trains, and crops of it without a word from the host.

Images differ in size, so they lie end to end in one vector. A pixel is one 32-bit word, red, green, blue and label from
the lowest byte up: five words give a bilinear colour and a nearest label.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsr.data.segmentation.batch import Batch, normalise
from nsr.data.segmentation.photometric import distort
from nsr.data.segmentation.split import IGNORE, Split


@dataclass(frozen=True)
class ResidentSplit:
    """A decoded split.

    Attributes:
        name: Of the split.
        num_classes: ``K``.
        sizes: Height and width of each image on the host, ``[n, 2]``.
        words: All pixels, ``[T]``, int32, on the device.
        geometry: Offset in ``words``, height and width of each image, ``[n, 3]``, int64, on the device.
    """

    name: str
    num_classes: int
    sizes: np.ndarray
    words: Tensor
    geometry: Tensor

    def __len__(self) -> int:
        return len(self.sizes)


def image_sizes(split: Split) -> np.ndarray:
    """Height and width of each image, from the headers alone: ``[n, 2]``, int64."""
    with ThreadPoolExecutor(_threads()) as pool:
        return np.array(list(pool.map(split.size, range(len(split)))), dtype=np.int64)


def resident_bytes(sizes: np.ndarray) -> int:
    """What :func:`load_resident` will take of the device's memory."""
    return 4 * int(sizes.prod(axis=1).sum())


def load_resident(split: Split, device: torch.device | str = "cpu", sizes: np.ndarray | None = None) -> ResidentSplit:
    """Decode every image once and put it on the device."""
    sizes = image_sizes(split) if sizes is None else sizes
    pixels = sizes.prod(axis=1)
    offsets = np.concatenate([[0], np.cumsum(pixels)])
    words = torch.empty(int(offsets[-1]), dtype=torch.int32, device=device)
    with ThreadPoolExecutor(_threads()) as pool:
        for index, packed in enumerate(pool.map(lambda i: _words(*split[i]), range(len(split)))):
            if len(packed) != pixels[index]:
                raise ValueError(f"{split.items[index].image_name} has another size than its header says.")
            words[offsets[index] : offsets[index + 1]].copy_(torch.from_numpy(packed))
    geometry = np.column_stack([offsets[:-1], sizes])
    return ResidentSplit(split.name, split.num_classes, sizes, words, torch.from_numpy(geometry).to(device))


def resident_batch(data: ResidentSplit, crops: Tensor, window: tuple[int, int], colours: Tensor | None = None) -> Batch:
    """The crops of a batch, on the data's device, without a synchronisation.

    Colours are interpolated bilinearly (pixel centres, no antialiasing), labels take the nearest pixel.

    Args:
        data: The split.
        crops: ``[B, 6]``, on the data's device; see :mod:`~.crops`.
        window: Height ``H`` and width ``W`` of a crop.
        colours: A photometric distortion for each crop, ``[B, 5]``.
    """
    image, height, width, top, left, mirrored = crops.unbind(1)
    offset, own_height, own_width = data.geometry.index_select(0, image).unbind(1)
    rows = top.unsqueeze(1) + torch.arange(window[0], device=crops.device)  # shape: [B, H]
    column = torch.arange(window[1], device=crops.device)
    columns = left.unsqueeze(1) + torch.where(mirrored.bool().unsqueeze(1), window[1] - 1 - column, column)
    inside = (rows < height.unsqueeze(1)).unsqueeze(2) & (columns < width.unsqueeze(1)).unsqueeze(1)

    y = _Axis.of(rows, height, own_height)
    x = _Axis.of(columns, width, own_width)
    row_offset = offset.unsqueeze(1) + torch.stack([y.low, y.high, y.nearest]) * own_width.unsqueeze(1)

    def take(row: Tensor, col: Tensor) -> Tensor:
        # shape: [B, H], [B, W] -> [B, H, W]
        flat = row.unsqueeze(2) + col.unsqueeze(1)
        return data.words.index_select(0, flat.flatten()).view(flat.shape)

    fx, fy = x.fraction.unsqueeze(1).unsqueeze(1), y.fraction.unsqueeze(2).unsqueeze(1)
    upper = torch.lerp(_rgb(take(row_offset[0], x.low)), _rgb(take(row_offset[0], x.high)), fx)
    lower = torch.lerp(_rgb(take(row_offset[1], x.low)), _rgb(take(row_offset[1], x.high)), fx)
    rgb = torch.lerp(upper, lower, fy)
    labels = take(row_offset[2], x.nearest) >> 24 & 255
    if colours is not None:
        rgb = distort(rgb, colours)
    return Batch(
        torch.where(inside.unsqueeze(1), normalise(rgb), 0.0), torch.where(inside, labels, IGNORE).to(torch.int64)
    )


@dataclass(frozen=True)
class _Axis:
    """Where each output pixel lies in the image, along one axis; all ``[B, L]``."""

    low: Tensor
    high: Tensor
    nearest: Tensor
    fraction: Tensor

    @staticmethod
    def of(position: Tensor, resized: Tensor, own: Tensor) -> "_Axis":
        """Resizing ``own`` pixels to ``resized`` puts output ``i`` at ``(i + ½) own / resized - ½``."""
        resized, own = resized.unsqueeze(1), own.unsqueeze(1)
        last = own - 1
        # in integers, so that a nearest label does not depend on rounding
        nearest = torch.minimum((2 * position + 1) * own // (2 * resized), last)
        source = ((position + 0.5) * (own / resized) - 0.5).clamp(min=0)
        low = torch.minimum(source.long(), last)
        fraction = (source - low).clamp(max=1)
        return _Axis(low, torch.minimum(low + 1, last), nearest, fraction)


def _rgb(words: Tensor) -> Tensor:
    """``[B, H, W] -> [B, 3, H, W]``, between 0 and 255."""
    return torch.stack([words & 255, words >> 8 & 255, words >> 16 & 255], dim=1).float()


def _words(image: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """``[H, W, 3]`` and ``[H, W]`` uint8 -> ``[H W]`` int32, whatever the machine's byte order."""
    word = labels.astype(np.uint32) << 24
    for channel in range(3):
        word |= image[..., channel].astype(np.uint32) << (8 * channel)
    return word.reshape(-1).view(np.int32)


def _threads() -> int:
    return min(16, os.cpu_count() or 1)
