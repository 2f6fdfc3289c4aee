"""Attention with the matching beside it: both need the keys alone, so neither waits for the other.

Matching is bound by latency (one program a sample lays the groups out), attention by work. In a CUDA graph the two are
branches between the projection to queries, keys and values and the merge; outside of one, where launches take longer
than kernels, they follow each other.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels.tokens.attention import _attention
from nsr.kernels.tokens.layout import GroupLayout
from nsr.kernels.tokens.linear import WIDEST, linear_add
from nsr.kernels.tokens.match import _tome_layout, _tome_layout_like

_streams = threading.local()


class Matching(NamedTuple):
    """ToMe's matching of one event, see :func:`nsr.kernels.tokens.tome_layout`.

    Attributes:
        r: Tokens to remove.
        num_prefix: Leading tokens that never merge.
        size: Sizes of the tokens, ``[B, N]``; all 1 if not given.
    """

    r: int
    num_prefix: int
    size: Tensor | None


def attend_beside(
    x: Tensor, qkv: Tensor, weight: Tensor | None, proj: Tensor, proj_bias: Tensor | None, matching: Matching
) -> tuple[Tensor, GroupLayout]:
    """``x + W attention(qkv) + b``, and the groups that its keys make; takes no gradient.

    They are those of :func:`~nsr.kernels.tokens.attention` (of the fused kernels of torch where no key has a weight)
    and :func:`~nsr.kernels.tokens.tome_layout`.

    Shapes:
        ``x``: ``[B, N, D]``; ``qkv``: ``[B, N, 3, H, d_h]``; ``weight``: ``[B, N]``; ``proj``: ``[D, H d_h]``; result
        ``[B, N, D]``.
    """
    out, *layout = _attend_beside(x, qkv, weight, proj, proj_bias, *matching)
    return out, GroupLayout(*layout)


@torch.library.custom_op("nsr::attend_beside", mutates_args=())
def _attend_beside(
    x: Tensor,
    qkv: Tensor,
    weight: Tensor | None,
    proj: Tensor,
    proj_bias: Tensor | None,
    r: int,
    num_prefix: int,
    size: Tensor | None,
) -> list[Tensor]:
    keys = qkv[:, :, 1].transpose(1, 2)
    side = _side_stream(qkv.device) if qkv.is_cuda else None  # made ahead of the first capture
    if side is None or not torch.cuda.is_current_stream_capturing():
        return [_attend(x, qkv, weight, proj, proj_bias), *_tome_layout(keys, size, r, num_prefix)]
    main = torch.cuda.current_stream(qkv.device)
    side.wait_stream(main)
    # What it allocates belongs to the other stream, which waits for this one before it takes any of it again.
    with torch.cuda.stream(side):
        layout = _tome_layout(keys, size, r, num_prefix)
    out = _attend(x, qkv, weight, proj, proj_bias)
    main.wait_stream(side)
    return [out, *layout]


@_attend_beside.register_fake
def _(x: Tensor, qkv: Tensor, weight: Tensor, proj: Tensor, proj_bias: Tensor, r: int, *_: Any) -> list[Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [out, *_tome_layout_like(qkv[:, :, 1].transpose(1, 2), r)]


def _attend(x: Tensor, qkv: Tensor, weight: Tensor | None, proj: Tensor, proj_bias: Tensor | None) -> Tensor:
    if weight is None:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    else:
        attended = _attention(qkv, weight, None, False)[0].flatten(2)
    if proj_bias is None or attended.shape[-1] > WIDEST:
        return x + F.linear(attended, proj, proj_bias)
    return linear_add(x, attended, proj, proj_bias)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's second stream; programs of its kernels go ahead of those that attention still has to start."""
    streams = vars(_streams).setdefault("of_device", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device, priority=-1)
    return streams[device]
