"""Device functions that the token kernels share."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

# Triton's interpreter (3.9) multiplies the bit patterns of bf16 blocks; there the same values are multiplied in fp32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """``a @ b`` summed in fp32. ``PRECISION`` matters to fp32 blocks alone; products of half precisions are exact."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_rows(ptr, row, row_inside, stride, d, WIDTH: tl.constexpr):
    """Columns ``d`` of some rows of a table, ``[row, d]``; 0 outside."""
    at = row.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(ptr + at, mask=row_inside[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def load_vector(ptr, at, length: tl.constexpr):
    """Entries of a vector as one fp32 row, 0 outside."""
    return tl.load(ptr + at, mask=at < length, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_weight(ptr, row_stride, d, n, WIDTH: tl.constexpr, OUT: tl.constexpr):
    """Columns ``d`` of a weight ``[OUT, WIDTH]``, transposed: ``[d, n]``, 0 outside."""
    return tl.load(
        ptr + n[None, :] * row_stride + d[:, None], mask=(d < WIDTH)[:, None] & (n < OUT)[None, :], other=0.0
    )
