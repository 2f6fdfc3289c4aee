"""The groups of two or more alone, cut out of a plan at a static shape.

Singletons have no residual. At a moderate merge rate they are most of the sequence, so the branch works on this part:
``M`` members of ``K`` merged groups, both bounds that are known without reading a value. Slots that a sample does not
need stay unfilled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.tokens.plan import MergePlan


@dataclass(frozen=True)
class Selection:
    """``K`` of ``N`` places of a sequence.

    Args:
        index: Their positions, ascending, ``[B, K]``; 0 in an unfilled slot.
        filled: Which slots are in use, ``[B, K]``.
        length: ``N``.
    """

    index: Tensor  # shape: [B, K]
    filled: Tensor  # shape: [B, K]
    length: int

    def take(self, x: Tensor) -> Tensor:
        """``[B, N, D] -> [B, K, D]``; an unfilled slot repeats the first place."""
        return x.gather(1, self.index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def spread(self, x: Tensor) -> Tensor:
        """``[B, K, D] -> [B, N, D]``, exactly 0 outside the selection."""
        x = torch.where(self.filled.unsqueeze(-1), x, 0.0)
        # a sum, because unfilled slots share the first place: they add 0 there
        out = x.new_zeros(x.shape[0], self.length, x.shape[-1])
        return out.scatter_add(1, self.index.unsqueeze(-1).expand_as(x), x)


@dataclass(frozen=True)
class MergedPart:
    """Members and groups of a plan's merged part, and the plan from the one to the other.

    Args:
        members: The tokens that lie in groups of two or more.
        groups: Those groups.
        plan: Which of the ``K`` groups each of the ``M`` members belongs to, with its weight.
    """

    members: Selection
    groups: Selection
    plan: MergePlan


def merged_part(plan: MergePlan) -> MergedPart:
    """Cut the groups of two or more out of ``plan``; reads no values."""
    length = plan.group.shape[1]
    bound = min(plan.max_merged, length)
    members, _ = _select(plan.members_of_merged(), bound)
    groups, slot = _select(plan.counts() > 1, bound // 2)
    inner = MergePlan(
        # an unfilled slot has weight 0, so it may point at any group
        group=slot.gather(1, plan.group.gather(1, members.index)).clamp(max=max(bound // 2 - 1, 0)),
        weight=plan.weight.gather(1, members.index) * members.filled,
        num_groups=bound // 2,
        max_merged=bound,
        valid=groups.filled,
    )
    return MergedPart(members, groups, inner)


def _select(mask: Tensor, bound: int) -> tuple[Selection, Tensor]:
    """The true places of ``mask`` ``[B, N]``, at most ``bound`` a row, and the slot of each place (``bound``: none)."""
    batch, length = mask.shape
    slot = torch.where(mask, mask.long().cumsum(1) - 1, bound)
    place = torch.arange(length, device=mask.device).expand(batch, length)
    # places outside the selection all write to one slot too many, which is cut off
    index = slot.new_zeros(batch, bound + 1).scatter(1, slot, place)[:, :bound]
    filled = torch.arange(bound, device=mask.device) < mask.sum(1, keepdim=True)
    return Selection(index, filled, length), slot
