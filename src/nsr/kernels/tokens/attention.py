"""Attention with one weight a key: reads queries, keys and values where the projection left them, and pads nothing."""

import math
from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2

# Tiles of queries and keys, and stages, in fp32: its products are none of the tensor cores' and fill the registers.
_EXACT = (32, 32, 1)


def attention(qkv: Tensor, weight: Tensor | None, count: Tensor | None = None) -> Tensor:
    """``softmax(q kᵀ / √d_h + log weight_key) v``; differentiable in ``qkv``.

    Where ``count`` is given, a sample has that many tokens; what lies behind them is left out and gets 0.

    Shapes:
        ``qkv``: ``[B, N, 3, H, d_h]``; ``weight``: ``[B, N]``; ``count``: ``[B]``, int32; result ``[B, N, H, d_h]``.
    """
    return _attention(qkv, weight, count, torch.is_grad_enabled() and qkv.requires_grad)[0]


@torch.library.custom_op("nsr::attention", mutates_args=())
def _attention(qkv: Tensor, weight: Tensor | None, count: Tensor | None, levelled: bool) -> tuple[Tensor, Tensor]:
    from nsr.kernels.tokens.attention_kernels import attend

    qkv = qkv.contiguous()
    batch, length, _, heads, width = qkv.shape
    out, level = _outputs(qkv, levelled)
    block_q, block_k, stages = (64, 128, 2) if length > 256 else (64, 32, 3)
    if qkv.dtype.itemsize > 2:
        block_q, block_k, stages = _EXACT
    attend[(cdiv(length, block_q), batch * heads)](
        *qkv.unbind(2), qkv if weight is None else weight.float().contiguous(), qkv if count is None else count,
        out, level,
        qkv.stride(0), qkv.stride(1), qkv.stride(3), heads, length, _scale(width),
        WIDTH=width, BLOCK_D=max(16, next_power_of_2(width)), BLOCK_Q=block_q, BLOCK_K=block_k,
        WEIGHTED=weight is not None, COUNTED=count is not None, LEVELLED=levelled, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out, level


@_attention.register_fake
def _(qkv: Tensor, weight: Tensor | None, count: Tensor | None, levelled: bool) -> tuple[Tensor, Tensor]:
    return _outputs(qkv, levelled)


@torch.library.custom_op("nsr::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, out: Tensor, level: Tensor, qkv: Tensor, weight: Tensor | None, count: Tensor | None
) -> Tensor:
    from nsr.kernels.tokens.attention_backward import attend_backward_keys, attend_backward_queries

    qkv, grad = qkv.contiguous(), grad.contiguous()
    batch, length, _, heads, width = qkv.shape
    weight = level.new_ones(batch, length) if weight is None else weight.float().contiguous()
    to_qkv = torch.empty_like(qkv)
    delta = torch.empty_like(level)
    q, k, v = qkv.unbind(2)
    to_q, to_k, to_v = to_qkv.unbind(2)
    strides = (qkv.stride(0), qkv.stride(1), qkv.stride(3))
    counts = qkv if count is None else count
    shape = {"WIDTH": width, "BLOCK_D": max(16, next_power_of_2(width)), "COUNTED": count is not None}
    wide = qkv.dtype.itemsize > 2
    block_q, block_k, stages = _EXACT if wide else (64, 128, 2)
    attend_backward_queries[(cdiv(length, block_q), batch * heads)](
        q, k, v, weight, counts, out, grad, level, delta, to_q, *strides, *strides, heads, length, _scale(width),
        BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=4, num_stages=stages, **shape,
    )  # fmt: skip
    block_q, block_k, stages = _EXACT if wide else (32, 128, 3)
    attend_backward_keys[(cdiv(length, block_k), batch * heads)](
        q, k, v, weight, counts, grad, level, delta, to_k, to_v, *strides, *strides, heads, length, _scale(width),
        BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=4, num_stages=stages, **shape,
    )  # fmt: skip
    return to_qkv


@_attention_backward.register_fake
def _(grad: Tensor, out: Tensor, level: Tensor, qkv: Tensor, weight: Tensor | None, count: Tensor | None) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:3])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
    return _attention_backward(grad, *ctx.saved_tensors), None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _outputs(qkv: Tensor, levelled: bool) -> tuple[Tensor, Tensor]:
    """Room for the result and, where a gradient will be wanted, for the logarithm of each query's sum."""
    batch, length, _, heads, width = qkv.shape
    level = qkv.new_empty((batch, heads, length) if levelled else (0,), dtype=torch.float32)
    return qkv.new_empty(batch, length, heads, width), level


def _scale(width: int) -> float:
    """Of scores whose exponentials have base 2."""
    return math.log2(math.e) / math.sqrt(width)
