"""The two ends of the model on trees by the kernels of ``tree_ends_kernels.py``; fast twins of plain operators."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv
from nsr.training.tree_ends_kernels import encode, encode_gradient, head_loss

_ROWS = 32  # in a tile of the encoder
_PAIRS = 16  # in a tile of the head
_PROGRAMS = 64  # of the head, for each replica


def encode_trees(weight: Tensor, bias: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Weight ``[R, D, 2 (L + 1)]``, bias ``[R, D]``, values and their positions ``[R, S L]`` to the first rows."""
    return _Encode.apply(weight, bias, values, positions)


def head_and_loss(rows: Tensor, weight: Tensor, bias: Tensor, label: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy ``[R]`` of the last ``B`` rows that count, and the number of right answers ``[R]``."""
    return _HeadLoss.apply(rows, weight, bias, label, count)


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        weight, bias, values, positions = (x.contiguous() for x in (weight, bias, values, positions))
        replicas, width, columns = weight.shape
        leaves = columns // 2 - 1
        trees = values.shape[1] // leaves
        out = weight.new_empty(replicas, trees * leaves + 1 + leaves, width)
        encode[(cdiv(out.shape[1], _ROWS), replicas)](
            weight, bias, values, out, trees, LEAVES=leaves, D=width, BLOCK=_ROWS
        )
        ctx.save_for_backward(positions)
        ctx.shape, ctx.trees = weight.shape, trees
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        replicas, width, columns = ctx.shape
        d_weight = grad.new_empty(ctx.shape)
        encode_gradient[(columns, replicas)](
            grad.contiguous(), positions, d_weight, ctx.trees, LEAVES=columns // 2 - 1, D=width, BLOCK=_ROWS
        )
        return d_weight, d_weight[:, :, : columns // 2].sum(2), None, None  # every row has one key


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, label: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, weight, bias, label, count = (x.contiguous() for x in (rows, weight, bias, label, count))
        replicas, read, width = rows.shape
        leaves, pairs = weight.shape[1], label.shape[1]
        tiles = cdiv(pairs, _PAIRS)
        each = cdiv(tiles, _PROGRAMS)
        programs = cdiv(tiles, each)
        d_root = rows.new_empty(replicas, pairs, width)
        parts = rows.new_empty(replicas, programs, leaves * (width + 1) + 2)
        head_loss[(programs, replicas)](
            rows, weight, bias, label, count, d_root, parts, read, pairs, each,
            LEAVES=leaves, D=width, CLASSES=max(16, leaves), BLOCK=_PAIRS,
        )  # fmt: skip
        total = parts.sum(1)
        ctx.save_for_backward(d_root, total)
        ctx.sizes = read, leaves, width
        right = total[:, -1]
        ctx.mark_non_differentiable(right)
        return total[:, -2], right

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        d_root, total = ctx.saved_tensors
        read, leaves, width = ctx.sizes
        scale = grad.unsqueeze(1)
        d_rows = d_root * scale.unsqueeze(2)
        if read > d_root.shape[1]:
            d_rows = torch.nn.functional.pad(d_rows, (0, 0, read - d_root.shape[1], 0))
        d_head = total[:, : leaves * (width + 1)] * scale
        return (
            d_rows,
            d_head[:, : leaves * width].unflatten(1, (leaves, width)),
            d_head[:, leaves * width :],
            None,
            None,
        )
