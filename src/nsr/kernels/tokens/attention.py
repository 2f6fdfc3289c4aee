"""Attention with one bias a key, forward: reads queries, keys and values where they lie, and pads nothing."""

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """``softmax(q kᵀ / √d_h + bias_key) v`` in half precision, no gradient.

    Shapes:
        ``q``, ``k``, ``v``: ``[B, H, N, d_h]`` with any strides but the last; ``bias``: ``[B, N]``; the result
        ``[B, H, N, d_h]``, laid out as ``[B, N, H, d_h]``.
    """
    return _attention(q, k, v, bias).transpose(1, 2)


@torch.library.custom_op("nsr::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    import triton

    from nsr.kernels.tokens.attention_kernels import attend

    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, length, width = q.shape
    out = q.new_empty(batch, length, heads, width)
    block_q, block_k, stages = (64, 128, 2) if length > 700 else (128, 64, 3) if length > 256 else (64, 32, 3)
    attend[(triton.cdiv(length, block_q), batch * heads)](
        q, k, v, q if bias is None else bias.float().contiguous(), out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads, length, math.log2(math.e) / math.sqrt(width),
        WIDTH=width, BLOCK_D=max(16, triton.next_power_of_2(width)), BLOCK_Q=block_q, BLOCK_K=block_k,
        BIASED=bias is not None, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    batch, heads, length, width = q.shape
    return q.new_empty(batch, length, heads, width)
