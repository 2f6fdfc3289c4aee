r"""Proportional attention that stays on the fused kernels.

A merged token stands for ``s`` patches and must draw ``s`` times the attention:

.. math:: \mathrm{softmax}\big(q k^\top / \sqrt{d_h} + b_{key}\big)\, v, \qquad b = \log s.

A bias matrix would push the product off the flash kernels. A bias that depends on the key alone fits into the product
itself, as further channels of ``q`` and ``k``::

    q' = [q, c, c, 0 …]        k' = [k, hi, lo, 0 …]        c · (hi + lo) = √d_h · b

``c`` is a power of two near ``√d_h``, exact in every format; ``hi + lo`` is ``b`` in twice the format's precision, so
that bfloat16 does not round ``log s``. Head widths must be multiples of 8, which leaves room for both.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels import tokens as kernels

# exp(-10,000) is exactly zero in float32, and the number itself is finite in float16.
MASKED = -10_000.0


def key_bias(size: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """The bias of every key: ``log size``, and :data:`MASKED` where a key is padding.

    Args:
        size: Patches a token stands for, ``[B, N]``; ``None`` for none of it.
        valid: ``False`` at padded tokens, ``[B, N]``; ``None`` where nothing is padded.

    Returns:
        ``[B, N]`` in float32, or ``None`` if there is nothing to add.
    """
    bias = None if size is None else size.float().log()
    if valid is None:
        return bias
    if bias is None:
        bias = torch.zeros(valid.shape, device=valid.device)
    return bias.masked_fill(~valid, MASKED)


def sized_attention(qkv: Tensor, size: Tensor | None, valid: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Attention that counts each key ``size`` times and padding not at all.

    On CUDA in half precision a kernel weighs the keys in its registers and skips padding; elsewhere it is
    :func:`biased_attention`. What padding itself gets is of no use.

    Args:
        qkv: Queries, keys and values as their common projection leaves them, ``[B, N, 3, H, d_h]``.
        size: ``[B, N]``; all 1 if not given.
        valid: ``False`` at padding, which is at the end, ``[B, N]``; ``None`` where there is none.
        dropout: Of the attention weights.

    Returns:
        ``[B, N, H, d_h]``.
    """
    if (size is not None or valid is not None) and _in_kernel(qkv, size, dropout):
        return kernels.attention(qkv, size, None if valid is None else valid.sum(1, dtype=torch.int32))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return biased_attention(q, k, v, key_bias(size, valid), dropout).transpose(1, 2)


def _in_kernel(qkv: Tensor, of_keys: Tensor | None, dropout: float) -> bool:
    """Whether the kernel can do it: half precision, no gradient to what weighs the keys."""
    half = qkv.dtype in (torch.float16, torch.bfloat16)
    return half and dropout == 0 and not kernels.needs_grad(of_keys) and kernels.use_kernels(qkv)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Attention with one bias a key, on whatever fused kernel the device has: further channels carry the bias.

    Shapes:
        ``q``, ``k``, ``v``: ``[B, H, N, d_h]``; ``bias``: ``[B, N]``; the result ``[B, H, N, d_h]``.
    """
    if bias is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    width = q.shape[-1]
    q, k = q.to(v.dtype), k.to(v.dtype)  # q/k norms leave autocast's format; the split below needs the final one
    channel = 2.0 ** round(math.log2(math.sqrt(width)))
    exact = (bias * (math.sqrt(width) / channel))[:, None, :, None].expand(*k.shape[:3], 1)
    high = exact.to(v.dtype)
    low = (exact - high.to(exact.dtype)).to(v.dtype)
    pad = biased_width(width) - width - 2
    q = F.pad(F.pad(q, (0, 2), value=channel), (0, pad))
    k = F.pad(torch.cat([k, high, low], dim=-1), (0, pad))
    v = F.pad(v, (0, 2 + pad))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=1 / math.sqrt(width))[..., :width]


def biased_width(head_dim: int) -> int:
    """Channels of ``q'`` and ``k'``: two more than the head has, rounded up to a multiple of 8."""
    return -(-(head_dim + 2) // 8) * 8


def biased_attention_reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """What :func:`biased_attention` computes, written out: its plain twin."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # shape: [B, H, N, N]
    if bias is not None:
        scores = scores + bias[:, None, None, :]
    return scores.softmax(dim=-1) @ v
