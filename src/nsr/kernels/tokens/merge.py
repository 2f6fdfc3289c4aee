"""Merging as one gather."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.tokens.layout import GroupLayout


def merge(x: Tensor, layout: GroupLayout) -> Tensor:
    """``y_g = Σ t_i x_i``, summed in fp32, in a fixed order: ``[B, N, D] -> [B, G, D]``; differentiable in ``x``."""
    return _merge(x, *layout[1:4])


@torch.library.custom_op("nsr::merge", mutates_args=())
def _merge(x: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return gather_sums(x, share, order, start)


@_merge.register_fake
def _(x: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], start.shape[1] - 1, x.shape[2])


@torch.library.custom_op("nsr::merge_backward", mutates_args=())
def _merge_backward(grad: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return spread_rows(grad.contiguous(), share, order, start)


@_merge_backward.register_fake
def _(grad: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], order.shape[1], grad.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _merge_backward(grad, *ctx.saved_tensors), None, None, None


_merge.register_autograd(_differentiate, setup_context=_save)


def gather_sums(x: Tensor, share: Tensor | None, order: Tensor, start: Tensor, codes: Tensor | None = None) -> Tensor:
    """``Σ t_i x_i`` of every group, in fp32, in a fixed order: ``[B, N, D] -> [B, G, D]``; no gradient.

    Args:
        x: Rows to sum.
        share: ``t``, ``[B, N]``; all 1 if not given.
        order: Tokens group by group, see :class:`~nsr.kernels.tokens.layout.GroupLayout`.
        start: Where each group begins.
        codes: If given, ``[B, N, R]``, the rows of tokens in no group of two or more are set to 0 on the way.
    """
    from nsr.kernels.tokens.merge_kernels import merge as kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, width = x.shape
    groups = start.shape[1] - 1
    y = x.new_empty(batch, groups, width)
    code = 1 if codes is None else codes.shape[-1]
    kernel[(cdiv(groups if codes is None else length, 8), batch)](
        x, x if share is None else share, order, start, y, x if codes is None else codes,
        x.stride(0), x.stride(1), length, groups,
        WIDTH=width, BLOCK_D=next_power_of_2(width), CODE=code, BLOCK_C=next_power_of_2(code),
        BLOCK_G=8, WEIGHTED=share is not None, CODED=codes is not None, num_warps=4,
    )  # fmt: skip
    return y


def spread_rows(
    grad: Tensor,
    share: Tensor,
    order: Tensor,
    start: Tensor,
    to_x: Tensor | None = None,
    to_y: Tensor | None = None,
    slot_of_place: Tensor | None = None,
) -> Tensor:
    """The gradient of a merge, and of the branch behind it: ``[B, G, D] -> [B, N, D]``.

    Args:
        grad: Of the merged tokens.
        share: ``t``, ``[B, N]``.
        order: Tokens group by group.
        start: Where each group begins.
        to_x: What the branch sends to its members, ``[B, slots, D]``; ``None`` without branch, and so the rest.
        to_y: What it sends to their groups.
        slot_of_place: The slot of each place of ``order``, ``[B, N]``; -1 where there is none.
    """
    from nsr.kernels.tokens.merge_kernels import spread_gradient as kernel

    batch, groups, width = grad.shape
    length = order.shape[1]
    spread = torch.empty_like(order) if slot_of_place is None else slot_of_place
    out = grad.new_empty(batch, length, width)
    kernel[(cdiv(length, 4), batch)](
        grad, grad if to_x is None else to_x, grad if to_y is None else to_y, share, order, start, spread, out,
        length, groups, 0 if to_x is None else to_x.shape[1],
        WIDTH=width, BLOCK_D=next_power_of_2(width), BLOCK_G=4, BRANCHED=to_x is not None, num_warps=2,
    )  # fmt: skip
    return out
