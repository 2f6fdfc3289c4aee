"""MPM at a fixed length, so that a training step with it can be captured.

How many pairs there are depends on the image, and :class:`~nsr.tokens.MPM` reads the longest sample's length back to
shorten the sequence to it. A captured step can read nothing: here the sequence keeps its length, and what merged away
becomes padding that attention masks. The result is the same, the saving in computation is given up while training.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels import tokens as kernels
from nsr.tokens import MPM, MergePlan, MergeRule
from nsr.tokens.mpm import nearest_other


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
    patches = real[:, num_prefix:]
    nearest = nearest_other(tokens.detach()[:, num_prefix:], patches)  # shape: [B, P]
    patch = position[num_prefix:] - num_prefix
    mutual = (nearest.gather(1, nearest) == patch) & (nearest != patch) & patches & patches.gather(1, nearest)
    paired = torch.where(mutual, torch.minimum(nearest, patch), patch)
    leader = torch.cat([position[:num_prefix].expand(batch, -1), num_prefix + paired], dim=1)

    leads = (leader == position) & real
    count = leads.sum(1, keepdim=True)
    # padding joins the padding of its sample; a sample that is as long as the sequence has none
    group = torch.where(real, (leads.cumsum(1) - 1).gather(1, leader), count.clamp(max=length - 1))
    weight = torch.where(F.pad(mutual, (num_prefix, 0)), 0.5, 1.0) * real
    layout = kernels.lay_out(group, real.float(), length) if kernels.use_kernels(tokens) else None
    pairs_at_most = (length - num_prefix) // 2
    return MergePlan(group, weight, length, max_merged=2 * pairs_at_most, valid=position < count, layout=layout)


def capturable(rule: MergeRule | None) -> MergeRule | None:
    """The rule to train with where steps are captured: the same groups at shapes that depend on no image."""
    return FixedLengthMPM(rule.blocks) if isinstance(rule, MPM) else rule
