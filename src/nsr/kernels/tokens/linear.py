"""The linear layers of a block, in half precision and without gradient, with the norm ahead or the addition behind."""

from typing import Any

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv

WIDEST = 256  # of the residual stream; beyond it the libraries' products are better
_MANY = 8192  # rows that fill the multiprocessors in large tiles; a third stage is worth 2 to 12 % there
_PROGRAMS = 264  # two for each multiprocessor of an H200


@torch.library.custom_op("nsr::norm_linear", mutates_args=())
def norm_linear(
    x: Tensor, norm: Tensor, norm_bias: Tensor, eps: float, weight: Tensor, bias: Tensor, gelu: bool
) -> Tensor:
    """``W LayerNorm(x) + b``, with a GELU behind it if asked for: ``[B, N, D] -> [B, N, E]``."""
    from nsr.kernels.tokens.linear_kernels import norm_linear as kernel

    x = x.contiguous()
    outputs, width = weight.shape
    rows = x.numel() // width
    out = x.new_empty(*x.shape[:-1], outputs)
    many = rows >= _MANY
    block_m, block_n = 64 if many else 32, 64
    tiles, columns = cdiv(rows, block_m), cdiv(outputs, block_n)
    # each program normalises its rows again, so few that share them, but enough for all multiprocessors
    steps = cdiv(columns, min(columns, max(1, _PROGRAMS // tiles)))
    block_d, tail_d = two_powers(width)
    terms = 1 if x.dtype == torch.bfloat16 else 2
    kernel[(tiles, cdiv(columns, steps))](
        x, *(w.contiguous() for w in (norm, norm_bias, weight, bias)), out, rows, steps * block_n, eps,
        WIDTH=width, OUT=outputs, GELU=terms * gelu, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, TAIL_D=tail_d,
        num_warps=4, num_stages=3 if many else 2,
    )  # fmt: skip
    return out


@norm_linear.register_fake
def _(x: Tensor, norm: Tensor, norm_bias: Tensor, eps: float, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("nsr::linear_add", mutates_args=())
def linear_add(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x + (W a + b)``: ``[B, N, D], [B, N, E] -> [B, N, D]``."""
    from nsr.kernels.tokens.linear_kernels import linear_add as kernel

    x, a = x.contiguous(), a.contiguous()
    out = torch.empty_like(x)
    outputs, width = weight.shape
    rows = x.numel() // outputs
    many, long = rows >= _MANY, width > WIDEST
    block_m, block_n, tail_n, warps = 128 if many else 32, 64, 0, 4
    if many and long:  # long rows are read once, not once for every 64 columns
        (block_n, tail_n), warps = two_powers(outputs), 8
    kernel[(cdiv(rows, block_m), cdiv(outputs, block_n + tail_n))](
        a, weight.contiguous(), bias.contiguous(), x, out, rows, WIDTH=width, OUT=outputs,
        BLOCK_M=block_m, BLOCK_N=block_n, TAIL_N=tail_n,
        BLOCK_K=128 if long and not many else 64, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


@linear_add.register_fake
def _(x: Tensor, a: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def two_powers(width: int) -> tuple[int, int]:
    """Powers of two that cover a width, each 16 or more; the second is 0 where one does.

    Example:
        >>> two_powers(192), two_powers(256), two_powers(40)
        ((128, 64), (256, 0), (32, 16))
    """
    first = max(16, 1 << (width.bit_length() - 1))
    left = width - first
    return first, 0 if left <= 0 else max(16, 1 << (left - 1).bit_length())
