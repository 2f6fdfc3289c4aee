"""Merging with the whole null-space branch behind it, forward and backward, over the members alone."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsr.kernels.tokens.layout import GroupLayout
from nsr.kernels.tokens.merge import merge_rows

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


def merge_residual(x: Tensor, layout: GroupLayout, weights: BranchWeights, max_merged: int) -> tuple[Tensor, Tensor]:
    """The merge with the branch's update, and the code of every token; differentiable in ``x`` and the weights.

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
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    *encoder, decoder = weights
    y, codes = _merge_residual(x, *layout[:4], *encoder, decoder, min(max_merged, x.shape[1]), kind)
    return y, codes


@torch.library.custom_op("nsr::merge_residual", mutates_args=())
def _merge_residual(
    x: Tensor,
    group: Tensor,
    share: Tensor,
    order: Tensor,
    start: Tensor,
    norm: Tensor,
    norm_x: Tensor,
    norm_x_bias: Tensor,
    norm_y: Tensor,
    norm_y_bias: Tensor,
    encoder: Tensor,
    gate_in: Tensor,
    gate_in_bias: Tensor,
    gate_out: Tensor,
    gate_out_bias: Tensor,
    decoder: Tensor | None,
    slots: int,
    kind: torch.dtype,
) -> tuple[Tensor, Tensor]:
    import triton

    from nsr.kernels.tokens.encode_kernels import encode
    from nsr.kernels.tokens.merge_kernels import decode

    weights = (norm, norm_x, norm_x_bias, norm_y, norm_y_bias, encoder, gate_in, gate_in_bias, gate_out, gate_out_bias)
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, width = x.shape
    groups, code = start.shape[1] - 1, encoder.shape[0]
    y = merge_rows(x, group, share, order, start)
    codes = x.new_zeros(batch, length, code)
    tokens, groups_of, _ = _list_members(group, order, start, slots)
    blocks = _blocks(width, code, gate_in.shape[0], kind, 64 if x.element_size() == 2 else 32)
    encode[(triton.cdiv(slots, blocks["BLOCK_M"]), batch)](
        x, y, tokens, groups_of, codes, *(weight.contiguous() for weight in weights),
        x.stride(0), x.stride(1), length, groups, slots, _EPS, **blocks,
    )  # fmt: skip
    if decoder is not None:
        shared = {name: blocks[name] for name in ("WIDTH", "CODE", "BLOCK_D", "BLOCK_C", "KIND", "PRECISION")}
        decode[(triton.cdiv(groups, 32), batch)](
            codes, share, order, start, decoder.contiguous(), y, length, groups, BLOCK_G=32, num_warps=4, **shared
        )
    return y, codes


@_merge_residual.register_fake
def _(x: Tensor, group: Tensor, share: Tensor, order: Tensor, start: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    return x.new_empty(batch, start.shape[1] - 1, width), x.new_empty(batch, length, rest[5].shape[0])


@torch.library.custom_op("nsr::merge_residual_backward", mutates_args=())
def _merge_residual_backward(
    grad_y: Tensor,
    grad_codes: Tensor,
    codes: Tensor,
    x: Tensor,
    group: Tensor,
    share: Tensor,
    order: Tensor,
    start: Tensor,
    norm: Tensor,
    norm_x: Tensor,
    norm_x_bias: Tensor,
    norm_y: Tensor,
    norm_y_bias: Tensor,
    encoder: Tensor,
    gate_in: Tensor,
    gate_in_bias: Tensor,
    gate_out: Tensor,
    gate_out_bias: Tensor,
    decoder: Tensor | None,
    slots: int,
    kind: torch.dtype,
) -> list[Tensor]:
    import triton

    from nsr.kernels.tokens.encode_kernels import encode_backward
    from nsr.kernels.tokens.merge_kernels import spread_gradient

    weights = (norm, norm_x, norm_x_bias, norm_y, norm_y_bias, encoder, gate_in, gate_in_bias, gate_out, gate_out_bias)
    x = x if x.stride(-1) == 1 else x.contiguous()
    grad_y, grad_codes = grad_y.contiguous(), grad_codes.contiguous()
    batch, length, width = x.shape
    groups, code, hidden = start.shape[1] - 1, encoder.shape[0], gate_in.shape[0]
    y = merge_rows(x, group, share, order, start)
    tokens, groups_of, slot_of_place = _list_members(group, order, start, slots)
    if decoder is None:
        grad_sum, grad_decoder = x.new_zeros(batch, groups, code), []
    else:
        rows = grad_y.to(kind)
        grad_sum = rows @ decoder.to(kind)
        sums = merge_rows(codes, group, share, order, start)
        grad_decoder = [_summed_product(rows, sums.to(kind)).to(decoder.dtype)]

    def table(columns: int, dtype: torch.dtype) -> Tensor:
        return x.new_empty(batch, slots, columns, dtype=dtype)

    d_encoded, d_hidden, d_gate = table(code, kind), table(hidden, kind), table(code, kind)
    active, normed = table(hidden, kind), table(3 * width, kind)
    to_x, to_y = table(width, torch.float32), table(width, torch.float32)
    blocks = _blocks(width, code, hidden, kind, 32)
    encode_backward[(triton.cdiv(slots, blocks["BLOCK_M"]), batch)](
        x, y, tokens, groups_of, share, grad_codes, grad_sum,
        d_encoded, d_hidden, d_gate, active, normed, to_x, to_y, *(weight.contiguous() for weight in weights),
        x.stride(0), x.stride(1), length, groups, slots, _EPS, **blocks,
    )  # fmt: skip
    grad_x = torch.zeros_like(x, memory_format=torch.contiguous_format)
    spread_gradient[(triton.cdiv(groups, 16), batch)](
        grad_y, to_x, to_y, share, order, start, slot_of_place, grad_x, length, groups, slots,
        WIDTH=width, BLOCK_D=blocks["BLOCK_D"], BLOCK_G=16, num_warps=4,
    )  # fmt: skip
    grads = _weight_gradients(weights, d_encoded, d_hidden, d_gate, active, normed)
    return [grad_x, *(grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)), *grad_decoder]


@_merge_residual_backward.register_fake
def _(grad_y: Tensor, grad_codes: Tensor, codes: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
    weights = [weight for weight in rest[4:15] if weight is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format), *(torch.empty_like(w) for w in weights)]


def _weight_gradients(
    weights: tuple[Tensor, ...], d_encoded: Tensor, d_hidden: Tensor, d_gate: Tensor, active: Tensor, normed: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of the branch's weights, in their order, from one product with the normalised rows.

    The norms' own weights come out of the same product: a weight on a channel is a factor on a column.
    """
    norm, norm_x, norm_x_bias, norm_y, norm_y_bias, encoder, gate_in = (weight.float() for weight in weights[:7])
    width, hidden = norm.shape[0], d_hidden.shape[-1]
    products = _summed_product(torch.cat([d_hidden, d_encoded], dim=-1), normed)  # shape: [H + R, 3 D]
    of_z, of_x, of_y = products[:hidden].split(width, dim=1)
    of_code = products[hidden:, :width]
    from_z, from_x, from_y = gate_in.split(width, dim=1)
    d_bias = d_hidden.sum((0, 1), dtype=torch.float32)
    d_gate_in = torch.cat(
        [
            of_z * norm,
            torch.addr(of_x * norm_x, d_bias, norm_x_bias),
            torch.addr(of_y * norm_y, d_bias, norm_y_bias),
        ],
        dim=1,
    )
    return (
        (from_z * of_z).sum(0) + (encoder * of_code).sum(0),
        (from_x * of_x).sum(0),
        d_bias @ from_x,
        (from_y * of_y).sum(0),
        d_bias @ from_y,
        of_code * norm,
        d_gate_in,
        d_bias,
        _summed_product(d_gate, active),
        d_gate.sum((0, 1), dtype=torch.float32),
    )


def _summed_product(a: Tensor, b: Tensor) -> Tensor:
    """``Σ a_rᵀ b_r`` over samples and rows, ``[B, M, P], [B, M, Q] -> [P, Q]``, in fp32.

    A product a sample fills the GPU, where one long one would not, and the sum over samples is in full precision.
    """
    return (a.mT @ b).sum(0, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], *inputs[:16])
    ctx.options = inputs[16:]


def _differentiate(ctx: Any, grad_y: Tensor, grad_codes: Tensor) -> tuple[Tensor | None, ...]:
    grads = _merge_residual_backward(grad_y, grad_codes, *ctx.saved_tensors, *ctx.options)
    decoder = grads[11] if len(grads) > 11 else None
    return (grads[0], None, None, None, None, *grads[1:11], decoder, None, None)


_merge_residual.register_autograd(_differentiate, setup_context=_save)


def _list_members(group: Tensor, order: Tensor, start: Tensor, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of groups of two or more and their groups, ``[B, slots]``, and the slot of every place, ``[B, N]``."""
    import triton

    from nsr.kernels.tokens.layout_kernels import list_members

    batch, length = order.shape
    tokens, groups_of = order.new_empty(2, batch, slots).unbind(0)
    slot_of_place = torch.empty_like(order)
    list_members[(batch,)](
        group, order, start, tokens, groups_of, slot_of_place, length, start.shape[1] - 1, slots,
        BLOCK_N=triton.next_power_of_2(length), BLOCK_M=triton.next_power_of_2(slots), num_warps=8,
    )  # fmt: skip
    return tokens, groups_of, slot_of_place


def _blocks(width: int, code: int, hidden: int, kind: torch.dtype, channels: int) -> dict[str, Any]:
    """How the tiles of members are cut, ``channels`` at a time, and the format of their products."""
    import triton

    return {
        "WIDTH": width,
        "CODE": code,
        "HIDDEN": hidden,
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "BLOCK_C": max(16, triton.next_power_of_2(code)),
        "BLOCK_H": max(16, triton.next_power_of_2(hidden)),
        "BLOCK_M": 16,
        "BLOCK_K": channels,
        "KIND": getattr(triton.language, str(kind).removeprefix("torch.")),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
        "num_warps": 4,
        # fp32 products keep three terms of every block: no room for a second stage
        "num_stages": 1 if kind.itemsize == 4 else 3 if channels == 64 else 2,
    }
