"""Merging with the whole null-space branch behind it, forward and backward, over the members alone."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.tokens.layout import GroupLayout, list_members
from nsr.kernels.tokens.merge import gather_sums, spread_rows

Source = Literal["residual", "raw", "merged"]
_EPS = 1e-6


class BranchWeights(NamedTuple):
    """The parameters of a token branch; see :class:`nsr.tokens.TokenBranch`.

    Shapes, with code width ``R`` and gate width ``H``:
        ``norm``, ``norm_x``, ``norm_x_bias``, ``norm_y``, ``norm_y_bias`` ``[D]``; ``encoder`` ``[R, D]``; ``gate_in``
        ``[H, 3 D]``, ``gate_in_bias`` ``[H]``; ``gate_out`` ``[R, H]``, ``gate_out_bias`` ``[R]``; ``decoder``
        ``[D, R]``, or ``None`` without feature path. Weights of several models are stacked, ``[V, ...]`` each.
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


def merge_residual(
    x: Tensor,
    layout: GroupLayout,
    weights: BranchWeights,
    max_merged: int,
    sources: Sequence[Source] = ("residual",),
) -> tuple[Tensor, Tensor]:
    """The merge with the branch's update, and the code of every token; differentiable in ``x`` and the weights.

    Norms and sums are fp32. Products are in autocast's format, without it in that of ``x``; fp32 as three TF32 terms,
    which are as good, or as one where ``torch.backends.cuda.matmul.allow_tf32`` says so.

    Args:
        x: Tokens, ``[B, N, D]``; of ``V`` models one behind the other, equally many samples of each.
        layout: Their groups.
        weights: Of the branch, or stacked those of ``V`` models.
        max_merged: Bound on the members of groups of two or more in one sample.
        sources: What the branch of each model encodes: what the merge forgot of a member, the member itself, or the
            merged row, which then stands for the member everywhere.

    Returns:
        Tokens ``[B, G, D]`` in the format of ``x`` and codes ``[B, N, R]`` in that of the products.
    """
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    layout = list_members(layout, min(max_merged, x.shape[1]))
    listed = (layout.share, layout.order, layout.start, layout.member, layout.member_group, layout.slot)
    assert len(sources) == weights.norm.numel() // x.shape[-1] <= 16, "a source for each model, two bits of it an int32"
    assert x.shape[0] % len(sources) == 0, "equally many samples of each model"
    packed = sum(get_args(Source).index(source) << 2 * model for model, source in enumerate(sources))
    return _merge_residual(x, *listed, *weights, kind, packed)


@torch.library.custom_op("nsr::merge_residual", mutates_args=())
def _merge_residual(
    x: Tensor,
    share: Tensor,
    order: Tensor,
    start: Tensor,
    member: Tensor,
    member_group: Tensor,
    slot: Tensor,
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
    kind: torch.dtype,
    sources: int = 0,
) -> tuple[Tensor, Tensor]:
    from nsr.kernels.tokens.encode_kernels import encode
    from nsr.kernels.tokens.merge_kernels import decode

    weights = (norm, norm_x, norm_x_bias, norm_y, norm_y_bias, encoder, gate_in, gate_in_bias, gate_out, gate_out_bias)
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, length, width = x.shape
    groups, code = start.shape[1] - 1, encoder.shape[-2]
    samples = batch // (norm.numel() // width)  # of a model
    codes = x.new_empty(batch, length, code, dtype=kind)
    y = gather_sums(x, share, order, start, codes)
    slots = member.shape[1]
    blocks = _blocks(width, code, gate_in.shape[-2], kind)
    encode[(cdiv(slots, blocks["BLOCK_M"]), batch)](
        x, y, member, member_group, codes, *(weight.contiguous() for weight in weights),
        x.stride(0), x.stride(1), length, groups, slots, samples, _EPS, SOURCES=sources, **blocks,
    )  # fmt: skip
    if decoder is not None:
        shared = {name: blocks[name] for name in ("WIDTH", "CODE", "BLOCK_D", "BLOCK_C", "KIND", "PRECISION")}
        decode[(cdiv(groups, 32), batch)](
            codes, share, order, start, decoder.contiguous(), y, length, groups, samples,
            BLOCK_G=32, num_warps=4, **shared,
        )  # fmt: skip
    return y, codes


@_merge_residual.register_fake
def _(x: Tensor, share: Tensor, order: Tensor, start: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, length, width = x.shape
    encoder, kind = rest[8], rest[14]
    return x.new_empty(batch, start.shape[1] - 1, width), x.new_empty(batch, length, encoder.shape[-2], dtype=kind)


@torch.library.custom_op("nsr::merge_residual_backward", mutates_args=())
def _merge_residual_backward(
    grad_y: Tensor,
    grad_codes: Tensor | None,
    x: Tensor,
    share: Tensor,
    order: Tensor,
    start: Tensor,
    member: Tensor,
    member_group: Tensor,
    slot: Tensor,
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
    kind: torch.dtype,
    sources: int = 0,
) -> list[Tensor]:
    from nsr.kernels.tokens.encode_backward import encode_backward, norm_sums, weight_gradients

    weights = [
        weight.contiguous()
        for weight in (norm, norm_x, norm_x_bias, norm_y, norm_y_bias, encoder, gate_in, gate_in_bias, gate_out)
    ]
    weights += [gate_out_bias.contiguous()] + ([] if decoder is None else [decoder.contiguous()])
    x = x if x.stride(-1) == 1 else x.contiguous()
    grad_y = grad_y.contiguous()
    batch, length, width = x.shape
    groups, slots, code, hidden = start.shape[1] - 1, member.shape[1], encoder.shape[-2], gate_in.shape[-2]
    models = norm.numel() // width
    y = gather_sums(x, share, order, start)

    def table(columns: int) -> Tensor:
        return x.new_empty(batch, slots, columns, dtype=kind)

    feature = decoder is not None
    left = table(hidden + 2 * code + width * feature)
    right = table(3 * width + hidden + code * feature + 8)
    to_x, to_y = table(width), table(width)
    blocks = _blocks(width, code, hidden, kind) | {"BLOCK_K": 64 if kind.itemsize == 2 else 32}
    sums = x.new_empty(models, 4, hidden, dtype=torch.float32)
    norm_sums[(2, models)](
        weights[6], *weights[1:5], sums, WIDTH=width, HIDDEN=hidden, BLOCK_H=blocks["BLOCK_H"], BLOCK_K=64
    )
    encode_backward[(cdiv(slots, blocks["BLOCK_M"]), batch)](
        x, y, member, member_group, share, x if grad_codes is None else grad_codes.contiguous(), grad_y, sums,
        left, right, to_x, to_y, *weights[:10], weights[-1],
        x.stride(0), x.stride(1), length, groups, slots, batch // models, _EPS,
        SOURCES=sources, FEATURE=feature, CODED=grad_codes is not None, LEFT=left.shape[-1], RIGHT=right.shape[-1],
        **blocks,
    )  # fmt: skip
    grad_x = spread_rows(grad_y, share, order, start, to_x, to_y, slot)
    by_model = [rows.view(models, -1, rows.shape[-1]).squeeze(0) for rows in (left, right)]
    products = by_model[0].mT @ by_model[1]  # shape: [models, left, right], of one model [left, right]
    grads = [torch.empty_like(weight) for weight in weights]
    shared = {name: blocks[name] for name in ("WIDTH", "CODE", "HIDDEN", "BLOCK_C", "BLOCK_H")}
    weight_gradients[(cdiv(width, 16), models)](
        products, *weights[:7], *grads[:10], grads[-1],
        FEATURE=feature, LEFT=left.shape[-1], RIGHT=right.shape[-1], BLOCK_K=16, num_warps=4, **shared,
    )  # fmt: skip
    return [grad_x, *grads]


@_merge_residual_backward.register_fake
def _(grad_y: Tensor, grad_codes: Tensor | None, x: Tensor, *rest: Any) -> list[Tensor]:
    weights = [weight for weight in rest[6:17] if weight is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format), *(torch.empty_like(w) for w in weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, ctx.kind, ctx.sources = inputs
    ctx.save_for_backward(*tensors)
    ctx.shape = output[0].shape


def _differentiate(ctx: Any, grad_y: Tensor | None, grad_codes: Tensor | None) -> tuple[Tensor | None, ...]:
    x = ctx.saved_tensors[0]
    grad_y = x.new_zeros(ctx.shape) if grad_y is None else grad_y
    grads = _merge_residual_backward(grad_y, grad_codes, *ctx.saved_tensors, ctx.kind, ctx.sources)
    decoder = grads[11] if len(grads) > 11 else None
    return (grads[0], *[None] * 6, *grads[1:11], decoder, None, None)


_merge_residual.register_autograd(_differentiate, setup_context=_save)


def _blocks(width: int, code: int, hidden: int, kind: torch.dtype) -> dict[str, Any]:
    """How the tiles of members are cut, and the format of their products."""
    import triton

    half = kind.itemsize == 2
    whole = half and width <= 256  # all channels at once: fewer steps that wait for one another
    return {
        "WIDTH": width,
        "CODE": code,
        "HIDDEN": hidden,
        "BLOCK_D": max(16, next_power_of_2(width)),
        "BLOCK_C": max(16, next_power_of_2(code)),
        "BLOCK_H": max(16, next_power_of_2(hidden)),
        "BLOCK_M": 16,
        "BLOCK_K": max(16, next_power_of_2(width)) if whole else 64 if half else 32,
        "KIND": getattr(triton.language, str(kind).removeprefix("torch.")),
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3",
        "num_warps": 4,
        # fp32 products keep three terms of every block: no room for a second stage
        "num_stages": 2 if half else 1,
    }
