"""Weight gradients of replicas in many parts.

The gradient of a layer's weight is a product over all rows, ``[C, N] x [N, D]``. For one model the library splits the
long sum over many multiprocessors; for the replicas' batched product it does not, and a handful of them work while the
others wait. Here long batched products are cut into shorter ones, which are then added.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LONG = 1024  # rows from which on it pays
_SHORT = 256  # rows of a part, about
_THIN = 512  # C and D at most: larger results have work for all


def split_long_products(device: torch.device) -> AbstractContextManager[Any]:
    """Around the backward pass of replicas; of no effect but on a GPU."""
    return SplitLongProducts() if device.type == "cuda" else nullcontext()


class SplitLongProducts(TorchDispatchMode):
    """Inside the block, ``bmm`` sums over many rows in parts; results differ by rounding."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.bmm.default:
            return _split_bmm(*args)
        return func(*args, **(kwargs or {}))


def _split_bmm(left: Tensor, right: Tensor) -> Tensor:
    """``[R, C, N] x [R, N, D]``."""
    replicas, height, length = left.shape
    width = right.shape[2]
    parts = parts_of(length)
    # What replicas share would be copied for each of them.
    costly = (height >= width and left.stride(0) == 0) or (width >= height and right.stride(0) == 0)
    if length < _LONG or max(height, width) > _THIN or parts == 1 or costly:
        return torch.bmm(left, right)
    a = left.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)  # shape: [R parts, C, N / parts]
    b = right.unflatten(1, (parts, -1)).flatten(0, 1)
    return torch.bmm(a, b).unflatten(0, (replicas, parts)).sum(1)


def parts_of(length: int) -> int:
    """The divisor of ``length`` that makes parts closest to 256 rows, and none below 128.

    Parts of equal length need no copy: they are evenly apart in memory. A few long ones are better than none, because
    one product of all rows keeps a third of the chip busy (ten replicas at width 128).
    """
    wanted = max(1, length // _SHORT)
    divisors = [n for n in range(1, 2 * wanted + 1) if length % n == 0]
    return min(divisors, key=lambda n: abs(math.log(n / wanted)))
