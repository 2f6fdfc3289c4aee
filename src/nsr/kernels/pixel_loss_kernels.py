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


@triton.jit(
    do_not_specialize=["stride_sample", "stride_class", "stride_row", "stride_column", "rows", "columns", "images"],
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
    images,
    IGNORE: tl.constexpr,
    CLASSES: tl.constexpr,
    PATCH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """The summed loss of a cell, and its gradient at the corners, ``[4, CLASSES]``; programs are (cell, sample).

    Along a row of pixels the upper and the lower corners are interpolated once, ``[X, K]``; each row of pixels is a
    mixture of the two, and so is its gradient. Samples beyond ``images`` have the labels of the first ones again.
    """
    sample = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0)
    row, column = cell // (columns + 1), cell % (columns + 1)
    k = tl.arange(0, BLOCK_K)
    across = tl.arange(0, BLOCK_X)
    known = k < CLASSES
    right = ((across + 0.5) / PATCH)[:, None]
    logit_ptr += sample * stride_sample + k * stride_class
    above, below = tl.maximum(row - 1, 0) * stride_row, tl.minimum(row, rows - 1) * stride_row
    before, behind = tl.maximum(column - 1, 0) * stride_column, tl.minimum(column, columns - 1) * stride_column
    upper = mixed(logit_ptr + above + before, logit_ptr + above + behind, known, right)
    lower = mixed(logit_ptr + below + before, logit_ptr + below + behind, known, right)

    height, width = rows * PATCH, columns * PATCH
    x = column * PATCH - PATCH // 2 + across
    inside = (across < PATCH) & (x >= 0) & (x < width)
    label_ptr += (sample % images) * height * width + x
    total = tl.zeros([BLOCK_X], tl.float32)
    of_label = tl.zeros([BLOCK_X, BLOCK_K], tl.float32)
    to_upper = tl.zeros([BLOCK_X, BLOCK_K], tl.float32)
    to_lower = tl.zeros([BLOCK_X, BLOCK_K], tl.float32)
    for down in range(PATCH):
        y = row * PATCH - PATCH // 2 + down + tl.zeros_like(x)
        label = tl.load(label_ptr + y * width, mask=inside & (y >= 0) & (y < height), other=IGNORE).to(tl.int32)
        under = (down + 0.5) / PATCH
        logits = upper * (1 - under) + lower * under
        largest = tl.max(logits, 1)
        exponential = tl.exp(logits - largest[:, None])
        normaliser = tl.sum(exponential, 1)
        counted = label != IGNORE
        is_label = k[None, :] == label[:, None]  # of no class where it does not count
        total += tl.where(counted, largest + tl.log(normaliser), 0.0)
        of_label += tl.where(is_label, logits, 0.0)
        grad = exponential * tl.where(counted, 1 / normaliser, 0.0)[:, None] - tl.where(is_label, 1.0, 0.0)
        to_upper += (1 - under) * grad
        to_lower += under * grad
    cell = sample * (rows + 1) * (columns + 1) + cell
    tl.store(loss_ptr + cell, tl.sum(total, 0) - tl.sum(tl.sum(of_label, 1), 0))
    grad_ptr += cell * 4 * CLASSES + k
    tl.store(grad_ptr, tl.sum(to_upper * (1 - right), 0), mask=known)
    tl.store(grad_ptr + CLASSES, tl.sum(to_upper * right, 0), mask=known)
    tl.store(grad_ptr + 2 * CLASSES, tl.sum(to_lower * (1 - right), 0), mask=known)
    tl.store(grad_ptr + 3 * CLASSES, tl.sum(to_lower * right, 0), mask=known)


@triton.jit
def mixed(left_ptr, right_ptr, known, right):
    """Between the logits of two corners, ``[X, K]``; what is no class has none of the probability."""
    of_left = tl.load(left_ptr, mask=known, other=float("-inf")).to(tl.float32)[None, :]
    of_right = tl.load(right_ptr, mask=known, other=float("-inf")).to(tl.float32)[None, :]
    return of_left * (1 - right) + of_right * right


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
    """The gradient of each logit: the corners of the four cells around a patch, in a fixed order, times a scale.

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
    total *= tl.load(scale_ptr + sample)
    at = ((sample * rows + y) * columns + x)[:, None] * CLASSES + k[None, :]
    tl.store(grad_ptr + at, total.to(grad_ptr.dtype.element_ty), mask=mask)
