"""Attention with the matching beside it: both need the keys alone, so neither waits for the other.

Matching is bound by latency (one program a sample lays the groups out), attention by work. In a CUDA graph the two are
branches between the projection to queries, keys and values and the merge; outside of one, where launches take longer
than kernels, they follow each other.
"""

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels.tokens.attention import _attention
from nsr.kernels.tokens.layout import GroupLayout
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
    qkv: Tensor, weight: Tensor | None, proj: Tensor, proj_bias: Tensor | None, matching: Matching
) -> tuple[Tensor, GroupLayout]:
    """Attention with its output projection, and the groups that its keys make; takes no gradient.

    They are those of :func:`~nsr.kernels.tokens.attention` (of the fused kernels of torch where no key has a weight)
    and :func:`~nsr.kernels.tokens.tome_layout`.

    Shapes:
        ``qkv``: ``[B, N, 3, H, d_h]``; ``weight``: ``[B, N]``; ``proj``: ``[D, H d_h]``; result ``[B, N, D]``.
    """
    out, *layout = _attend_beside(qkv, weight, proj, proj_bias, *matching)
    return out, GroupLayout(*layout)


@torch.library.custom_op("nsr::attend_beside", mutates_args=())
def _attend_beside(
    qkv: Tensor,
    weight: Tensor | None,
    proj: Tensor,
    proj_bias: Tensor | None,
    r: int,
    num_prefix: int,
    size: Tensor | None,
) -> list[Tensor]:
    keys = qkv[:, :, 1].transpose(1, 2)
    if not (qkv.is_cuda and torch.cuda.is_current_stream_capturing()):
        return [_attend(qkv, weight, proj, proj_bias), *_tome_layout(keys, size, r, num_prefix)]
    main, side = torch.cuda.current_stream(qkv.device), _side_stream(qkv.device)
    side.wait_stream(main)
    # What it allocates belongs to the other stream, which waits for this one before it takes any of it again.
    with torch.cuda.stream(side):
        layout = _tome_layout(keys, size, r, num_prefix)
    out = _attend(qkv, weight, proj, proj_bias)
    main.wait_stream(side)
    return [out, *layout]


@_attend_beside.register_fake
def _(
    qkv: Tensor,
    weight: Tensor | None,
    proj: Tensor,
    proj_bias: Tensor | None,
    r: int,
    num_prefix: int,
    size: Tensor | None,
) -> list[Tensor]:
    return [qkv.new_empty(*qkv.shape[:2], proj.shape[0]), *_tome_layout_like(qkv[:, :, 1].transpose(1, 2), r)]


def _attend(qkv: Tensor, weight: Tensor | None, proj: Tensor, proj_bias: Tensor | None) -> Tensor:
    if weight is None:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    else:
        attended = _attention(qkv, weight, None, False)[0]
    return F.linear(attended.flatten(2), proj, proj_bias)


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's second stream; programs of its kernels go ahead of those that attention still has to start."""
    streams = vars(_streams).setdefault("of_device", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device, priority=-1)
    return streams[device]
