"""``torch.func.vmap`` over the operators: its axis joins their replica axis, so that one launch serves all of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def fold(x: Tensor, dim: int | None, batch: int) -> Tensor:
    """Join the axis ``dim`` of ``batch`` samples with the replica axis: ``[batch, R, ...] -> [batch * R, ...]``."""
    return _join(x, dim, batch).contiguous()


def fold_rows(x: Tensor, dim: int | None, batch: int) -> Tensor:
    """As :func:`fold`, without a copy where :func:`in_rows` needs none: ``[batch, R, N, D] -> [batch * R, N, D]``."""
    return in_rows(_join(x, dim, batch))


def _join(x: Tensor, dim: int | None, batch: int) -> Tensor:
    x = x.unsqueeze(0).expand(batch, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def in_rows(x: Tensor) -> Tensor:
    """``[R, N, D]`` as it is where its rows are evenly apart, such as columns of a wider table; else a copy."""
    even = x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    return x if x.stride(2) == 1 and x.stride(1) >= x.shape[2] and even else x.contiguous()


def unfold(x: Tensor, batch: int) -> Tensor:
    """Undo :func:`fold`."""
    return x.unflatten(0, (batch, -1))


def one_by_one(
    operator: Callable[..., Any], batch: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> list[Tensor]:
    """Call a sample at a time and stack: for what replicas cannot share, such as coefficients of their own."""
    results = []
    for index in range(batch):
        mine = [arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims, strict=True)]
        result = operator(*mine)
        results.append([result] if isinstance(result, Tensor) else list(result))
    return [torch.stack(parts) for parts in zip(*results, strict=True)]
