"""Merging as one gather."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.tokens.layout import GroupLayout


def merge(x: Tensor, layout: GroupLayout) -> Tensor:
    """``y_g = Σ t_i x_i``, summed in fp32, in a fixed order: ``[B, N, D] -> [B, G, D]``; differentiable in ``x``."""
    return merge_rows(x, layout.group, layout.share, layout.order, layout.start)


@torch.library.custom_op("nsr::merge", mutates_args=())
def merge_rows(x: Tensor, group: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    """:func:`merge` with the parts of a layout one by one, as operators take them."""
    import triton

    from nsr.kernels.tokens.merge_kernels import merge as kernel

    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, width = x.shape
    groups = start.shape[1] - 1
    y = x.new_empty(batch, groups, width)
    kernel[(triton.cdiv(groups, 16), batch)](
        x, share, order, start, y, x.stride(0), x.stride(1), length, groups,
        WIDTH=width, BLOCK_D=triton.next_power_of_2(width), BLOCK_G=16, num_warps=4,
    )  # fmt: skip
    return y


@merge_rows.register_fake
def _(x: Tensor, group: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], start.shape[1] - 1, x.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    group, share = ctx.saved_tensors
    rows = grad.gather(1, group.unsqueeze(-1).expand(-1, -1, grad.shape[-1]))
    return (share.unsqueeze(-1) * rows).to(grad.dtype), None, None, None, None


merge_rows.register_autograd(_differentiate, setup_context=_save)
