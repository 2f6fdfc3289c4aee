"""The fused kernel of unit coefficients: one program a row, both directions."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsr.kernels.member_order import member_order

BLOCK_E, BLOCK_H = 128, 8


def forward(coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """Unit coefficients, ``[E, H]``."""
    return _launch(coefficient, coefficient, source, target, num_targets, False)


def backward(grad: Tensor, coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """Their gradient, ``[E, H]``."""
    return _launch(grad, coefficient, source, target, num_targets, True)


def _launch(
    grad: Tensor, coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int, backward: bool
) -> Tensor:
    heads = coefficient.shape[1]
    order = member_order(target, source, num_targets)
    out = torch.empty_like(coefficient)
    block_h = min(BLOCK_H, triton.next_power_of_2(heads))
    if coefficient.shape[0]:
        unit_rows[(num_targets, triton.cdiv(heads, block_h))](
            grad, coefficient, order.member, order.start, out,
            HEADS=heads, BLOCK_E=BLOCK_E, BLOCK_H=block_h, BACKWARD=backward, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def unit_rows(
    grad_ptr,
    t_ptr,
    member_ptr,
    start_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """``t / |t|``, or ``g / |t| - t <t, g> / |t|^3``, over the members of a row; programs are (row, block of heads)."""
    row = tl.program_id(0)
    begin = tl.load(start_ptr + row)
    end = tl.load(start_ptr + row + 1)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    energy = tl.zeros([BLOCK_H], tl.float32)
    along = tl.zeros([BLOCK_H], tl.float32)
    for at in range(begin, end, BLOCK_E):
        place, inside = members_of_row(member_ptr, at, end, head, HEADS, BLOCK_E)
        t = tl.load(t_ptr + place, mask=inside, other=0.0)
        energy += tl.sum(t * t, 0)
        if BACKWARD:
            along += tl.sum(t * tl.load(grad_ptr + place, mask=inside, other=0.0), 0)
    energy = tl.where(energy > 0, energy, 1.0)
    length = tl.sqrt_rn(energy)[None, :]
    for at in range(begin, end, BLOCK_E):
        place, inside = members_of_row(member_ptr, at, end, head, HEADS, BLOCK_E)
        value = tl.load(t_ptr + place, mask=inside, other=0.0)
        if BACKWARD:
            value = tl.load(grad_ptr + place, mask=inside, other=0.0) - value * (along / energy)[None, :]
        tl.store(out_ptr + place, tl.div_rn(value, length + tl.zeros_like(value)), mask=inside)


@triton.jit
def members_of_row(member_ptr, at, end, head, HEADS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Places of a block's coefficients in the caller's order, ``[member, head]``, and which of them exist."""
    e = at + tl.arange(0, BLOCK_E)
    member = tl.load(member_ptr + e, mask=e < end, other=0).to(tl.int64)
    return member[:, None] * HEADS + head[None, :], (e < end)[:, None] & (head < HEADS)[None, :]
