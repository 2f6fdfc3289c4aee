"""Adam of many replicas as one kernel: a single pass over weights, gradients and moments."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor

from nsr.kernels.counts import cdiv

_BLOCK = 1024


def adam_rows(
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    rate: Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """The fused twin of :func:`nsr.training.replicas.adam_rows`; rows ``[R, P]``, one after the other in memory."""
    replicas, length = weights.shape
    grid = (cdiv(length, _BLOCK), replicas)
    _step[grid](weights, gradient, first, second, steps, rate, length, weight_decay, *betas, eps, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["length", "decay", "beta1", "beta2", "eps"])
def _step(
    weights_ptr, gradient_ptr, first_ptr, second_ptr, steps_ptr, rate_ptr, length, decay, beta1, beta2, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    replica = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    at = replica * length + place
    steps, rate = tl.load(steps_ptr), tl.load(rate_ptr + replica)
    weight = tl.load(weights_ptr + at, mask=inside, other=0.0)
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0) + decay * weight
    first = tl.load(first_ptr + at, mask=inside, other=0.0)
    second = tl.load(second_ptr + at, mask=inside, other=0.0)
    first += (1 - beta1) * (gradient - first)
    second = beta2 * second + (1 - beta2) * gradient * gradient
    size = rate / (1 - tl.exp2(steps * tl.log2(beta1)))
    root = tl.sqrt(second / (1 - tl.exp2(steps * tl.log2(beta2))))
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    tl.store(weights_ptr + at, weight - size * first / (root + eps), mask=inside)
