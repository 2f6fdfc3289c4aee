"""Sums over laid-out groups, nothing atomic: the merge, the feature path, and the way of a gradient back to members.

``merge``           y = Σ t x
``decode``          y += W_feat Σ t c
``spread_gradient`` dx = t (dy + Σ of what the members' codes send to y) + what they send to x
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows, load_weight

# Read a number at a time, so that nothing is gained by knowing where they begin, and a compilation lost.
INDICES = ["share_ptr", "order_ptr", "start_ptr"]


@triton.jit
def zero_padding(ptr, order_ptr, end, length, PLACES: tl.constexpr, column, WIDTH: tl.constexpr):
    """Set the rows of padding to 0: tokens in no group, whose places come after the end of the last one."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    padding = (place >= end) & (place < length)
    token = tl.load(order_ptr + place, mask=padding, other=0)
    zeros = tl.zeros([PLACES, column.shape[0]], tl.float32).to(ptr.dtype.element_ty)
    at = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(ptr + at, zeros, mask=padding[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["length", "num_groups"], do_not_specialize_on_alignment=INDICES)
def merge(
    x_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    y_ptr,
    code_ptr,
    x_batch,
    x_row,
    length,
    num_groups,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CODED: tl.constexpr,
):
    """``y_g = Σ t_i x_i`` in fp32, all ``t`` 1 if not ``WEIGHTED``; programs are (tile of groups, sample).

    With ``CODED``, codes of tokens that are alone in their group, and of padding, are set to 0.
    """
    sample = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = g < num_groups
    start_ptr += sample * (num_groups + 1)
    order_ptr += sample * length
    x_ptr += sample * x_batch
    start = tl.load(start_ptr + g, mask=inside, other=0)
    count = tl.load(start_ptr + g + 1, mask=inside, other=0) - start
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for k in range(0, tl.max(count, 0)):
        active = k < count
        token = tl.load(order_ptr + start + k, mask=active, other=0)
        rows = load_rows(x_ptr, token, active, x_row, d, WIDTH).to(tl.float32)
        if WEIGHTED:
            rows *= tl.load(share_ptr + sample * length + token, mask=active, other=0.0)[:, None]
        total += rows
    at = (sample * num_groups + g)[:, None] * WIDTH + d[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (d < WIDTH)[None, :])
    if CODED:
        code_ptr += sample * length * CODE
        c = tl.arange(0, BLOCK_C)
        alone = count == 1
        token = tl.load(order_ptr + start, mask=alone, other=0)
        zeros = tl.zeros([BLOCK_G, BLOCK_C], tl.float32).to(code_ptr.dtype.element_ty)
        at = token.to(tl.int64)[:, None] * CODE + c[None, :]
        tl.store(code_ptr + at, zeros, mask=alone[:, None] & (c < CODE)[None, :])
        zero_padding(code_ptr, order_ptr, tl.load(start_ptr + num_groups), length, BLOCK_G, c, CODE)


@triton.jit(do_not_specialize=["length", "num_groups", "samples"], do_not_specialize_on_alignment=INDICES)
def decode(
    code_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    decoder_ptr,
    y_ptr,
    length,
    num_groups,
    samples,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``y_g += W_feat Σ t_i c_i``, in place, groups of two or more only; programs are (tile of groups, sample).

    There are ``samples`` of each model, whose decoders lie one behind the other.
    """
    sample = tl.program_id(1).to(tl.int64)
    decoder_ptr += tl.program_id(1) // samples * WIDTH * CODE
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = g < num_groups
    start_ptr += sample * (num_groups + 1)
    start = tl.load(start_ptr + g, mask=inside, other=0)
    count = tl.load(start_ptr + g + 1, mask=inside, other=0) - start
    count = tl.where(count > 1, count, 0)
    longest = tl.max(count, 0)
    if longest > 1:
        c = tl.arange(0, BLOCK_C)
        total = tl.zeros([BLOCK_G, BLOCK_C], tl.float32)
        for k in range(0, longest):
            active = k < count
            token = tl.load(order_ptr + sample * length + start + k, mask=active, other=0)
            share = tl.load(share_ptr + sample * length + token, mask=active, other=0.0)
            codes = load_rows(code_ptr + sample * length * CODE, token, active, CODE, c, CODE)
            total += share[:, None] * codes.to(tl.float32)
        d = tl.arange(0, BLOCK_D)
        update = dot(total.to(KIND), load_weight(decoder_ptr, CODE, c, d, CODE, WIDTH).to(KIND), PRECISION)
        kind = y_ptr.dtype.element_ty
        at = (sample * num_groups + g)[:, None] * WIDTH + d[None, :]
        mask = (count > 1)[:, None] & (d < WIDTH)[None, :]
        y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (y + update.to(kind).to(tl.float32)).to(kind), mask=mask)


@triton.jit(do_not_specialize=["length", "num_groups", "slots"], do_not_specialize_on_alignment=[*INDICES, "slot_ptr"])
def spread_gradient(
    grad_y_ptr,
    to_x_ptr,
    to_y_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    slot_ptr,
    grad_x_ptr,
    length,
    num_groups,
    slots,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BRANCHED: tl.constexpr,
):
    """The gradient of each member, 0 for padding; programs are (tile of groups, sample).

    With ``BRANCHED``, ``to_x`` and ``to_y`` hold a row a slot.
    """
    sample = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = g < num_groups
    start_ptr += sample * (num_groups + 1)
    order_ptr += sample * length
    slot_ptr += sample * length
    to_x_ptr += sample * slots * WIDTH
    to_y_ptr += sample * slots * WIDTH
    grad_x_ptr += sample * length * WIDTH
    start = tl.load(start_ptr + g, mask=inside, other=0)
    count = tl.load(start_ptr + g + 1, mask=inside, other=0) - start
    d = tl.arange(0, BLOCK_D)
    total = load_rows(grad_y_ptr + sample * num_groups * WIDTH, g, inside, WIDTH, d, WIDTH).to(tl.float32)
    if BRANCHED:
        for k in range(0, tl.max(tl.where(count > 1, count, 0), 0)):
            active = (k < count) & (count > 1)
            slot = tl.load(slot_ptr + start + k, mask=active, other=0)
            total += load_rows(to_y_ptr, slot, active, WIDTH, d, WIDTH).to(tl.float32)
    for k in range(0, tl.max(count, 0)):
        active = k < count
        token = tl.load(order_ptr + start + k, mask=active, other=0)
        share = tl.load(share_ptr + sample * length + token, mask=active, other=0.0)
        rows = share[:, None] * total
        if BRANCHED:
            slot = tl.load(slot_ptr + start + k, mask=active, other=-1)
            rows += load_rows(to_x_ptr, slot, slot >= 0, WIDTH, d, WIDTH).to(tl.float32)
        at = token.to(tl.int64)[:, None] * WIDTH + d[None, :]
        tl.store(grad_x_ptr + at, rows.to(grad_x_ptr.dtype.element_ty), mask=active[:, None] & (d < WIDTH)[None, :])
    zero_padding(grad_x_ptr, order_ptr, tl.load(start_ptr + num_groups), length, BLOCK_G, d, WIDTH)
