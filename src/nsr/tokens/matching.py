"""What the matching rules share: cosines in fp32, a fixed order among equals, and plans from matches.

Matching takes no gradient and runs in fp32 whatever the autocast state, so that a baseline and its NSR twin build the
same groups. Among equal scores the lowest index wins, everywhere, so that any two implementations can agree exactly.
A NaN compares greater than every number, as in ``torch.sort``: indices stay in range and other images are not touched.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.tokens.plan import MergePlan

_EPS = 1e-6


def autocast_off(x: Tensor) -> AbstractContextManager:
    """A context without autocast on the device of ``x``; none at all where it is off, which exports more simply."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def unit(features: Tensor) -> Tensor:
    """Features of length one, in fp32: ``[..., D] -> [..., D]``. A zero vector stays zero."""
    return F.normalize(features.float(), dim=-1, eps=_EPS)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines of unit features: ``[B, M, D], [B, N, D] -> [B, M, N]``."""
    with autocast_off(a):
        return a @ b.mT


def descending(score: Tensor) -> Tensor:
    """Indices from the highest to the lowest score, equal ones by position: ``[B, N] -> [B, N]``."""
    if torch.onnx.is_in_onnx_export():
        # the exporter of torch 2.13 does not know the stable sort; ONNX's own sort ranks equals by position anyway
        return score.sort(dim=-1, descending=True).indices
    return score.sort(dim=-1, descending=True, stable=True).indices


def size_plan(group: Tensor, num_groups: int, max_merged: int, size: Tensor | None) -> MergePlan:
    """A plan without padding whose weights are ``t_i = s_i / Σ s``."""
    size = torch.ones_like(group, dtype=torch.float32) if size is None else size.detach().float()
    total = size.new_zeros(size.shape[0], num_groups).scatter_add(1, group, size)
    return MergePlan(group, size / total.gather(1, group), num_groups, max_merged)
