"""Cross-entropy of bilinearly upsampled logits, cell by cell.

A cell is the square between the centres of four neighbouring patches, as many pixels wide as a patch: all its pixels
are interpolated from the same four corners. Half cells run around the border, where both corners of an axis are the
same patch. So nothing is ever stored at the resolution of the pixels, and no two programs write to the same place::

    patch centres   ×───────×───────×        corner gradients of a cell, in this order:
                    │ cell  │ cell  │        0 upper left    1 upper right
                    ×───────×───────×        2 lower left    3 lower right
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot


@triton.jit(
    do_not_specialize=["stride_sample", "stride_class", "stride_row", "stride_column", "rows", "columns"],
    do_not_specialize_on_alignment=["logit_ptr", "label_ptr"],
)
def cell_losses(
    logit_ptr,
    label_ptr,
    loss_ptr,
    grad_ptr,
    stride_sample,
    stride_class,
    stride_row,
    stride_column,
    rows,
    columns,
    IGNORE: tl.constexpr,
    CLASSES: tl.constexpr,
    PATCH: tl.constexpr,
    CORNERS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """The summed loss of a cell, and its gradient at the corners, ``[4, CLASSES]``; programs are (cell, sample).

    Interpolation, and its transpose for the gradient, are products with the weights of the corners: ``[P, C] [C, K]``.
    """
    sample = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0)
    row, column = cell // (columns + 1), cell % (columns + 1)
    k = tl.arange(0, BLOCK_K)
    known = k < CLASSES
    corner = tl.arange(0, CORNERS)
    is_lower, is_right = corner // 2 == 1, corner % 2 == 1
    corner_row = tl.where(is_lower, tl.minimum(row, rows - 1), tl.maximum(row - 1, 0))
    corner_column = tl.where(is_right, tl.minimum(column, columns - 1), tl.maximum(column - 1, 0))
    at = sample * stride_sample + (corner_row * stride_row + corner_column * stride_column)[:, None]
    at_corners = (corner < 4)[:, None] & known[None, :]
    corners = tl.load(logit_ptr + at + k[None, :] * stride_class, mask=at_corners, other=0.0).to(tl.float32)

    height, width = rows * PATCH, columns * PATCH
    total = tl.zeros([BLOCK_P], tl.float32)
    grad_corners = tl.zeros([CORNERS, BLOCK_K], tl.float32)
    for first in range(0, PATCH * PATCH, BLOCK_P):
        pixel = first + tl.arange(0, BLOCK_P)
        down, across = pixel // PATCH, pixel % PATCH
        y, x = row * PATCH - PATCH // 2 + down, column * PATCH - PATCH // 2 + across
        inside = (pixel < PATCH * PATCH) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        label = tl.load(label_ptr + (sample * height + y) * width + x, mask=inside, other=IGNORE).to(tl.int32)
        fy, fx = ((down + 0.5) / PATCH)[:, None], ((across + 0.5) / PATCH)[:, None]
        weight = tl.where(is_lower[None, :], fy, 1 - fy) * tl.where(is_right[None, :], fx, 1 - fx)  # shape: [P, C]
        weight = tl.where((corner < 4)[None, :], weight, 0.0)
        logits = tl.where(known[None, :], dot(weight, corners, "tf32x3"), float("-inf"))  # shape: [P, K]
        largest = tl.max(logits, 1)
        exponential = tl.exp(logits - largest[:, None])
        normaliser = tl.sum(exponential, 1)
        is_label = k[None, :] == label[:, None]
        of_label = tl.sum(tl.where(is_label, logits, 0.0), 1)
        counted = label != IGNORE
        total += tl.where(counted, largest + tl.log(normaliser) - of_label, 0.0)
        grad = exponential / normaliser[:, None] - tl.where(is_label, 1.0, 0.0)
        grad_corners += dot(tl.trans(weight), tl.where(counted[:, None], grad, 0.0), "tf32x3")
    cell = sample * (rows + 1) * (columns + 1) + cell
    tl.store(loss_ptr + cell, tl.sum(total, 0))
    at = (cell * 4 + corner)[:, None] * CLASSES + k[None, :]
    tl.store(grad_ptr + at, grad_corners, mask=at_corners)


@triton.jit(do_not_specialize=["rows", "columns"], do_not_specialize_on_alignment=["scale_ptr"])
def gather_corners(
    corner_ptr,
    scale_ptr,
    grad_ptr,
    rows,
    columns,
    CLASSES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """The gradient of each logit, times a scalar: the corners of the four cells around a patch, in a fixed order.

    ``grad`` is ``[B, rows, columns, CLASSES]``. Programs are (tile of a row's patches, row, sample).
    """
    sample = tl.program_id(2).to(tl.int64)
    y = tl.program_id(1)
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    k = tl.arange(0, BLOCK_K)
    mask = (x < columns)[:, None] & (k < CLASSES)[None, :]
    first_cell = sample * (rows + 1) * (columns + 1)
    total = tl.zeros([BLOCK_X, BLOCK_K], tl.float32)
    # the patch is the lower corner of the cells above it and the upper one of those below; at the border it is both
    for down in tl.static_range(2):
        for across in tl.static_range(2):
            corners = corner_ptr + (first_cell + (y + down) * (columns + 1) + x + across)[:, None] * 4 * CLASSES
            upper = ((down == 1) | (y == 0)) & mask
            lower = ((down == 0) | (y + down == rows)) & mask
            left = ((across == 1) | (x == 0))[:, None]
            right = ((across == 0) | (x + across == columns))[:, None]
            total += tl.load(corners + k, mask=upper & left, other=0.0)
            total += tl.load(corners + CLASSES + k, mask=upper & right, other=0.0)
            total += tl.load(corners + 2 * CLASSES + k, mask=lower & left, other=0.0)
            total += tl.load(corners + 3 * CLASSES + k, mask=lower & right, other=0.0)
    total *= tl.load(scale_ptr)
    at = ((sample * rows + y) * columns + x)[:, None] * CLASSES + k[None, :]
    tl.store(grad_ptr + at, total.to(grad_ptr.dtype.element_ty), mask=mask)
