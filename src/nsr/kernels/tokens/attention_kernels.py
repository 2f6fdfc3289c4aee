"""Attention with one weight a key, forward: flash attention whose exponentials are weighed in registers."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot


@triton.jit
def load_tile(ptr, row, stride, length, d, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """Some rows of one head, ``[row, d]``; ``WHOLE`` says that none lies outside."""
    at = row[:, None] * stride + d[None, :]
    if WHOLE and WIDTH == BLOCK_D:
        return tl.load(ptr + at)
    else:
        return tl.load(ptr + at, mask=(row < length)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def count_of(count_ptr, first, length, COUNTED: tl.constexpr):
    """Tokens of a sample; 0 for a tile that begins behind them."""
    if COUNTED:
        count = tl.load(count_ptr)
        return tl.where(first < count, count, 0)
    else:
        return length


@triton.jit
def fold_keys(
    q,
    state,
    k_ptr,
    v_ptr,
    weight_ptr,
    x_row,
    begin,
    end,
    length,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Attend to the keys from ``begin`` to ``end``; ``WHOLE`` says that all tiles of them are full.

    ``top`` is not scaled: scaling and subtracting it are then one instruction a score.
    """
    top, mass, total = state
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        k = load_tile(k_ptr, j, x_row, length, d, WIDTH, BLOCK_D, WHOLE)
        v = load_tile(v_ptr, j, x_row, length, d, WIDTH, BLOCK_D, WHOLE)
        score = dot(q, tl.trans(k), "ieee")
        if not WHOLE:
            score = tl.where((j < length)[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score * scale - (new_top * scale)[:, None])
        if WEIGHTED:
            weight *= tl.load(weight_ptr + j, mask=j < length, other=0.0)[None, :]
        fade = tl.exp2((top - new_top) * scale)
        total = total * fade[:, None] + dot(weight.to(v_ptr.dtype.element_ty), v, "ieee")
        mass = mass * fade + tl.sum(weight, 1)
        top = new_top
    return top, mass, total


@triton.jit(do_not_specialize=["length", "heads"], do_not_specialize_on_alignment=["weight_ptr", "count_ptr"])
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    weight_ptr,
    count_ptr,
    out_ptr,
    level_ptr,
    x_batch,
    x_row,
    x_head,
    heads,
    length,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COUNTED: tl.constexpr,
    LEVELLED: tl.constexpr,
):
    """One tile of queries against all keys; programs are (tile, sample and head). ``scale`` includes log2(e).

    With ``COUNTED`` a sample has fewer tokens than there is room for; the rest attends to nothing and gets 0. With
    ``LEVELLED`` the logarithm (to base 2) of each query's sum is kept: what the gradient makes the weights from.
    """
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += sample * x_batch + head * x_head
    k_ptr += sample * x_batch + head * x_head
    v_ptr += sample * x_batch + head * x_head
    weight_ptr += sample * length
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    end = count_of(count_ptr + sample, tl.program_id(0) * BLOCK_Q, length, COUNTED)
    q = load_tile(q_ptr, i, x_row, end, d, WIDTH, BLOCK_D, False)
    state = (
        tl.full([BLOCK_Q], float("-inf"), tl.float32),
        tl.zeros([BLOCK_Q], tl.float32),
        tl.zeros([BLOCK_Q, BLOCK_D], tl.float32),
    )
    border = end // BLOCK_K * BLOCK_K
    state = fold_keys(
        q, state, k_ptr, v_ptr, weight_ptr, x_row, 0, border, end, scale, WIDTH, BLOCK_D, BLOCK_K, WEIGHTED, True
    )
    if border < end:
        state = fold_keys(
            q, state, k_ptr, v_ptr, weight_ptr, x_row, border, end, end, scale,
            WIDTH, BLOCK_D, BLOCK_K, WEIGHTED, False,
        )  # fmt: skip
    top, mass, total = state
    if COUNTED:
        mass = tl.where(i < end, mass, 1.0)
        total = tl.where((i < end)[:, None], total, 0.0)
    total /= mass[:, None]
    if LEVELLED:
        tl.store(level_ptr + tl.program_id(1).to(tl.int64) * length + i, top * scale + tl.log2(mass), mask=i < length)
    # shape: [B, N, H, d_h], which the output projection reads without a copy
    at = ((sample * length + i) * heads + head)[:, None] * WIDTH + d[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(i < length)[:, None] & (d < WIDTH)[None, :])
