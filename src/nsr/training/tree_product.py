"""The one product of all tree kernels."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def product(a, b):
    """``a b`` in fp32, as three TF32 products: the multiply-adds of "ieee" would spill kilobytes of registers.

    Also where ``torch.set_float32_matmul_precision`` allows TF32: rounded to it, by kernels or by plain operators, most
    runs at depth 5 learn far fewer held-out queries than in fp32 (``docs/log.md``, 2026-11-17).
    """
    return tl.dot(a, b, input_precision="tf32x3")
