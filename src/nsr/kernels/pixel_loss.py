"""Pixel-wise cross-entropy of logits on a patch grid, upsampled bilinearly, without upsampling them."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2

_TILE = 8192  # pixels times classes that a program can hold at once


def patch_side(logits: Tensor, labels: Tensor) -> int | None:
    """How many pixels wide a patch is, where :func:`summed_cross_entropy` can serve these; ``None`` where not."""
    (height, width), (rows, columns) = labels.shape[-2:], logits.shape[-2:]
    side = height // rows
    fits = side % 2 == 0 and (height, width) == (rows * side, columns * side) and logits.shape[1] <= _TILE // 16
    return side if fits else None


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    """The cross-entropy of all pixels of a sample that are not ignored, summed in fp32; differentiable in ``logits``.

    Equals ``F.cross_entropy(F.interpolate(logits.float(), labels.shape[-2:], mode="bilinear"), ..., reduction="sum")``.
    Sums run in a fixed order. The gradient is computed on the way forward: all that is kept is of the patches' size.

    Args:
        logits: On the patch grid, ``[V · B, K, h, w]``: of ``V`` models that have seen the same images.
        labels: ``[B, H, W]``, int64; patches must be square, an even number of pixels wide (:func:`patch_side`).
        ignore: The label that does not count; no class.

    Returns:
        ``[V · B]``.
    """
    return _summed_cross_entropy(logits, labels, ignore)[0]


@torch.library.custom_op("nsr::summed_cross_entropy", mutates_args=())
def _summed_cross_entropy(logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    from nsr.kernels.pixel_loss_kernels import cell_losses

    samples, classes, rows, columns = logits.shape
    patch = patch_side(logits, labels)
    assert patch is not None, "the caller asks patch_side first"
    assert samples % labels.shape[0] == 0, "every model has seen every image"
    losses, corners = _room(logits)
    block_k, block_x = max(16, next_power_of_2(classes)), next_power_of_2(patch)
    cell_losses[((rows + 1) * (columns + 1), samples)](
        logits, labels.contiguous(), losses, corners, *logits.stride(), rows, columns, labels.shape[0],
        IGNORE=ignore, CLASSES=classes, PATCH=patch, BLOCK_K=block_k, BLOCK_X=block_x,
        num_warps=min(8, max(1, block_k * block_x // 512)),  # 16 numbers a thread
    )  # fmt: skip
    return losses.sum((1, 2)), corners


@_summed_cross_entropy.register_fake
def _(logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    losses, corners = _room(logits)
    return losses.new_empty(losses.shape[0]), corners


def _room(logits: Tensor) -> tuple[Tensor, Tensor]:
    """For the loss of each cell and its gradient at the four corners."""
    samples, classes, rows, columns = logits.shape
    cells = (samples, rows + 1, columns + 1)
    return logits.new_empty(cells, dtype=torch.float32), logits.new_empty((*cells, 4, classes), dtype=torch.float32)


@torch.library.custom_op("nsr::summed_cross_entropy_backward", mutates_args=())
def _backward(corners: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    from nsr.kernels.pixel_loss_kernels import gather_corners

    batch, rows, columns, _, classes = corners.shape
    rows, columns = rows - 1, columns - 1
    grad = corners.new_empty(batch, rows, columns, classes, dtype=kind)
    gather_corners[(cdiv(columns, 16), rows, batch)](
        corners, scale.contiguous(), grad, rows, columns,
        CLASSES=classes, BLOCK_K=max(16, next_power_of_2(classes)), BLOCK_X=16, num_warps=4,
    )  # fmt: skip
    return grad


@_backward.register_fake
def _(corners: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    batch, rows, columns, _, classes = corners.shape
    return corners.new_empty(batch, rows - 1, columns - 1, classes, dtype=kind)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.kind = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, None, None]:
    return _backward(*ctx.saved_tensors, grad, ctx.kind).permute(0, 3, 1, 2), None, None


_summed_cross_entropy.register_autograd(_differentiate, setup_context=_save)
