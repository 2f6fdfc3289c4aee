"""Pixel-wise cross-entropy of logits on the patch grid, upsampled as the segmenter upsamples them.

Bilinear resizing is linear in rows and in columns: two small matrix products. Unlike the interpolation kernels of CUDA,
their backward pass adds in a fixed order and does not serialise on atomics, with 256 pixels to a patch.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.data.segmentation.split import IGNORE


def upsample(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """``F.interpolate(logits, size, mode="bilinear")`` as products: ``[B, K, h, w] -> [B, K, H, W]``."""
    rows = _weights(logits.shape[-2], size[0], logits.device)
    columns = _weights(logits.shape[-1], size[1], logits.device)
    return rows @ logits @ columns.T


def pixel_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the pixels that are not ignored, in fp32; 0 if all are.

    Args:
        logits: On the patch grid, ``[B, K, h, w]``.
        labels: ``[B, H, W]``, int64.
    """
    height, width = labels.shape[-2:]
    pixels = upsample(logits.float(), (height, width))
    # summed here, because the reductions built into the loss are not deterministic on CUDA
    total = F.cross_entropy(pixels, labels, ignore_index=IGNORE, reduction="none").sum()
    return total / (labels != IGNORE).sum().clamp(min=1)


@cache
def _weights(own: int, resized: int, device: torch.device) -> Tensor:
    """The interpolation matrix ``[resized, own]``, two non-zero weights a row."""
    basis = torch.eye(own).unsqueeze(0)  # shape: [1, own, own], one channel a source pixel
    return F.interpolate(basis, size=resized, mode="linear").squeeze(0).T.contiguous().to(device)
