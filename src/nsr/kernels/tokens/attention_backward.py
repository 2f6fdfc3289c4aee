"""The gradient of attention with one weight a key: scores are made again, tile by tile, nothing quadratic is kept.

With ``p`` in proportion to ``w exp(q kᵀ / √d_h)``, ``o = p v`` and ``δ_i = Σ_d do_id o_id``::

    dp = do vᵀ     ds = p ⊙ (dp - δ)     dv = pᵀ do     dk = dsᵀ q / √d_h     dq = ds k / √d_h

Weights of keys get no gradient: sizes are counts. Sums run in a fixed order, nothing is atomic.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.attention_kernels import count_of, load_tile
from nsr.kernels.tokens.blocks import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def fold_keys(
    state,
    q,
    grad,
    level,
    delta,
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
    WHOLE: tl.constexpr,
):
    """Add what the keys from ``begin`` to ``end`` send to a tile of queries."""
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        k = load_tile(k_ptr, j, x_row, length, d, WIDTH, BLOCK_D, WHOLE)
        v = load_tile(v_ptr, j, x_row, length, d, WIDTH, BLOCK_D, WHOLE)
        of_key = tl.load(weight_ptr + j, mask=j < length, other=0.0)
        weight = tl.exp2(dot(q, tl.trans(k), "ieee") * scale - level[:, None]) * of_key[None, :]
        to_score = weight * (dot(grad, tl.trans(v), "ieee") - delta[:, None])
        state += dot(to_score.to(k_ptr.dtype.element_ty), k, "ieee")
    return state


@triton.jit(do_not_specialize=["length", "heads"], do_not_specialize_on_alignment=["weight_ptr", "count_ptr"])
def attend_backward_queries(
    q_ptr,
    k_ptr,
    v_ptr,
    weight_ptr,
    count_ptr,
    out_ptr,
    grad_ptr,
    level_ptr,
    delta_ptr,
    to_q_ptr,
    x_batch,
    x_row,
    x_head,
    to_batch,
    to_row,
    to_head,
    heads,
    length,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """``dq`` and ``δ`` of one tile of queries; programs are (tile, sample and head). ``scale`` includes log2(e)."""
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += sample * x_batch + head * x_head
    k_ptr += sample * x_batch + head * x_head
    v_ptr += sample * x_batch + head * x_head
    to_q_ptr += sample * to_batch + head * to_head
    weight_ptr += sample * length
    i = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    # shape: [B, N, H, d_h]
    row = heads * WIDTH
    at = (sample * length * heads + head) * WIDTH
    end = count_of(count_ptr + sample, tl.program_id(0) * BLOCK_Q, length, COUNTED)
    q = load_tile(q_ptr, i, x_row, length, d, WIDTH, BLOCK_D, False)
    out = load_tile(out_ptr + at, i, row, length, d, WIDTH, BLOCK_D, False)
    grad = load_tile(grad_ptr + at, i, row, length, d, WIDTH, BLOCK_D, False)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    of_row = tl.program_id(1).to(tl.int64) * length + i
    tl.store(delta_ptr + of_row, delta, mask=i < length)
    level = tl.load(level_ptr + of_row, mask=i < length, other=0.0)
    total = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    border = end // BLOCK_K * BLOCK_K
    total = fold_keys(
        total, q, grad, level, delta, k_ptr, v_ptr, weight_ptr, x_row, 0, border, end, scale,
        WIDTH, BLOCK_D, BLOCK_K, True,
    )  # fmt: skip
    if border < end:
        total = fold_keys(
            total, q, grad, level, delta, k_ptr, v_ptr, weight_ptr, x_row, border, end, end, scale,
            WIDTH, BLOCK_D, BLOCK_K, False,
        )  # fmt: skip
    mask = (i < length)[:, None] & (d < WIDTH)[None, :]
    total *= scale / LOG2_E
    if COUNTED:
        total = tl.where((i < end)[:, None], total, 0.0)
    tl.store(to_q_ptr + i[:, None] * to_row + d[None, :], total.to(to_q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def fold_queries(
    state,
    k,
    v,
    of_key,
    q_ptr,
    grad_ptr,
    level_ptr,
    delta_ptr,
    x_row,
    grad_row,
    begin,
    end,
    length,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add what the queries from ``begin`` to ``end`` send to a tile of keys and values."""
    to_k, to_v = state
    kind = q_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_Q):
        i = first + tl.arange(0, BLOCK_Q)
        q = load_tile(q_ptr, i, x_row, length, d, WIDTH, BLOCK_D, WHOLE)
        grad = load_tile(grad_ptr, i, grad_row, length, d, WIDTH, BLOCK_D, WHOLE)
        # of a query outside, q and do are 0: it sends nothing, as long as its weight is finite
        level = tl.load(level_ptr + i, mask=i < length, other=float("inf"))
        delta = tl.load(delta_ptr + i, mask=i < length, other=0.0)
        weight = tl.exp2(dot(k, tl.trans(q), "ieee") * scale - level[None, :]) * of_key[:, None]  # shape: [k, q]
        to_v += dot(weight.to(kind), grad, "ieee")
        to_score = weight * (dot(v, tl.trans(grad), "ieee") - delta[None, :])
        to_k += dot(to_score.to(kind), q, "ieee")
    return to_k, to_v


@triton.jit(do_not_specialize=["length", "heads"], do_not_specialize_on_alignment=["weight_ptr", "count_ptr"])
def attend_backward_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    weight_ptr,
    count_ptr,
    grad_ptr,
    level_ptr,
    delta_ptr,
    to_k_ptr,
    to_v_ptr,
    x_batch,
    x_row,
    x_head,
    to_batch,
    to_row,
    to_head,
    heads,
    length,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """``dk`` and ``dv`` of one tile of keys; programs are (tile, sample and head). ``scale`` includes log2(e)."""
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    q_ptr += sample * x_batch + head * x_head
    k_ptr += sample * x_batch + head * x_head
    v_ptr += sample * x_batch + head * x_head
    grad_ptr += (sample * length * heads + head) * WIDTH
    level_ptr += tl.program_id(1).to(tl.int64) * length
    delta_ptr += tl.program_id(1).to(tl.int64) * length
    j = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    k = load_tile(k_ptr, j, x_row, length, d, WIDTH, BLOCK_D, False)
    v = load_tile(v_ptr, j, x_row, length, d, WIDTH, BLOCK_D, False)
    end = count_of(count_ptr + sample, tl.program_id(0) * BLOCK_K, length, COUNTED)
    of_key = tl.load(weight_ptr + sample * length + j, mask=j < end, other=0.0)
    state = (tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32))
    border = end // BLOCK_Q * BLOCK_Q
    state = fold_queries(
        state, k, v, of_key, q_ptr, grad_ptr, level_ptr, delta_ptr, x_row, heads * WIDTH, 0, border, end, scale,
        WIDTH, BLOCK_D, BLOCK_Q, True,
    )  # fmt: skip
    if border < end:
        state = fold_queries(
            state, k, v, of_key, q_ptr, grad_ptr, level_ptr, delta_ptr, x_row, heads * WIDTH, border, end, end,
            scale, WIDTH, BLOCK_D, BLOCK_Q, False,
        )  # fmt: skip
    to_k, to_v = state
    at = sample * to_batch + head * to_head + j[:, None] * to_row + d[None, :]
    mask = (j < length)[:, None] & (d < WIDTH)[None, :]
    kind = to_k_ptr.dtype.element_ty
    tl.store(to_k_ptr + at, (to_k * (scale / LOG2_E)).to(kind), mask=mask)
    tl.store(to_v_ptr + at, to_v.to(kind), mask=mask)
