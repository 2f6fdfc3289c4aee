"""The fused kernel of unit coefficients, both directions: a program has a long row, or a few short ones."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.member_order import member_order

BLOCK_H = 8
MEMBERS_PER_WARP = 128


def forward(coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """Unit coefficients, ``[E, H]``."""
    return _launch(coefficient, coefficient, source, target, num_targets, False)


def backward(grad: Tensor, coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """Their gradient, ``[E, H]``."""
    return _launch(grad, coefficient, source, target, num_targets, True)


def _launch(
    grad: Tensor, coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int, backward: bool
) -> Tensor:
    members, heads = coefficient.shape
    order = member_order(target, source, num_targets)
    out = torch.empty_like(coefficient)
    block_h = min(BLOCK_H, next_power_of_2(heads))
    if members:
        rows_at_once, members_at_once = blocks(members, num_targets)
        unit_rows[(cdiv(num_targets, rows_at_once), cdiv(heads, block_h))](
            grad, coefficient, order.member, order.start, out, num_targets,
            HEADS=heads, BLOCK_R=rows_at_once, BLOCK_E=members_at_once, BLOCK_H=block_h, BACKWARD=backward,
            num_warps=max(1, members_at_once // MEMBERS_PER_WARP),
        )  # fmt: skip
    return out


def blocks(members: int, rows: int) -> tuple[int, int]:
    """Rows of a program, and members of each that it reads at once: twice as many as a row has on average.

    A row a warp leaves most lanes idle where rows are short, and lets all others wait for a hub where they are long.
    """
    at_once = min(4 * MEMBERS_PER_WARP, max(8, next_power_of_2(2 * cdiv(members, rows))))
    return max(1, MEMBERS_PER_WARP // at_once), at_once


@triton.jit(do_not_specialize=["rows"])
def unit_rows(
    grad_ptr,
    t_ptr,
    member_ptr,
    start_ptr,
    out_ptr,
    rows,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """``t / |t|``, or ``g / |t| - t <t, g> / |t|^3``, over the members of a row; programs are (rows, heads)."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = tl.load(start_ptr + row, mask=row < rows, other=0)
    end = tl.load(start_ptr + row + 1, mask=row < rows, other=0)
    longest = tl.max(end - begin, 0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    energy = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    along = tl.zeros([BLOCK_R, BLOCK_H], tl.float32)
    for first in range(0, longest, BLOCK_E):
        place, inside = members_of_rows(member_ptr, begin + first, end, head, HEADS, BLOCK_E)
        t = tl.load(t_ptr + place, mask=inside, other=0.0)
        energy += tl.sum(t * t, 1)
        if BACKWARD:
            along += tl.sum(t * tl.load(grad_ptr + place, mask=inside, other=0.0), 1)
    energy = tl.where(energy > 0, energy, 1.0)
    length = tl.sqrt_rn(energy)[:, None, :]
    for first in range(0, longest, BLOCK_E):
        place, inside = members_of_rows(member_ptr, begin + first, end, head, HEADS, BLOCK_E)
        value = tl.load(t_ptr + place, mask=inside, other=0.0)
        if BACKWARD:
            value = tl.load(grad_ptr + place, mask=inside, other=0.0) - value * (along / energy)[:, None, :]
        tl.store(out_ptr + place, tl.div_rn(value, length + tl.zeros_like(value)), mask=inside)


@triton.jit
def members_of_rows(member_ptr, at, end, head, HEADS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Places of a block's coefficients in the caller's order, ``[row, member, head]``, and which of them exist."""
    e = at[:, None] + tl.arange(0, BLOCK_E)[None, :]
    exists = e < end[:, None]
    member = tl.load(member_ptr + e, mask=exists, other=0).to(tl.int64)
    place = member[:, :, None] * HEADS + head[None, None, :]
    return place, exists[:, :, None] & (head < HEADS)[None, None, :]
