"""Merging as one gather, alone or with the whole null-space branch behind it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsr.kernels.tokens.layout import GroupLayout

_EPS = 1e-6


class BranchWeights(NamedTuple):
    """The parameters of a token branch; see :class:`nsr.tokens.TokenBranch`.

    Shapes, with code width ``R`` and gate width ``H``:
        ``norm``, ``norm_x``, ``norm_x_bias``, ``norm_y``, ``norm_y_bias`` ``[D]``; ``encoder`` ``[R, D]``; ``gate_in``
        ``[H, 3 D]``, ``gate_in_bias`` ``[H]``; ``gate_out`` ``[R, H]``, ``gate_out_bias`` ``[R]``; ``decoder``
        ``[D, R]``, or ``None`` without feature path.
    """

    norm: Tensor
    norm_x: Tensor
    norm_x_bias: Tensor
    norm_y: Tensor
    norm_y_bias: Tensor
    encoder: Tensor
    gate_in: Tensor
    gate_in_bias: Tensor
    gate_out: Tensor
    gate_out_bias: Tensor
    decoder: Tensor | None


def merge(x: Tensor, layout: GroupLayout) -> Tensor:
    """``y_g = Σ t_i x_i``, summed in fp32, members ascending: ``[B, N, D] -> [B, G, D]``; differentiable in ``x``."""
    return _merge(x, layout.group, layout.share, layout.order, layout.start)


def merge_residual(x: Tensor, layout: GroupLayout, weights: BranchWeights, max_merged: int) -> tuple[Tensor, Tensor]:
    """The merge with the branch's update, and the code of every token; no gradient.

    Norms and sums are fp32. Products are in autocast's format, without it in that of ``x``; fp32 as three TF32 terms,
    which are as good, or as one where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Args:
        x: Tokens, ``[B, N, D]``.
        layout: Their groups.
        weights: Of the branch.
        max_merged: Bound on the members of groups of two or more in one sample.

    Returns:
        Tokens ``[B, G, D]`` and codes ``[B, N, R]``, both in the format of ``x``.
    """
    *encoder, decoder = weights
    return _merge_residual(x, layout.group, layout.share, layout.order, layout.start, encoder, decoder, max_merged)


@torch.library.custom_op("nsr::merge", mutates_args=())
def _merge(x: Tensor, group: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
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


@_merge.register_fake
def _(x: Tensor, group: Tensor, share: Tensor, order: Tensor, start: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], start.shape[1] - 1, x.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    group, share = ctx.saved_tensors
    rows = grad.gather(1, group.unsqueeze(-1).expand(-1, -1, grad.shape[-1]))
    return (share.unsqueeze(-1) * rows).to(grad.dtype), None, None, None, None


_merge.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("nsr::merge_residual", mutates_args=())
def _merge_residual(
    x: Tensor,
    group: Tensor,
    share: Tensor,
    order: Tensor,
    start: Tensor,
    encoder: list[Tensor],
    decoder: Tensor | None,
    max_merged: int,
) -> tuple[Tensor, Tensor]:
    import triton

    from nsr.kernels.tokens import merge_kernels as kernels
    from nsr.kernels.tokens.layout_kernels import list_members

    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, width = x.shape
    groups = start.shape[1] - 1
    y = _merge(x, group, share, order, start)
    hidden, code = encoder[7].shape[0], encoder[5].shape[0]
    codes = x.new_zeros(batch, length, code)
    slots = min(max_merged, length)
    members = order.new_empty(batch, slots)
    list_members[(batch,)](
        group, order, start, members, length, groups, slots,
        BLOCK_N=triton.next_power_of_2(length), BLOCK_M=triton.next_power_of_2(slots), num_warps=8,
    )  # fmt: skip
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    shared = {
        "WIDTH": width,
        "CODE": code,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "BLOCK_C": max(16, triton.next_power_of_2(code)),
        "KIND": getattr(triton.language, str(kind).removeprefix("torch.")),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
        "num_warps": 4,
    }
    narrow = kind.itemsize == 2
    kernels.encode[(triton.cdiv(slots, 16), batch)](
        x, y, group, order, members, codes, *(parameter.contiguous() for parameter in encoder),
        x.stride(0), x.stride(1), length, groups, slots, _EPS,
        HIDDEN=hidden, BLOCK_H=max(16, triton.next_power_of_2(hidden)), BLOCK_M=16, BLOCK_K=64 if narrow else 32,
        num_stages=3 if narrow else 1, **shared,
    )  # fmt: skip
    if decoder is not None:
        kernels.decode[(triton.cdiv(groups, 32), batch)](
            codes, share, order, start, decoder.contiguous(), y, length, groups, BLOCK_G=32, **shared
        )
    return y, codes


@_merge_residual.register_fake
def _(x: Tensor, group: Tensor, share: Tensor, order: Tensor, start: Tensor, encoder: list[Tensor], *_: Any) -> tuple:
    batch, length, width = x.shape
    return x.new_empty(batch, start.shape[1] - 1, width), x.new_empty(batch, length, encoder[5].shape[0])
