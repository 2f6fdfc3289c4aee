"""Back to the patches: the spatial path of all events at once, and the tokens that are left."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.tokens import compiler_log
from nsr.kernels.tokens.layout import GroupLayout
from nsr.kernels.tokens.merge import gather_sums


def spread(codes: Sequence[Tensor], layouts: Sequence[GroupLayout], num_prefix: int) -> Tensor:
    """``S_p = Σ_e c_e[token that covers patch p ahead of event e]``, summed in fp32; differentiable in ``codes``.

    Args:
        codes: Of the tokens ahead of each event, ``[B, N_e, R]`` each.
        layouts: Of each event.
        num_prefix: Leading tokens, which cover no patch.

    Returns:
        ``[B, N0, R]`` in the format of the codes.
    """
    groups, _, orders, starts, *_ = zip(*layouts, strict=True)
    return _spread(list(codes), list(groups), list(orders), list(starts), num_prefix)


@torch.library.custom_op("nsr::spread", mutates_args=())
def _spread(
    codes: list[Tensor], groups: list[Tensor], orders: list[Tensor], starts: list[Tensor], num_prefix: int
) -> Tensor:
    from nsr.kernels.tokens.spread_kernels import spread as kernel

    batch, length, code = codes[0].shape
    patches = length - num_prefix
    out = codes[0].new_empty(batch, patches, code)
    kernel[(cdiv(patches, 32), batch)](
        tuple(c.contiguous() for c in codes), tuple(groups), tuple(c.shape[1] for c in codes), out, num_prefix, patches,
        EVENTS=len(codes), CODE=code, BLOCK_C=next_power_of_2(code), BLOCK_P=32, num_warps=4,
    )  # fmt: skip
    return out


@_spread.register_fake
def _(codes: list[Tensor], groups: list[Tensor], orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> Tensor:
    compiler_log.shorten()
    batch, length, code = codes[0].shape
    return codes[0].new_empty(batch, length - num_prefix, code)


@torch.library.custom_op("nsr::spread_backward", mutates_args=())
def _spread_backward(grad: Tensor, orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> list[Tensor]:
    return _sums_over_patches(grad, orders[:-1], starts[:-1], num_prefix)


@_spread_backward.register_fake
def _(grad: Tensor, orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> list[Tensor]:
    batch, _, code = grad.shape
    return [grad.new_empty(batch, order.shape[1], code) for order in orders]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.orders, ctx.starts, ctx.num_prefix = inputs[2:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = _spread_backward(grad, ctx.orders, ctx.starts, ctx.num_prefix)
    return grads, [None] * len(grads), [None] * len(grads), [None] * len(grads), None


_spread.register_autograd(_differentiate, setup_context=_save)


def unmerge(x: Tensor, layouts: Sequence[GroupLayout], num_prefix: int) -> Tensor:
    """Copy to each patch the token that covers it after all events: ``[B, N, D] -> [B, N0, D]``; differentiable."""
    groups, _, orders, starts, *_ = zip(*layouts, strict=True)
    return _unmerge(x, list(groups), list(orders), list(starts), num_prefix)


@torch.library.custom_op("nsr::unmerge", mutates_args=())
def _unmerge(x: Tensor, groups: list[Tensor], orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> Tensor:
    from nsr.kernels.tokens.spread_kernels import unmerge as kernel

    x = x.contiguous()
    batch, last, width = x.shape
    patches = groups[0].shape[1] - num_prefix
    out = x.new_empty(batch, patches, width)
    kernel[(cdiv(patches, 16), batch)](
        x, tuple(groups), tuple(group.shape[1] for group in groups), out, num_prefix, patches, last,
        EVENTS=len(groups), WIDTH=width, BLOCK_D=next_power_of_2(width), BLOCK_P=16, num_warps=4,
    )  # fmt: skip
    return out


@_unmerge.register_fake
def _(x: Tensor, groups: list[Tensor], orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> Tensor:
    compiler_log.shorten()
    return x.new_empty(x.shape[0], groups[0].shape[1] - num_prefix, x.shape[2])


@torch.library.custom_op("nsr::unmerge_backward", mutates_args=())
def _unmerge_backward(grad: Tensor, orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> Tensor:
    return _sums_over_patches(grad, orders, starts, num_prefix)[-1]


@_unmerge_backward.register_fake
def _(grad: Tensor, orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> Tensor:
    return grad.new_empty(grad.shape[0], starts[-1].shape[1] - 1, grad.shape[2])


def _differentiate_unmerge(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    nothing = [None] * len(ctx.orders)
    return _unmerge_backward(grad, ctx.orders, ctx.starts, ctx.num_prefix), nothing, nothing, nothing, None


_unmerge.register_autograd(_differentiate_unmerge, setup_context=_save)


def restore(
    x: Tensor, codes: Sequence[Tensor], layouts: Sequence[GroupLayout], decoder: Tensor, num_prefix: int
) -> Tensor:
    """:func:`unmerge` of ``x`` plus ``W_sp`` :func:`spread` of ``codes``, in one half precision; takes no gradient.

    Shapes:
        ``x``: ``[B, N, D]``; ``codes``: ``[B, N_e, R]`` each; ``decoder``: ``[D, R]``; result ``[B, N0, D]``.
    """
    return _restore(x, list(codes), [layout.group for layout in layouts], decoder, num_prefix)


@torch.library.custom_op("nsr::restore", mutates_args=())
def _restore(x: Tensor, codes: list[Tensor], groups: list[Tensor], decoder: Tensor, num_prefix: int) -> Tensor:
    from nsr.kernels.tokens.spread_kernels import restore as kernel

    x = x.contiguous()
    (batch, last, width), code = x.shape, decoder.shape[1]
    patches = groups[0].shape[1] - num_prefix
    out = x.new_empty(batch, patches, width)
    kernel[(cdiv(patches, 16), batch)](
        x, tuple(c.contiguous() for c in codes), tuple(groups), tuple(c.shape[1] for c in codes), decoder.contiguous(),
        out, num_prefix, patches, last, EVENTS=len(codes), WIDTH=width, CODE=code,
        BLOCK_D=min(64, max(16, next_power_of_2(width))), BLOCK_C=max(16, next_power_of_2(code)),
        BLOCK_P=16, num_warps=4,
    )  # fmt: skip
    return out


@_restore.register_fake
def _(x: Tensor, codes: list[Tensor], groups: list[Tensor], decoder: Tensor, num_prefix: int) -> Tensor:
    compiler_log.shorten()
    return x.new_empty(x.shape[0], groups[0].shape[1] - num_prefix, x.shape[2])


def _sums_over_patches(grad: Tensor, orders: list[Tensor], starts: list[Tensor], num_prefix: int) -> list[Tensor]:
    """The sum over the patches that each token covers, ahead of every event and after the last: ``[B, N_e, D]`` each.

    They are sums of the sums of the event before, in a fixed order.
    """
    sums = [F.pad(grad, (0, 0, num_prefix, 0))]
    for order, start in zip(orders, starts, strict=True):
        sums.append(gather_sums(sums[-1], None, order, start))
    return sums
