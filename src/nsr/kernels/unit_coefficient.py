"""Coefficients scaled to unit length at each row: the projection depends on their direction alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsr.kernels.first_derivatives import first_alone
from nsr.kernels.index_origin import index_origin
from nsr.kernels.member_order import from_origin
from nsr.kernels.paths import device_obstacle
from nsr.kernels.replicas import one_by_one


def unit_coefficient(
    coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int, *, fused: bool | None = None
) -> Tensor:
    r"""Scale the coefficients of each row and head to unit length.

    .. math:: \hat t_i = t_i \Big/ \sqrt{\textstyle\sum_{j \in v(i)} t_j^2},

    and 0 where all of them are 0. Unit length keeps :math:`\hat t_i u` free of rounding where it matters: the only
    member of a row has :math:`\hat t = \pm 1`, so its residual is exactly 0. Computed in fp32 (fp64 for fp64 input);
    fused, in a fixed order.

    Shapes:
        ``coefficient`` ``[E, H]``; ``source``, ``target`` ``[E]``, the latter the row of each member (the former is not
        read: both together name the graph whose sorted members are shared with other operators); the result ``[E, H]``.
    """
    if coefficient.dim() != 2 or coefficient.shape[:1] != target.shape:
        raise ValueError(
            f"coefficient and target have shapes {tuple(coefficient.shape)} and {tuple(target.shape)}; expected "
            "[E, H] and [E]."
        )
    obstacle = device_obstacle(coefficient)
    if fused and obstacle:
        raise ValueError(f"fused=True, but {obstacle}. Leave fused at None to take the plain path there.")
    t = coefficient.to(torch.promote_types(coefficient.dtype, torch.float32)).contiguous()
    fused = fused is not False and obstacle is None
    return _unit(t, source, target, num_targets, fused, index_origin(source, target))


@torch.library.custom_op("nsr::unit_coefficient", mutates_args=())
def _unit(coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int, fused: bool, origin: int) -> Tensor:
    if not fused:
        return coefficient / _length(coefficient, target, num_targets).index_select(0, target)
    from nsr.kernels import unit_coefficient_fused

    with from_origin(origin):
        return unit_coefficient_fused.forward(coefficient, source, target, num_targets)


@torch.library.custom_op("nsr::unit_coefficient_backward", mutates_args=())
def _unit_backward(
    grad: Tensor, coefficient: Tensor, source: Tensor, target: Tensor, num_targets: int, fused: bool, origin: int
) -> Tensor:
    r"""``(g - t̂ sum_j t̂_j g_j) / |t|``."""
    if fused:
        from nsr.kernels import unit_coefficient_fused

        with from_origin(origin):
            return unit_coefficient_fused.backward(grad, coefficient, source, target, num_targets)
    length = _length(coefficient, target, num_targets).index_select(0, target)
    unit = coefficient / length
    along = grad.new_zeros(num_targets, grad.shape[1]).index_add_(0, target, grad * unit)
    return (grad - unit * along.index_select(0, target)) / length


def _length(coefficient: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """``sqrt(sum t^2)`` of each row, ``[T, H]``; 1 where it is 0."""
    energy = coefficient.new_zeros(num_targets, coefficient.shape[1]).index_add_(0, target, coefficient.square())
    return energy.where(energy > 0, 1.0).sqrt_()


@_unit.register_fake
def _(coefficient: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(coefficient)


@_unit_backward.register_fake
def _(grad: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _unit_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None, None, None


_unit.register_autograd(_differentiate, setup_context=_save)
first_alone(_unit_backward)


def _samples_as_heads(
    operator: Callable[..., Tensor], floats: int, batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Tensor, int]:
    """Rows of coefficients are scaled on their own, so the samples of a shared graph join the heads."""
    if any(dim is not None for dim in in_dims[floats:]):
        return one_by_one(operator, batch, in_dims, args)[0], 0
    joined = [
        (x.unsqueeze(1).expand(-1, batch, -1) if dim is None else x.movedim(dim, 1)).flatten(1).contiguous()
        for x, dim in zip(args[:floats], in_dims, strict=False)
    ]  # shape: [E, batch * H]
    return operator(*joined, *args[floats:]).unflatten(1, (batch, -1)), 1


@_unit.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return _samples_as_heads(_unit, 1, info.batch_size, in_dims, args)


@_unit_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    return _samples_as_heads(_unit_backward, 2, info.batch_size, in_dims, args)
