"""Where a training step gets its batch: from a split on the device, or from worker processes.

Both give the same crops in the same order. ``batch`` is part of the step and may be captured; ``advance`` is what the
host has to do before each step, and for a resident split that is nothing at all.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nsr.data.segmentation.batch import Batch
from nsr.data.segmentation.crops import epoch_colours, epoch_crops
from nsr.data.segmentation.resident import (
    ResidentSplit,
    image_sizes,
    load_resident,
    resident_batch,
    resident_bytes,
)
from nsr.data.segmentation.split import Split
from nsr.data.segmentation.workers import worker_batches
from nsr.training.distributed import ALONE, Group


class Feed(Protocol):
    """What a trainer asks of its data."""

    steps: int

    def start_epoch(self, epoch: int) -> None:
        """Draw the crops of an epoch."""

    def advance(self) -> None:
        """Bring the next batch to the device, where it is not there already."""

    def batch(self) -> Batch:
        """The next batch; device work alone."""


class EpochDraws:
    """The crops, and if asked for the colours, of each epoch: a pure function of (seed, epoch).

    Args:
        sizes: Height and width of each image, ``[n, 2]``.
        window: Height and width of a crop.
        batch: Crops in a step; what does not fill a step is left out of that epoch.
        seed: Of the run.
        photometric: Whether to distort colours too.
        shorter_side: See :func:`~nsr.data.segmentation.crops.epoch_crops`.
        group: The processes that share each step; ``self.batch`` is the share of this one.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        window: tuple[int, int],
        batch: int,
        seed: int,
        photometric: bool = False,
        shorter_side: int | None = None,
        group: Group = ALONE,
    ) -> None:
        self.sizes, self.window, self.seed, self.photometric, self.group = sizes, window, seed, photometric, group
        self.shorter_side = shorter_side
        self.batch = group.share(batch)
        self.steps = len(sizes) // batch
        if self.steps == 0:
            raise ValueError(f"A batch of {batch} needs at least as many images; the split has {len(sizes)}.")

    def draw(self, epoch: int) -> tuple[Tensor, Tensor | None]:
        """``[steps · batch, 6]`` and ``[steps · batch, 5]``."""
        count = self.steps * self.batch * self.group.size
        crops = epoch_crops(self.sizes, self.window, self.seed, epoch, shorter_side=self.shorter_side)[:count]
        colours = epoch_colours(count, self.seed, epoch) if self.photometric else None
        return self._own(crops), None if colours is None else self._own(colours)

    def _own(self, drawn: Tensor) -> Tensor:
        return drawn.unflatten(0, (self.steps, self.group.size, self.batch))[:, self.group.rank].flatten(0, 1)


class ResidentFeed:
    """Crops of a split that lies on the device; an epoch costs the host one copy of its draws.

    On a GPU the crops are made by one compiled kernel instead of some eighty plain ones.
    """

    def __init__(self, data: ResidentSplit, draws: EpochDraws) -> None:
        self.data, self.draws, self.steps = data, draws, draws.steps
        device = data.words.device
        self.make_batch = _compiled_batch() if device.type == "cuda" else resident_batch
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.crops = torch.zeros(self.steps, draws.batch, 6, dtype=torch.int64, device=device)
        self.colours = torch.zeros(self.steps, draws.batch, 5, device=device) if draws.photometric else None

    def start_epoch(self, epoch: int) -> None:
        """Copy the draws of an epoch to the device."""
        crops, colours = self.draws.draw(epoch)
        _copy(self.crops, crops)
        if self.colours is not None and colours is not None:
            _copy(self.colours, colours)
        self.cursor.zero_()

    def advance(self) -> None:
        """Nothing: the data is there."""

    def batch(self) -> Batch:
        """Make the next crops; the cursor moves on the device, so that a captured step needs no argument."""
        crops = self.crops.index_select(0, self.cursor).squeeze(0)
        colours = None if self.colours is None else self.colours.index_select(0, self.cursor).squeeze(0)
        self.cursor.add_(1).remainder_(self.steps)
        return self.make_batch(self.data, crops, self.draws.window, colours)


class WorkerFeed:
    """Crops made by worker processes and copied into one fixed place on the device."""

    def __init__(self, split: Split, draws: EpochDraws, device: torch.device, workers: int) -> None:
        self.split, self.draws, self.steps, self.workers = split, draws, draws.steps, workers
        self.image = torch.zeros(draws.batch, 3, *draws.window, device=device)
        self.labels = torch.zeros(draws.batch, *draws.window, dtype=torch.int64, device=device)
        self.batches: Iterator[Batch] = iter(())

    def start_epoch(self, epoch: int) -> None:
        """Set the workers to an epoch."""
        crops, colours = self.draws.draw(epoch)
        self.batches = worker_batches(
            self.split,
            crops,
            self.draws.window,
            self.draws.batch,
            workers=self.workers,
            colours=colours,
            pin_memory=self.image.is_cuda,
        )

    def advance(self) -> None:
        """Copy the next batch to its place."""
        batch = next(self.batches)
        self.image.copy_(batch.image, non_blocking=True)
        self.labels.copy_(batch.labels, non_blocking=True)

    def batch(self) -> Batch:
        """What lies there."""
        return Batch(self.image, self.labels)


def place(split: Split, device: torch.device) -> tuple[np.ndarray, ResidentSplit | None]:
    """The sizes of the images, and the split on the device if it takes at most half of what is free there."""
    sizes = image_sizes(split)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 4 * 2**30
    return sizes, load_resident(split, device, sizes) if 2 * resident_bytes(sizes) <= free else None


@cache
def _compiled_batch() -> Callable[..., Batch]:
    """Compiled once a process, however many models are trained in it."""
    return torch.compile(resident_batch, dynamic=False)


def _copy(target: Tensor, source: Tensor) -> None:
    source = source.view(target.shape)
    # page-locked, so that the host need not wait for the steps before it
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=target.is_cuda)
