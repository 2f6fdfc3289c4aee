"""What the matching rules share: cosines in fp32, a fixed order among equals, and plans from matches.

Matching takes no gradient and runs in fp32 whatever the autocast state, so that a baseline and its NSR twin build the
same groups. Among equal scores the lowest index wins, everywhere, so that any two implementations can agree exactly.
A NaN compares greater than every number, as in ``torch.sort``: indices stay in range and other images are not touched.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels import tokens as kernels
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
    if kernels.use_kernels(score):
        return kernels.descending(score)
    if torch.onnx.is_in_onnx_export():
        # the exporter of torch 2.13 does not know the stable sort; ONNX's own sort ranks equals by position anyway
        return score.sort(dim=-1, descending=True).indices
    return score.sort(dim=-1, descending=True, stable=True).indices


def alternate(length: int, num_prefix: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of the patch tokens that choose (A) and of those that are chosen (B), ascending.

    A are the even positions, B the odd ones. A prefix of several tokens (distillation, registers) counts as one
    position, so that patches fall into A and B as they do behind a single CLS token; without a prefix the first patch
    is at position 0.
    """
    position = torch.arange(length, device=device)
    return position[num_prefix + (num_prefix > 0) :: 2], position[num_prefix + (num_prefix == 0) :: 2]


def bipartite_plan(
    kept: Tensor, source: Tensor, target: Tensor, partner: Tensor, *, num_prefix: int, size: Tensor | None
) -> MergePlan:
    """The plan of a matching with the same counts for every sample. New order: prefix, ``kept``, ``target``.

    Args:
        kept: Tokens that stay as they are, ``[B, K]``.
        source: Tokens that merge into another, ``[B, r]``.
        target: Tokens that may receive them, ``[B, T]``.
        partner: Which of the ``T`` targets each source joins, ``[B, r]``.
        num_prefix: Leading tokens, which keep their places.
        size: Original patches each token stands for, ``[B, N]``; all 1 if not given.
    """
    batch, r = source.shape
    first_target = num_prefix + kept.shape[1]
    num_groups = first_target + target.shape[1]
    stays = torch.arange(num_groups, device=source.device).expand(batch, -1)
    group = torch.cat([stays, first_target + partner], dim=1)
    token = torch.cat([stays[:, :num_prefix], kept, target, source], dim=1)
    group = torch.zeros_like(group).scatter(1, token, group)
    size = torch.ones_like(group, dtype=torch.float32) if size is None else size.detach().float()
    share, total, layout = _shares(group, size, num_groups)
    return MergePlan(group, share, num_groups, max_merged=2 * r, size=total, layout=layout)


def leader_plan(
    leader: Tensor,
    *,
    size: Tensor | None = None,
    valid: Tensor | None = None,
    late: Tensor | None = None,
    keep_length: bool = False,
) -> MergePlan:
    """The plan of a matching whose counts depend on the image: shorter samples are padded at the end.

    The one place that reads values back from the device, once: the length of the longest sample has to be known. With
    ``keep_length`` nothing is read, and what merged away stays as padding.

    Args:
        leader: The token whose group each token joins, ``[B, N]``; its own position if it leads one itself.
        size: Shares within a group are proportional to it, ``[B, N]``; all 1 if not given.
        valid: Which tokens are real, ``[B, N]``; all if not given.
        late: Which leaders come after all others in the new order, ``[N]``; otherwise leaders keep their order.
        keep_length: Pad to the length there was.
    """
    length = leader.shape[1]
    position = torch.arange(length, device=leader.device)
    real = torch.ones_like(leader, dtype=torch.bool) if valid is None else valid
    leads = (leader == position) & real
    if late is None:
        new_position = leads.cumsum(1) - 1
    else:
        early = leads & ~late
        new_position = torch.where(late, early.sum(1, keepdim=True) + (leads & late).cumsum(1) - 1, early.cumsum(1) - 1)
    count = leads.sum(1)
    if keep_length:
        longest, shortest, removed = length, 0, length - 1
    else:
        longest, shortest, removed = torch.stack([count.max(), count.min(), (real.sum(1) - count).max()]).tolist()
    # padding joins the padding of its sample; the longest sample has none, and there weight 0 keeps it out
    group = torch.where(real, new_position.gather(1, leader), count.clamp(max=longest - 1).unsqueeze(1))
    size = torch.ones_like(group, dtype=torch.float32) if size is None else size.detach().float()
    share, _, layout = _shares(group, size * real, longest)
    return MergePlan(
        group,
        share,
        longest,
        # a group of k members removes k - 1 of them, and k <= 2 (k - 1)
        max_merged=min(2 * removed, length),
        valid=None if longest == shortest else position[:longest] < count.unsqueeze(1),
        layout=layout,
    )


def _shares(group: Tensor, size: Tensor, num_groups: int) -> tuple[Tensor, Tensor, kernels.GroupLayout | None]:
    """``t_i = s_i / Σ s`` within each group, 0 where a group has no size at all; the sums; the kernels' layout."""
    if kernels.use_kernels(group, size):
        layout = kernels.lay_out(group, size, num_groups)
        return layout.share, layout.size, layout
    total = size.new_zeros(size.shape[0], num_groups).scatter_add(1, group, size)
    of_member = total.gather(1, group)
    return size / of_member.where(of_member > 0, 1.0), total, None
