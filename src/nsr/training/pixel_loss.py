"""Pixel-wise cross-entropy of logits on the patch grid, upsampled as the segmenter upsamples them.

Bilinear resizing is linear in rows and in columns: two small matrix products. Unlike the interpolation kernels of CUDA,
their backward pass adds in a fixed order and does not serialise on atomics, with 256 pixels to a patch. Where patches
are squares of an even number of pixels, kernels give the loss and its gradient without upsampling anything.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.data.segmentation.split import IGNORE
from nsr.kernels.pixel_loss import patch_side, summed_cross_entropy
from nsr.kernels.tokens import use_kernels


def upsample(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """``F.interpolate(logits, size, mode="bilinear")`` as products: ``[B, K, h, w] -> [B, K, H, W]``."""
    rows = _weights(logits.shape[-2], size[0], logits.device)
    columns = _weights(logits.shape[-1], size[1], logits.device)
    return rows @ logits @ columns.T


def pixel_cross_entropy(logits: Tensor, labels: Tensor, pixels: Tensor | None = None) -> Tensor:
    """Mean over the pixels that are not ignored, in fp32, of each of ``V`` models; 0 if all are ignored.

    Args:
        logits: On the patch grid, ``[V · B, K, h, w]``, model by model.
        labels: Of the images that every model has seen, ``[B, H, W]``, int64.
        pixels: What to divide the sum by, where this batch is a part of a larger one; see :func:`counted_pixels`.

    Returns:
        ``[V]``.
    """
    models = logits.shape[0] // labels.shape[0]
    if use_kernels(logits) and patch_side(logits, labels) is not None:
        totals = summed_cross_entropy(logits, labels, IGNORE).view(models, -1).sum(1)
    else:
        height, width = labels.shape[-2:]
        upsampled = upsample(logits.float(), (height, width))
        # summed here, because the reductions built into the loss are not deterministic on CUDA
        each = F.cross_entropy(upsampled, labels.repeat(models, 1, 1), ignore_index=IGNORE, reduction="none")
        totals = each.view(models, -1).sum(1)
    return totals / (counted_pixels(labels) if pixels is None else pixels).clamp(min=1)


def counted_pixels(labels: Tensor) -> Tensor:
    """How many are not ignored, a scalar."""
    return (labels != IGNORE).sum()


@cache
def _weights(own: int, resized: int, device: torch.device) -> Tensor:
    """The interpolation matrix ``[resized, own]``, two non-zero weights a row."""
    with torch.inference_mode(False):  # kept for training, also when an evaluation asks first
        basis = torch.eye(own).unsqueeze(0)  # shape: [1, own, own], one channel a source pixel
        return F.interpolate(basis, size=resized, mode="linear").squeeze(0).T.contiguous().to(device)
