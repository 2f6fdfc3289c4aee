"""Evaluating a segmenter: one confusion matrix over the whole validation split."""

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from nsr.data.segmentation.batch import Batch
from nsr.data.segmentation.crops import centre_crops
from nsr.data.segmentation.resident import ResidentSplit, image_sizes, resident_batch
from nsr.data.segmentation.split import Split
from nsr.data.segmentation.workers import worker_batches
from nsr.tokens.at_rest import at_rest
from nsr.tokens.segmenter import Segmenter
from nsr.training.distributed import ALONE, Group
from nsr.training.pixel_loss import upsample
from nsr.training.segmentation import Precision, autocast
from nsr.training.segmentation_metrics import confusion_matrix

_LOGITS_AT_ONCE = 2**28  # of a batch, at the resolution of the images: 1 GiB


def centre_batches(
    data: ResidentSplit | Split,
    window: tuple[int, int],
    batch: int | None,
    device: torch.device,
    workers: int = 0,
    group: Group = ALONE,
) -> Iterator[Batch]:
    """Every image of a split once: shorter side resized to the window's, the window at the centre.

    Args:
        data: The split.
        window: Height and width of a crop.
        batch: Images in a batch; by default as many as have logits of 1 GiB.
        device: Where batches are wanted.
        workers: Processes that decode a split that is not on the device.
        group: The processes that share the images; this one sees its own.
    """
    if batch is None:
        batch = max(1, _LOGITS_AT_ONCE // (data.num_classes * window[0] * window[1]))
    if isinstance(data, ResidentSplit):
        for crops in centre_crops(data.sizes, window)[group.rank :: group.size].to(data.words.device).split(batch):
            yield resident_batch(data, crops, window)
        return
    crops = centre_crops(image_sizes(data), window)[group.rank :: group.size]
    for host in worker_batches(data, crops, window, batch, workers=workers, drop_last=False):
        yield Batch(host.image.to(device), host.labels.to(device))


def whole_images(
    data: ResidentSplit | Split, device: torch.device, workers: int = 0, group: Group = ALONE
) -> Iterator[Batch]:
    """Every image of a split once, at its own size, one to a batch; of a group, this process's share of them."""
    sizes = data.sizes if isinstance(data, ResidentSplit) else image_sizes(data)
    for index, (height, width) in islice(enumerate(sizes.tolist()), group.rank, None, group.size):
        crop = torch.tensor([[index, height, width, 0, 0, 0]])
        if isinstance(data, ResidentSplit):
            yield resident_batch(data, crop.to(data.words.device), (height, width))
        else:
            (host,) = worker_batches(data, crop, (height, width), 1, workers=0)
            yield Batch(host.image.to(device), host.labels.to(device))


@torch.inference_mode()
def evaluate(
    model: Segmenter,
    data: ResidentSplit | Split,
    window: tuple[int, int],
    *,
    stride: tuple[int, int] | None = None,
    batch: int | None = None,
    precision: Precision = "fp32",
    workers: int = 0,
    group: Group = ALONE,
) -> Tensor:
    """The confusion matrix ``[K, K]`` over the whole split, on the host.

    Args:
        model: The segmenter; evaluated in evaluation mode and left as it was.
        data: The validation split.
        window: Height and width of what the model sees.
        stride: With a stride, every image is evaluated at its own size by windows that overlap, their logits averaged;
            without one, at its centre crop.
        batch: Images, or windows of an image (then 8 by default), in a forward pass.
        precision: Of the forward pass.
        workers: Processes that decode a split that is not on the device.
        group: The processes that share the images; counts are summed, so each has the whole matrix.
    """
    device = next(model.parameters()).device
    confusion = torch.zeros(data.num_classes, data.num_classes, dtype=torch.int64, device=device)
    if stride is None:
        batches = centre_batches(data, window, batch, device, workers, group)
    else:
        batches = whole_images(data, device, workers, group)
    with at_rest(model):
        for image, labels in batches:
            with autocast(device, precision):
                if stride is None:
                    # upsampled in fp32, as for the loss: half precision has ties
                    logits = upsample(model.patch_logits(image).float(), window)
                else:
                    logits = model.sliding_window(image, window, stride, batch or 8)
            confusion += confusion_matrix(labels, logits.argmax(1), data.num_classes)
    return group.sum(confusion).cpu()
