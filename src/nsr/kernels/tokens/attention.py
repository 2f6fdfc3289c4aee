"""Attention with one bias a key: reads queries, keys and values where the projection left them, and pads nothing."""

import math
from typing import Any

import torch
from torch import Tensor


def attention(qkv: Tensor, bias: Tensor | None) -> Tensor:
    """``softmax(q kᵀ / √d_h + bias_key) v``; differentiable in ``qkv``.

    Shapes:
        ``qkv``: ``[B, N, 3, H, d_h]``; ``bias``: ``[B, N]``; the result ``[B, N, H, d_h]``.
    """
    return _attention(qkv, bias, torch.is_grad_enabled() and qkv.requires_grad)[0]


@torch.library.custom_op("nsr::attention", mutates_args=())
def _attention(qkv: Tensor, bias: Tensor | None, levelled: bool) -> tuple[Tensor, Tensor]:
    import triton

    from nsr.kernels.tokens.attention_kernels import attend

    qkv = qkv.contiguous()
    batch, length, _, heads, width = qkv.shape
    out, level = _outputs(qkv, levelled)
    block_q, block_k, stages = (64, 128, 2) if length > 700 else (128, 64, 3) if length > 256 else (64, 32, 3)
    attend[(triton.cdiv(length, block_q), batch * heads)](
        *qkv.unbind(2), qkv if bias is None else bias.float().contiguous(), out, level,
        qkv.stride(0), qkv.stride(1), qkv.stride(3), heads, length, _scale(width),
        WIDTH=width, BLOCK_D=max(16, triton.next_power_of_2(width)), BLOCK_Q=block_q, BLOCK_K=block_k,
        BIASED=bias is not None, LEVELLED=levelled, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out, level


@_attention.register_fake
def _(qkv: Tensor, bias: Tensor | None, levelled: bool) -> tuple[Tensor, Tensor]:
    return _outputs(qkv, levelled)


@torch.library.custom_op("nsr::attention_backward", mutates_args=())
def _attention_backward(grad: Tensor, out: Tensor, level: Tensor, qkv: Tensor, bias: Tensor | None) -> Tensor:
    import triton

    from nsr.kernels.tokens.attention_backward import attend_backward_keys, attend_backward_queries

    qkv, grad = qkv.contiguous(), grad.contiguous()
    batch, length, _, heads, width = qkv.shape
    bias = level.new_zeros(batch, length) if bias is None else bias.float().contiguous()
    to_qkv = torch.empty_like(qkv)
    delta = torch.empty_like(level)
    q, k, v = qkv.unbind(2)
    to_q, to_k, to_v = to_qkv.unbind(2)
    strides = (qkv.stride(0), qkv.stride(1), qkv.stride(3))
    shape = {"WIDTH": width, "BLOCK_D": max(16, triton.next_power_of_2(width))}
    block_q, block_k = 64, 64
    attend_backward_queries[(triton.cdiv(length, block_q), batch * heads)](
        q, k, v, bias, out, grad, level, delta, to_q, *strides, *strides, heads, length, _scale(width),
        BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=4, num_stages=2, **shape,
    )  # fmt: skip
    attend_backward_keys[(triton.cdiv(length, block_k), batch * heads)](
        q, k, v, bias, grad, level, delta, to_k, to_v, *strides, *strides, heads, length, _scale(width),
        BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=4, num_stages=2, **shape,
    )  # fmt: skip
    return to_qkv


@_attention_backward.register_fake
def _(grad: Tensor, out: Tensor, level: Tensor, qkv: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:2])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
    return _attention_backward(grad, *ctx.saved_tensors), None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _outputs(qkv: Tensor, levelled: bool) -> tuple[Tensor, Tensor]:
    """Room for the result and, where a gradient will be wanted, for the logarithm of each query's sum."""
    batch, length, _, heads, width = qkv.shape
    level = qkv.new_empty((batch, heads, length) if levelled else (0,), dtype=torch.float32)
    return qkv.new_empty(batch, length, heads, width), level


def _scale(width: int) -> float:
    """Of scores whose exponentials have base 2."""
    return math.log2(math.e) / math.sqrt(width)
