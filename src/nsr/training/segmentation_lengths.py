"""How long sequences get whose merges depend on the image, found out as training goes.

MPM merges as many pairs as an image has. A captured step can read no count back, so it works at fixed lengths. Those of
the unmerged image are always enough, but then most of the work goes into padding. So lengths are bet on: the greatest
seen so far, and some room. A sample that has more loses tokens, and that is noted on the device; the host looks after
each epoch, and where it happened the epoch is taken back and repeated with more room. What is learned is therefore what
would have been learned at full length.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nsr.kernels.tokens import lay_out
from nsr.tokens import MergePlan

_ROOM = 1.06  # above the longest seen
_STEP = 8  # lengths are multiples of it


class TrialLengths:
    """Tokens that a sample may have after the merge ahead of each block.

    Args:
        depth: Blocks.
        device: Where the longest samples are noted.

    Attributes:
        bound: Of each block, the prefix included; 0 where nothing is bet on yet and every length has room.
        longest: The most tokens that a sample has had there, ``[depth]``, int64.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.bound = [0] * depth
        self.longest = torch.zeros(depth, dtype=torch.int64, device=device)

    def cut(self, plan: MergePlan, block: int) -> MergePlan:
        """The plan of an event, padded to the bound rather than to the length there was; device work alone."""
        assert plan.valid is not None, "a plan that keeps the length says which tokens are real"
        seen = self.longest[block]
        torch.maximum(seen, plan.valid.sum(1).amax(), out=seen)
        return shortened(plan, self.bound[block]) if self.bound[block] else plan

    def review(self) -> bool:
        """Look at what was seen, and bet anew where nothing was bet on or a bet was lost; whether one was lost."""
        longest = self.longest.tolist()
        lost = any(0 < bound < seen for bound, seen in zip(self.bound, longest, strict=True))
        if lost or not any(self.bound):
            self.bound = [-(-int(_ROOM * seen + 2) // _STEP) * _STEP if seen else 0 for seen in longest]
        return lost

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs to go on with the same shapes."""
        return {"lengths.bound": torch.tensor(self.bound), "lengths.longest": self.longest}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on where :meth:`state` was taken."""
        self.bound = state["lengths.bound"].tolist()
        self.longest.copy_(state["lengths.longest"])


def shortened(plan: MergePlan, length: int) -> MergePlan:
    """The plan with room for ``length`` groups; what lies behind them is thrown together in the last one."""
    if length >= plan.num_groups:
        return plan
    assert plan.valid is not None
    group, valid = plan.group.clamp(max=length - 1), plan.valid[:, :length]
    if plan.layout is None:
        return replace(plan, group=group, num_groups=length, valid=valid)
    layout = lay_out(group, (plan.weight > 0).float(), length)
    return replace(plan, group=group, weight=layout.share, num_groups=length, valid=valid, layout=layout)
