"""The gated residual sum: everything of a graph branch that happens per member, as one operator.

::

    source tables [S, D]          target tables [T, D]
      m = W h                       u   direction of the row, c = Wz u its image in the gate
      a = (Ws + Wz W) h             b = Wd h + b1
         │                            │
         └──── member i: s -> v ──────┘
                 z = m_s - t u_v                              residual
                 g = sigmoid(W2 GELU(a_s + b_v - t c_v) + b2)   gate; a_s + b_v - t c_v = W1 [h_s; h_v; z] + b1
                      │
         K_v^{-1/2} sum_i g ⊙ z                  -> [T, D]

No ``[E, D]`` tensor is ever stored, in neither direction: per-member values are computed where they are summed, and
again in the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsr.kernels import gated_sum_native, gated_sum_plain
from nsr.kernels.first_derivatives import first_alone
from nsr.kernels.gated_sum_tables import Tables
from nsr.kernels.index_origin import index_origin
from nsr.kernels.member_order import from_origin
from nsr.kernels.paths import Precision, choose
from nsr.kernels.replicas import fold, fold_rows, in_rows, one_by_one, unfold


def gated_residual_sum(
    messages: Tensor,
    source_gate: Tensor,
    target_gate: Tensor,
    mean: Tensor,
    mean_gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    *,
    fused: bool | None = None,
    precision: Precision | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    r"""Sum the gated residuals of the members of each row.

    .. math::
        r_v = K_v^{-1/2} \sum_{i \in v}
              \sigma\Big(W_2\,\mathrm{GELU}\big(a_{s(i)} + b_v - \textstyle\sum_h t_{ih} c_{vh}\big) + b_2\Big)
              \odot \big(m_{s(i)} - t_i u_v\big),

    with :math:`t_i` spread over the ``D / H`` channels of each head, :math:`K_v` the number of members of ``v``, and
    0 for a row without members. Gradients reach every floating-point argument, ``coefficient`` included.

    All floating-point arguments may carry a leading replica axis ``[R, ...]`` but ``coefficient``: the graph is shared.
    ``torch.func.vmap`` over them does the same. Residual, product and sum are computed in fp32 whatever the input
    (fp64 for fp64 input), and so is the result; only the ``D x D`` product may be narrower.

    Args:
        messages: ``m``, source side.
        source_gate: ``a``, the source's share of the gate's hidden layer.
        target_gate: ``b``, the target's share.
        mean: ``u``, the direction that the aggregation keeps, see :func:`segment_sum`; zeros turn the residual
            into the message itself.
        mean_gate: ``c``, the direction's share of the hidden layer, one a head.
        weight: ``W2``, ``[out, in]``.
        bias: ``b2``.
        source: Source of each member.
        target: Row of each member, in any order.
        coefficient: ``t``.
        fused: Force the fused kernels (``True``) or the plain path (``False``); by default the fused ones wherever they
            can run. :func:`path_for` says which, and why.
        precision: Of the ``D x D`` product inside the fused kernels: ``"fp32"``, ``"tf32"`` or ``"bf16"``. By default
            what ``torch.set_float32_matmul_precision`` says, and bf16 under bf16 autocast.
        deterministic: Sum the gradients of the source tables in a fixed order. By default what
            ``torch.use_deterministic_algorithms`` says.

    Shapes:
        ``messages``, ``source_gate`` ``[S, D]``; ``target_gate``, ``mean`` ``[T, D]``; ``mean_gate`` ``[T, H, D]``;
        ``weight`` ``[D, D]``; ``bias`` ``[D]``; ``source``, ``target`` ``[E]``; ``coefficient`` ``[E, H]``;
        the result ``[T, D]``.
    """
    path = choose(messages, coefficient, fused=fused, precision=precision, deterministic=deterministic)
    tables = (messages, source_gate, target_gate, mean, mean_gate, weight, bias)
    _validate(*tables, source, target, coefficient)
    wide = torch.float64 if any(x.dtype == torch.float64 for x in (*tables, coefficient)) else torch.float32
    single = messages.dim() == 2
    lifted = Tables(*(x.unsqueeze(0) if single else x for x in tables))
    # Triton's kernels read bf16 tables as they are, and widen what they have read.
    m, a, b, u, c, *weights = (
        x.to(x.dtype if path.kernels == "triton" and gathered and x.dtype == torch.bfloat16 else wide)
        for x, gathered in zip(lifted, (True, True, True, False, True, False, False), strict=True)
    )
    rows = (in_rows(m), in_rows(a), in_rows(b), *(x.contiguous() for x in (u, c, *weights)))
    options = (path.kernels, path.precision, path.deterministic, index_origin(source, target))
    out = _forward(*rows, source, target, coefficient.to(wide).contiguous(), *options)
    return out.squeeze(0) if single else out


@torch.library.custom_op("nsr::gated_residual_sum", mutates_args=())
def _forward(
    messages: Tensor,
    source_gate: Tensor,
    target_gate: Tensor,
    mean: Tensor,
    mean_gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    kernels: str,
    precision: str,
    deterministic: bool,
    origin: int,
) -> Tensor:
    tables = Tables(messages, source_gate, target_gate, mean, mean_gate, weight, bias)
    with torch.autocast(messages.device.type, enabled=False), from_origin(origin):
        if kernels == "plain":
            return gated_sum_plain.forward(tables, source, target, coefficient)
        if kernels == "native":
            return gated_sum_native.forward(tables, source, target, coefficient)
        from nsr.kernels import gated_sum_fused

        return gated_sum_fused.forward(tables, source, target, coefficient, precision)


@torch.library.custom_op("nsr::gated_residual_sum_backward", mutates_args=())
def _backward(
    grad: Tensor,
    messages: Tensor,
    source_gate: Tensor,
    target_gate: Tensor,
    mean: Tensor,
    mean_gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    kernels: str,
    precision: str,
    deterministic: bool,
    origin: int,
    needs_coefficient: bool,
) -> list[Tensor]:
    tables = Tables(messages, source_gate, target_gate, mean, mean_gate, weight, bias)
    args = (grad, tables, source, target, coefficient, needs_coefficient)
    with torch.autocast(messages.device.type, enabled=False), from_origin(origin):
        if kernels == "plain":
            grads = gated_sum_plain.backward(*args)
        elif kernels == "native":
            grads = gated_sum_native.backward(*args)
        else:
            from nsr.kernels import gated_sum_fused

            grads = gated_sum_fused.backward(*args, precision, deterministic)
    return [*grads.tables, *([] if grads.coefficient is None else [grads.coefficient])]


@_forward.register_fake
def _(messages: Tensor, source_gate: Tensor, target_gate: Tensor, mean: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(mean)


@_backward.register_fake
def _(grad: Tensor, *args: Any) -> list[Tensor]:
    tables, coefficient, needs_coefficient = args[:7], args[9], args[-1]
    return [grad.new_empty(x.shape) for x in (*tables, *([coefficient] if needs_coefficient else []))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.options = inputs[10:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_coefficient = ctx.needs_input_grad[9]
    saved = ctx.saved_tensors
    grads = _backward(grad.contiguous(), *saved, *ctx.options, needs_coefficient)
    narrowed = (d.to(x.dtype) for d, x in zip(grads[:7], saved[:7], strict=True))
    return (*narrowed, None, None, grads[7] if needs_coefficient else None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)
first_alone(_backward)


@_forward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    if any(dim is not None for dim in in_dims[7:]):  # a graph or coefficients of its own for each sample
        return one_by_one(_forward, info.batch_size, in_dims, args)[0], 0
    tables = _fold_tables(args[:7], in_dims, info.batch_size)
    return unfold(_forward(*tables, *args[7:]), info.batch_size), 0


@_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[list[Tensor], list[int]]:
    if any(dim is not None for dim in in_dims[8:]) or args[-1]:  # the coefficients' gradients sum over replicas
        grads = one_by_one(_backward, info.batch_size, in_dims, args)
    else:
        grad, tables = fold(args[0], in_dims[0], info.batch_size), _fold_tables(args[1:8], in_dims[1:], info.batch_size)
        grads = [unfold(x, info.batch_size) for x in _backward(grad, *tables, *args[8:])]
    return grads, [0] * len(grads)


def _fold_tables(tables: Sequence[Tensor], in_dims: Sequence[int | None], batch: int) -> list[Tensor]:
    """Join the samples of each table with its replicas; the first three may stay columns of a wider one."""
    by_row = [fold_rows(x, dim, batch) for x, dim in zip(tables[:3], in_dims[:3], strict=True)]
    return by_row + [fold(x, dim, batch) for x, dim in zip(tables[3:], in_dims[3:7], strict=True)]


def _validate(
    messages: Tensor,
    source_gate: Tensor,
    target_gate: Tensor,
    mean: Tensor,
    mean_gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
) -> None:
    """Shapes only: values (an index out of range) cost a synchronisation and are the caller's."""
    if messages.dim() not in (2, 3):
        raise ValueError(f"messages has shape {tuple(messages.shape)}; expected [S, D] or [R, S, D].")
    *lead, sources, width = messages.shape
    targets = target_gate.shape[-2] if target_gate.dim() >= 2 else 0
    if coefficient.dim() != 2 or coefficient.shape[1] < 1 or width % coefficient.shape[1]:
        raise ValueError(
            f"coefficient has shape {tuple(coefficient.shape)}; expected [E, H] with H a divisor of the width {width}. "
            "Give one coefficient a member as coefficient.unsqueeze(1)."
        )
    members, heads = coefficient.shape
    expected = {
        "source_gate": (source_gate, (*lead, sources, width)),
        "target_gate": (target_gate, (*lead, targets, width)),
        "mean": (mean, (*lead, targets, width)),
        "mean_gate": (mean_gate, (*lead, targets, heads, width)),
        "weight": (weight, (*lead, width, width)),
        "bias": (bias, (*lead, width)),
        "source": (source, (members,)),
        "target": (target, (members,)),
    }
    for name, (value, shape) in expected.items():
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; expected {shape} beside messages {tuple(messages.shape)} and "
                f"coefficient {tuple(coefficient.shape)}."
            )
    for name, index in (("source", source), ("target", target)):
        if index.dtype != torch.int64:
            raise ValueError(f"{name} is {index.dtype}; expected int64. Convert it with .long().")
