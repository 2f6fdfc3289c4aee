"""Linear layers of replicas that add their bias inside the product.

Under ``vmap`` a layer is a batched product and then an addition, which reads and writes the whole ``[R, N, D]`` once
more. A product of one replica adds its bias for nothing, and where a replica has thousands of rows it fills the chip
alone: there the replicas come one after the other.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MANY = 8192  # rows from which on it pays: a launch a replica is then shorter than the addition


def bias_in_products(device: torch.device) -> AbstractContextManager[Any]:
    """Around the forward pass of replicas under ``vmap``; of no effect but on a GPU."""
    return BiasInProducts() if device.type == "cuda" else nullcontext()


class BiasInProducts(TorchFunctionMode):
    """Inside the block, ``linear`` of a long ``[N, C]`` with a bias is :func:`_linear`; results differ by rounding."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and not kwargs and len(args) == 3 and args[2] is not None:
            x, weight, bias = args
            if x.dim() == 2 and len(x) >= _MANY and not torch.is_autocast_enabled(x.device.type):
                return _linear(x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0)).squeeze(0)
        return func(*args, **(kwargs or {}))


@torch.library.custom_op("nsr::replica_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x W^T + b`` of each replica: ``[R, N, C]``, ``[R, D, C]`` and ``[R, D]`` to ``[R, N, D]``."""
    out = x.new_empty(*x.shape[:2], weight.shape[1])
    for replica in range(x.shape[0]):
        torch.addmm(bias[replica], x[replica], weight[replica].t(), out=out[replica])
    return out


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
    return of_x, torch.bmm(x.transpose(1, 2), grad).transpose(1, 2), grad.sum(1)


_linear.register_autograd(_differentiate, setup_context=_save)


@_linear.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
    def join(x: Tensor, dim: int | None) -> Tensor:  # [B, 1, ...] -> [B, ...], without a copy of what is shared
        return x.expand(info.batch_size, *x.shape[1:]) if dim is None else x.movedim(dim, 0).flatten(0, 1)

    tables = [join(x, dim) for x, dim in zip(args, in_dims, strict=True)]
    return _linear(*tables).unsqueeze(1), 0
