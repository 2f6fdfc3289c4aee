"""GIN's conv on many rows of several replicas: two stages of Linear, BatchNorm and ReLU.

A replica's weight gradient is a product of two long, thin matrices. As one batched product, a replica's would be the
work of a single multiprocessor; here many programs take a part of the rows each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from nsr.training.tree_layer import Weights, affine, batch_norm

_ROWS = 32  # in a tile
_PROGRAMS = 264
_PRECISION = {"highest": "ieee", "high": "tf32", "medium": "tf32"}


def gin_conv(weights: Weights, aggregate: Tensor, count: Tensor | None) -> Tensor:
    """The update of GIN from the aggregates, ``[R, N, D]``; see :func:`nsr.training.tree_layer.host_update`."""
    for linear, norm in ((0, 1), (3, 4)):
        hidden = _Affine.apply(aggregate, weights[f"conv.nn.{linear}.weight"], weights[f"conv.nn.{linear}.bias"])
        own = {name: weight for name, weight in weights.items() if name.startswith(f"conv.nn.{norm}.")}
        for tensor in (hidden, count):
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, 1)  # one compilation for all layers and batches
        aggregate = _norm_in_few_kernels(own, f"conv.nn.{norm}", hidden, count)
    return aggregate


def _norm(weights: Weights, name: str, x: Tensor, count: Tensor | None) -> Tensor:
    return F.relu(batch_norm(weights, name, x, count))


_norm_in_few_kernels = torch.compile(_norm)


class _Affine(torch.autograd.Function):
    """:func:`nsr.training.tree_layer.affine` with the gradients of weight and bias in many parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return affine(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        replicas, rows, width = x.shape
        tiles = triton.cdiv(rows, _ROWS)
        each = triton.cdiv(tiles, max(1, _PROGRAMS // replicas))
        programs = triton.cdiv(tiles, each)
        parts = x.new_empty(replicas, programs, width + 1, width)
        affine_gradient[(programs, replicas)](
            x, grad, parts, rows, each,
            D=width, BLOCK=_ROWS, P=_PRECISION[torch.get_float32_matmul_precision()],
        )  # fmt: skip
        total = parts.sum(1)
        return torch.bmm(grad, weight), total[:, :width], total[:, width]


@triton.jit(do_not_specialize=["rows", "tiles_each"])
def affine_gradient(  # type: ignore[no-untyped-def]
    x_ptr, grad_ptr, part_ptr, rows, tiles_each, D: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr
):
    """A part of ``grad^T x`` and of the sum of ``grad``: ``[D + 1, D]`` of each program."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    weight = tl.zeros([D, D], tl.float32)
    bias = tl.zeros([D], tl.float32)
    first = tl.program_id(0) * tiles_each
    for tile in range(first, first + tiles_each):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        at = (replica * rows + row)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=(row < rows)[:, None], other=0.0)
        grad = tl.load(grad_ptr + at, mask=(row < rows)[:, None], other=0.0)
        weight += tl.dot(tl.trans(grad), x, input_precision=P)
        bias += tl.sum(grad, 0)
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * (D + 1) * D
    tl.store(part_ptr + d[:, None] * D + d[None, :], weight)
    tl.store(part_ptr + D * D + d, bias)
