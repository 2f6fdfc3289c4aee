"""The same crops made by worker processes, for a split that does not fit the device's memory.

Also the plain twin of :func:`~.resident.resident_batch`: resize the whole image, pad, cut, mirror.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from nsr.data.segmentation.batch import Batch, normalise
from nsr.data.segmentation.photometric import distort
from nsr.data.segmentation.split import IGNORE, Split


def crop_sample(
    image: np.ndarray, labels: np.ndarray, crop: Tensor, window: tuple[int, int], colour: Tensor | None = None
) -> Batch:
    """One crop of one decoded image.

    Args:
        image: ``[H, W, 3]``, uint8.
        labels: ``[H, W]``, uint8.
        crop: ``[6]``; see :mod:`~.crops`.
        window: Height and width of the crop.
        colour: Its photometric distortion, ``[5]``.

    Returns:
        A batch of one.
    """
    _, height, width, top, left, mirrored = crop.tolist()
    pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0).float()
    rgb = F.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False)
    rows, columns = (_nearest(new, old) for new, old in zip((height, width), labels.shape, strict=True))
    nearest = torch.from_numpy(labels)[rows][:, columns].unsqueeze(0).long()
    if colour is not None:
        rgb = distort(rgb, colour.unsqueeze(0))
    padding = (0, max(0, window[1] - width), 0, max(0, window[0] - height))
    area = (..., slice(top, top + window[0]), slice(left, left + window[1]))
    cut = F.pad(normalise(rgb), padding)[area], F.pad(nearest, padding, value=IGNORE)[area]
    return Batch(*(t.flip(-1) if mirrored else t for t in cut))


def worker_batches(
    split: Split,
    crops: Tensor,
    window: tuple[int, int],
    batch: int,
    *,
    workers: int,
    colours: Tensor | None = None,
    drop_last: bool = True,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Batches of the given crops, in their order.

    Args:
        split: What to decode.
        crops: ``[n, 6]``.
        window: Height and width of a crop.
        batch: Crops in a batch.
        workers: Processes that decode; 0 decodes in this one.
        colours: Photometric distortions, ``[n, 5]``.
        drop_last: Whether to leave out what does not fill a batch.
        pin_memory: Whether batches come in page-locked memory.
    """
    loader = DataLoader(
        _Crops(split, crops, window, colours),
        batch_size=batch,
        num_workers=workers,
        drop_last=drop_last,
        collate_fn=_collate,
        pin_memory=pin_memory,
    )
    yield from loader


class _Crops(Dataset):
    def __init__(self, split: Split, crops: Tensor, window: tuple[int, int], colours: Tensor | None) -> None:
        self.split, self.crops, self.window, self.colours = split, crops, window, colours

    def __len__(self) -> int:
        return len(self.crops)

    def __getitem__(self, index: int) -> Batch:
        crop = self.crops[index]
        colour = None if self.colours is None else self.colours[index]
        return crop_sample(*self.split[int(crop[0])], crop, self.window, colour)


def _collate(samples: list[Batch]) -> Batch:
    return Batch(torch.cat([s.image for s in samples]), torch.cat([s.labels for s in samples]))


def _nearest(resized: int, own: int) -> Tensor:
    return ((2 * torch.arange(resized) + 1) * own // (2 * resized)).clamp(max=own - 1)
