"""The weighted sum over the members of each row, ``y_v = sum_i t_i m_i``, without a tensor a member."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels import segment_sum_native, segment_sum_plain
from nsr.kernels.first_derivatives import first_alone
from nsr.kernels.index_origin import index_origin
from nsr.kernels.member_order import from_origin
from nsr.kernels.paths import choose
from nsr.kernels.replicas import fold, fold_rows, in_rows, one_by_one, unfold


def segment_sum(
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    num_targets: int,
    *,
    fused: bool | None = None,
) -> Tensor:
    r"""Sum the members of each row with their coefficients.

    .. math:: y_v = \sum_{i \in v} t_i\, m_{s(i)},

    each head with its own coefficients. Coefficients of unit length (:func:`unit_coefficient`) make it the direction
    that the aggregation keeps: the residual of a member is then :math:`m - t\, y_v`. Computed in fp32 (fp64 for fp64
    input), without an ``[E, D]`` tensor in either direction; fused, in a fixed order.

    Shapes:
        ``messages`` ``[S, D]`` or, with replicas, ``[R, S, D]``; ``source``, ``target`` ``[E]``; ``coefficient``
        ``[E, H]``; the result ``[T, D]`` or ``[R, T, D]`` with ``T = num_targets``.
    """
    if messages.dim() not in (2, 3):
        raise ValueError(f"messages has shape {tuple(messages.shape)}; expected [S, D] or [R, S, D].")
    if coefficient.dim() != 2 or coefficient.shape[1] < 1 or messages.shape[-1] % coefficient.shape[1]:
        raise ValueError(
            f"coefficient has shape {tuple(coefficient.shape)}; expected [E, H] with H a divisor of the width "
            f"{messages.shape[-1]}. Give one coefficient a member as coefficient.unsqueeze(1)."
        )
    if not source.shape == target.shape == coefficient.shape[:1]:
        raise ValueError(
            f"source, target and coefficient have shapes {tuple(source.shape)}, {tuple(target.shape)} and "
            f"{tuple(coefficient.shape)}; expected [E], [E] and [E, H]."
        )
    path = choose(messages, coefficient, fused=fused)
    wide = torch.float64 if torch.float64 in (messages.dtype, coefficient.dtype) else torch.float32
    single = messages.dim() == 2
    lifted = messages.unsqueeze(0) if single else messages
    if not (path.kernels == "triton" and messages.dtype == torch.bfloat16):  # which the kernel reads as it is
        lifted = lifted.to(wide)
    t, origin = coefficient.to(wide).contiguous(), index_origin(source, target)
    total = _sum(in_rows(lifted), source, target, t, num_targets, path.kernels, origin)
    return total.squeeze(0) if single else total


@torch.library.custom_op("nsr::segment_sum", mutates_args=())
def _sum(
    messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int, kernels: str, origin: int
) -> Tensor:
    if kernels == "plain":
        return segment_sum_plain.forward(messages, source, target, coefficient, num_targets)
    if kernels == "native":
        return segment_sum_native.forward(messages, source, target, coefficient, num_targets)
    from nsr.kernels import segment_sum_fused

    with from_origin(origin):
        return segment_sum_fused.forward(messages, source, target, coefficient, num_targets)


@torch.library.custom_op("nsr::segment_sum_backward", mutates_args=())
def _sum_backward(
    grad: Tensor,
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    kernels: str,
    origin: int,
    needs_coefficient: bool,
) -> list[Tensor]:
    args = (grad, messages, source, target, coefficient, needs_coefficient)
    if kernels == "plain":
        grads = segment_sum_plain.backward(*args)
    elif kernels == "native":
        grads = segment_sum_native.backward(*args)
    else:
        from nsr.kernels import segment_sum_fused

        with from_origin(origin):
            grads = segment_sum_fused.backward(*args)
    return [g for g in grads if g is not None]


@_sum.register_fake
def _(messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int, *_: Any) -> Tensor:
    return coefficient.new_empty(messages.shape[0], num_targets, messages.shape[2])


@_sum_backward.register_fake
def _(
    grad: Tensor,
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    kernels: str,
    origin: int,
    needs_coefficient: bool,
) -> list[Tensor]:
    return [grad.new_empty(x.shape) for x in ([messages, coefficient] if needs_coefficient else [messages])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_coefficient = ctx.needs_input_grad[3]
    saved = ctx.saved_tensors
    grads = _sum_backward(grad.contiguous(), *saved, *ctx.options, needs_coefficient)
    return (grads[0].to(saved[0].dtype), None, None, grads[1] if needs_coefficient else None, None, None, None)


_sum.register_autograd(_differentiate, setup_context=_save)
first_alone(_sum_backward)


@_sum.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    if any(dim is not None for dim in in_dims[1:]):  # a graph or coefficients of its own for each sample
        return one_by_one(_sum, info.batch_size, in_dims, args)[0], 0
    return unfold(_sum(fold_rows(args[0], in_dims[0], info.batch_size), *args[1:]), info.batch_size), 0


@_sum_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    if any(dim is not None for dim in in_dims[2:]) or args[-1]:  # the coefficients' gradient sums over replicas
        grads = one_by_one(_sum_backward, info.batch_size, in_dims, args)
        return grads, [0] * len(grads)
    grad = fold(args[0], in_dims[0], info.batch_size)
    messages = fold_rows(args[1], in_dims[1], info.batch_size)
    return [unfold(_sum_backward(grad, messages, *args[2:])[0], info.batch_size)], [0]
