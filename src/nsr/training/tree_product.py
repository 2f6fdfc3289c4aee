"""The one product of all tree kernels."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def product(a, b):
    """``a b`` in fp32, as three TF32 products: the multiply-adds of "ieee" would spill kilobytes of registers.

    Also where ``torch.set_float32_matmul_precision`` allows TF32: with one TF32 product these kernels learned fewer
    than half of the held-out queries that fp32 learns at depth 5, for a cause not found (``docs/log.md``, 2026-11-17).
    """
    return tl.dot(a, b, input_precision="tf32x3")
