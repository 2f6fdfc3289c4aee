"""A linear layer that adds to the residual stream: one kernel where a product and an addition would be two."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows, load_vector, load_weight


@triton.jit(do_not_specialize=["rows"])
def project_add(
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
    BLOCK_K: tl.constexpr,
):
    """``x + (W a + b)``, the term in brackets rounded as a layer's output is; programs are (rows, columns)."""
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < rows
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.static_range(0, WIDTH, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = load_rows(a_ptr, i, inside, WIDTH, k, WIDTH)
        total += dot(a, load_weight(weight_ptr, WIDTH, k, n, WIDTH, OUT), "ieee")
    total += load_vector(bias_ptr, n, OUT)
    kind = out_ptr.dtype.element_ty
    x = load_rows(x_ptr, i, inside, OUT, n, OUT).to(tl.float32)
    at = i.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(out_ptr + at, (x + total.to(kind).to(tl.float32)).to(kind), mask=inside[:, None] & (n < OUT)[None, :])
