"""GIN's conv by the kernels of ``tree_conv_kernels.py``: two kernels a stage forward, three backward.

A replica's weight gradient is a product of two long, thin matrices. As one batched product it would be the work of a
single multiprocessor; here many programs take a part of the rows each.
"""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv
from nsr.training.tree_conv_kernels import linear_moments, norm_relu, norm_sums, stage_gradient
from nsr.training.tree_layer import LayerKind, Weights, host_update

_ROWS = 32  # in a tile
_PARTS = 128  # programs of a replica at most


def gin_conv(kind: LayerKind, weights: Weights, aggregate: Tensor, count: Tensor | None) -> Tensor:
    """The update of GIN from the aggregates, ``[R, N, D]``; see :func:`nsr.training.tree_layer.host_update`."""
    if count is None:
        return host_update(kind, weights, aggregate, aggregate, count)
    for linear, norm in ((0, 1), (3, 4)):
        aggregate = _Stage.apply(
            aggregate,
            weights[f"conv.nn.{linear}.weight"],
            weights[f"conv.nn.{linear}.bias"],
            weights[f"conv.nn.{norm}.weight"],
            weights[f"conv.nn.{norm}.bias"],
            weights[f"conv.nn.{norm}.running_mean"],
            weights[f"conv.nn.{norm}.running_var"],
            count,
        )
        weights[f"conv.nn.{norm}.num_batches_tracked"].add_(1)
    return aggregate


class _Stage(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        count: Tensor,
    ) -> Tensor:
        x, count = x.contiguous(), count.contiguous()
        weight, bias, gamma, beta = (w.contiguous() for w in (weight, bias, gamma, beta))
        replicas, rows, width = x.shape
        programs, each = _shares(rows)
        h, y = torch.empty_like(x), torch.empty_like(x)
        parts = x.new_empty(replicas, programs, 3, width)
        moments = x.new_empty(replicas, 3, width)  # count, mean and variance
        linear_moments[(programs, replicas)](x, weight, bias, count, h, parts, rows, each, D=width, BLOCK=_ROWS)
        norm_relu[(cdiv(rows, _ROWS), replicas)](
            h, parts, gamma, beta, moments, running_mean, running_var, y, rows, programs,
            D=width, BLOCK=_ROWS, PARTS=_PARTS,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, gamma, beta, h, moments, count)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gamma, beta, h, moments, count = ctx.saved_tensors
        grad = grad.contiguous()
        replicas, rows, width = x.shape
        programs, each = _shares(rows)
        norm_parts = x.new_empty(replicas, programs, 2, width)
        norm_sums[(programs, replicas)](grad, h, moments, gamma, beta, norm_parts, rows, each, D=width, BLOCK=_ROWS)
        dx, parts = torch.empty_like(x), x.new_empty(replicas, programs, width + 3, width)
        stage_gradient[(programs, replicas)](
            grad, x, h, count, moments, weight, gamma, beta, norm_parts, dx, parts, rows, each,
            D=width, BLOCK=_ROWS, PARTS=_PARTS,
        )  # fmt: skip
        d_weight, d_bias, d_gamma, d_beta = parts.sum(1).split([width, 1, 1, 1], dim=1)
        return dx, d_weight, d_bias.squeeze(1), d_gamma.squeeze(1), d_beta.squeeze(1), None, None, None


def _shares(rows: int) -> tuple[int, int]:
    """Programs of a replica, and the tiles of each."""
    tiles = cdiv(rows, _ROWS)
    each = cdiv(tiles, _PARTS)
    return cdiv(tiles, each), each
