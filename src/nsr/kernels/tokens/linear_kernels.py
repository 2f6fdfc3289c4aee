"""The linear layers of a block with what stands before and behind them: one kernel where there would be two or three.

``norm_linear``  act(W LayerNorm(x) + b)
``linear_add``   x + (W a + b)

A width that is no power of two is cut in two that are: 192 = 128 + 64.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tiles import gelu_for
from nsr.kernels.tokens.blocks import dot, load_rows, load_vector, load_weight


@triton.jit
def centred_rows(x, mean, d, WIDTH: tl.constexpr):
    """Rows less their mean, 0 outside."""
    return tl.where((d < WIDTH)[None, :], x - mean[:, None], 0.0)


@triton.jit
def affine_rows(x, scale, weight_ptr, bias_ptr, d, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """What a norm makes of centred rows, rounded as its output is."""
    return (x * scale[:, None] * load_vector(weight_ptr, d, WIDTH) + load_vector(bias_ptr, d, WIDTH)).to(KIND)


@triton.jit(do_not_specialize=["rows", "span"])
def norm_linear(
    x_ptr,
    norm_ptr,
    norm_bias_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    span,
    eps,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
):
    """``act(W LayerNorm(x) + b)``, every step rounded as a layer's output is.

    Programs are (tile of rows, ``span`` columns). The first ``BLOCK_D`` channels are one block, the ``TAIL_D`` that are
    left another. ``GELU`` is 0 without one, else how many bf16 terms would hold what it returns.
    """
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < rows
    kind = out_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, i, inside, WIDTH, d, WIDTH).to(tl.float32)
    total = tl.sum(x, 1)
    if TAIL_D:
        d_tail = BLOCK_D + tl.arange(0, TAIL_D)
        x_tail = load_rows(x_ptr, i, inside, WIDTH, d_tail, WIDTH).to(tl.float32)
        total += tl.sum(x_tail, 1)
    mean = total / WIDTH
    x = centred_rows(x, mean, d, WIDTH)
    square = tl.sum(x * x, 1)
    if TAIL_D:
        x_tail = centred_rows(x_tail, mean, d_tail, WIDTH)
        square += tl.sum(x_tail * x_tail, 1)
    scale = tl.rsqrt(square / WIDTH + eps)
    normed = affine_rows(x, scale, norm_ptr, norm_bias_ptr, d, kind, WIDTH)
    if TAIL_D:
        normed_tail = affine_rows(x_tail, scale, norm_ptr, norm_bias_ptr, d_tail, kind, WIDTH)
    begin = tl.program_id(1) * span
    for first in range(begin, tl.minimum(begin + span, OUT), BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        out = dot(normed, load_weight(weight_ptr, WIDTH, d, n, WIDTH, OUT), "ieee")
        if TAIL_D:
            out += dot(normed_tail, load_weight(weight_ptr, WIDTH, d_tail, n, WIDTH, OUT), "ieee")
        out = (out + load_vector(bias_ptr, n, OUT)).to(kind)
        if GELU:
            out = gelu_for(out.to(tl.float32), GELU).to(kind)
        at = i.to(tl.int64)[:, None] * OUT + n[None, :]
        tl.store(out_ptr + at, out, mask=inside[:, None] & (n < OUT)[None, :])


@triton.jit
def store_sum(total, x_ptr, bias_ptr, out_ptr, i, inside, n, OUT: tl.constexpr):
    """``x + (total + b)``, the term in brackets rounded as a layer's output is."""
    kind = out_ptr.dtype.element_ty
    added = (total + load_vector(bias_ptr, n, OUT)).to(kind).to(tl.float32)
    x = load_rows(x_ptr, i, inside, OUT, n, OUT).to(tl.float32)
    at = i.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(out_ptr + at, (x + added).to(kind), mask=inside[:, None] & (n < OUT)[None, :])


@triton.jit(do_not_specialize=["rows"])
def linear_add(
    a_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    rows,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``x + (W a + b)``; programs are (tile of rows, ``BLOCK_N + TAIL_N`` columns)."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < rows
    n = tl.program_id(1) * (BLOCK_N + TAIL_N) + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TAIL_N:
        n_tail = tl.program_id(1) * (BLOCK_N + TAIL_N) + BLOCK_N + tl.arange(0, TAIL_N)
        total_tail = tl.zeros([BLOCK_M, TAIL_N], tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = load_rows(a_ptr, i, inside, WIDTH, k, WIDTH)
        total += dot(a, load_weight(weight_ptr, WIDTH, k, n, WIDTH, OUT), "ieee")
        if TAIL_N:
            total_tail += dot(a, load_weight(weight_ptr, WIDTH, k, n_tail, WIDTH, OUT), "ieee")
    store_sum(total, x_ptr, bias_ptr, out_ptr, i, inside, n, OUT)
    if TAIL_N:
        store_sum(total_tail, x_ptr, bias_ptr, out_ptr, i, inside, n_tail, OUT)
