"""MPM at a fixed length, so that a training step with it can be captured.

How many pairs there are depends on the image, and :class:`~nsr.tokens.MPM` reads the longest sample's length back to
shorten the sequence to it. A captured step can read nothing: here the sequence keeps its length, and what merged away
becomes padding that attention masks. The result is the same, the saving in computation is given up while training.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.tokens import MPM, MergePlan, MergeRule
from nsr.tokens.matching import cosine, unit


@dataclass(frozen=True)
class FixedLengthMPM(MPM):
    """MPM whose plans keep the length of the sequence; reads no value."""

    def plan(
        self,
        metric: Tensor,
        *,
        layer: int,
        depth: int,
        size: Tensor | None = None,
        num_prefix: int = 1,
        valid: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> MergePlan | None:
        """See :func:`fixed_length_plan`."""
        return fixed_length_plan(metric, num_prefix, valid) if layer in self.blocks else None


def fixed_length_plan(tokens: Tensor, num_prefix: int, valid: Tensor | None) -> MergePlan:
    """The plan of :func:`nsr.tokens.mpm_plan`, padded to the length there was: ``[B, N, D]``."""
    batch, length, _ = tokens.shape
    position = torch.arange(length, device=tokens.device)
    real = torch.ones(batch, length, dtype=torch.bool, device=tokens.device) if valid is None else valid
    may_pair = real & (position >= num_prefix)
    features = unit(tokens.detach())
    excluded = ~may_pair.unsqueeze(1) | torch.eye(length, dtype=torch.bool, device=tokens.device)
    nearest = cosine(features, features).masked_fill(excluded, -torch.inf).argmax(dim=-1)  # shape: [B, N]
    mutual = (nearest.gather(1, nearest) == position) & may_pair & may_pair.gather(1, nearest) & (nearest != position)
    leader = torch.where(mutual, torch.minimum(nearest, position), position)

    leads = (leader == position) & real
    new_position = (leads.cumsum(1) - 1).gather(1, leader)
    # where there is padding its sample is shorter, so that the last place is padding too
    group = torch.where(real, new_position, length - 1)
    weight = torch.where(mutual, 0.5, 1.0) * real
    pairs_at_most = (length - num_prefix) // 2
    return MergePlan(group, weight, length, max_merged=2 * pairs_at_most, valid=position < leads.sum(1, keepdim=True))


def capturable(rule: MergeRule | None) -> MergeRule | None:
    """The rule to train with where steps are captured: the same groups at shapes that depend on no image."""
    return FixedLengthMPM(rule.blocks) if isinstance(rule, MPM) else rule
