"""The direction of each row that an aggregation keeps: ``u_v = sum_i t_i m_i / sum_i t_i^2``."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels import moments_plain
from nsr.kernels.paths import choose
from nsr.kernels.replicas import fold, one_by_one, unfold


def segment_direction(
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    num_targets: int,
    *,
    fused: bool | None = None,
) -> Tensor:
    r"""What the weighted sum over members keeps of them, lifted back by the adjoint.

    .. math::
        u_v = \frac{\sum_{i \in v} t_i\, m_{s(i)}}{\sum_{i \in v} t_i^2},

    each head with its own coefficients; 0 where the denominator is 0. The residual of a member is ``m - t u``.
    Computed in fp32 (fp64 for fp64 input), without an ``[E, D]`` tensor in either direction; fused, in a fixed order.

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
    lifted = (messages.unsqueeze(0) if single else messages).to(wide).contiguous()
    t = coefficient.to(wide).contiguous()
    total, energy = _moments(lifted, source, target, t, num_targets, path.fused)
    energy = energy.where(energy > 0, 1.0)  # shape: [T, H]; without energy the total is 0 already
    heads = t.shape[1]
    mean = (total.unflatten(-1, (heads, -1)) / energy.unsqueeze(-1)).flatten(-2)
    return mean.squeeze(0) if single else mean


@torch.library.custom_op("nsr::segment_moments", mutates_args=())
def _moments(
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    num_targets: int,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    if not fused:
        return moments_plain.forward(messages, source, target, coefficient, num_targets)
    from nsr.kernels import moments_fused

    return moments_fused.forward(messages, source, target, coefficient, num_targets)


@torch.library.custom_op("nsr::segment_moments_backward", mutates_args=())
def _moments_backward(
    grad: Tensor,
    grad_energy: Tensor,
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    fused: bool,
    needs_coefficient: bool,
) -> list[Tensor]:
    args = (grad, grad_energy, messages, source, target, coefficient, needs_coefficient)
    if not fused:
        grads = moments_plain.backward(*args)
    else:
        from nsr.kernels import moments_fused

        grads = moments_fused.backward(*args)
    return [g for g in grads if g is not None]


@_moments.register_fake
def _(
    messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int, *_: Any
) -> tuple[Tensor, Tensor]:
    total = messages.new_empty(messages.shape[0], num_targets, messages.shape[2])
    return total, coefficient.new_empty(num_targets, coefficient.shape[1])


@_moments_backward.register_fake
def _(
    grad: Tensor,
    grad_energy: Tensor,
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    fused: bool,
    needs_coefficient: bool,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in ([messages, coefficient] if needs_coefficient else [messages])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, grad: Tensor, grad_energy: Tensor) -> tuple[Tensor | None, ...]:
    needs_coefficient = ctx.needs_input_grad[3]
    grads = _moments_backward(
        grad.contiguous(), grad_energy.contiguous(), *ctx.saved_tensors, *ctx.options, needs_coefficient
    )
    return (grads[0], None, None, grads[1] if needs_coefficient else None, None, None)


_moments.register_autograd(_differentiate, setup_context=_save)


@_moments.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int | None]]:
    if any(dim is not None for dim in in_dims[1:]):  # a graph or coefficients of its own for each sample
        total, energy = one_by_one(_moments, info.batch_size, in_dims, args)
        return (total, energy), (0, 0)
    total, energy = _moments(fold(args[0], in_dims[0], info.batch_size), *args[1:])
    return (unfold(total, info.batch_size), energy), (0, None)


@_moments_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    grad, grad_energy, messages, *rest, needs_coefficient = args
    if any(dim is not None for dim in in_dims[3:]) or needs_coefficient:  # whose gradient sums over replicas
        grads = one_by_one(_moments_backward, info.batch_size, in_dims, args)
        return grads, [0] * len(grads)
    if in_dims[1] is not None:  # the energy's gradient only concerns the coefficients
        grad_energy = grad_energy.select(in_dims[1], 0)
    grad = fold(grad, in_dims[0], info.batch_size)
    messages = fold(messages, in_dims[2], info.batch_size)
    d_messages = _moments_backward(grad, grad_energy, messages, *rest, needs_coefficient)[0]
    return [unfold(d_messages, info.batch_size)], [0]
