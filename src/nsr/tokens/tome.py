"""ToMe: in every block, alternate tokens choose their most similar partner and the ``r`` best choices merge."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from nsr.kernels import tokens as kernels
from nsr.tokens.matching import alternate, bipartite_plan, descending
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule, require_count, require_unpadded
from nsr.tokens.similarity import compared, grid_cosine, grid_features, heads_of


@dataclass(frozen=True)
class ToMe(MergeRule):
    """Token Merging with ``r`` tokens removed a block, as far as there are tokens to remove.

    Args:
        r: Tokens removed in each block; ``min(r, P // 2)`` where ``P`` patch tokens are left.
        proportional: Weigh keys by their size in attention.
    """

    r: int
    proportional: bool = True

    where: ClassVar[Literal["after_attention"]] = "after_attention"
    metric: ClassVar[Literal["keys"]] = "keys"

    def __post_init__(self) -> None:
        require_count("r", self.r, 0)

    def merge_count(self, layer: int, num_patches: int, depth: int) -> int:
        """``min(r, P // 2)``."""
        return tome_merge_count(num_patches, self.r)

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
        """See :func:`tome_plan`."""
        require_unpadded("ToMe", valid)
        return tome_plan(metric, self.r, size=size, num_prefix=num_prefix)


def tome_merge_count(num_patches: int, r: int) -> int:
    """Tokens that ToMe removes from ``num_patches``."""
    return min(r, num_patches // 2)


def tome_plan(metric: Tensor, r: int, *, size: Tensor | None = None, num_prefix: int = 1) -> MergePlan | None:
    r"""Bipartite soft matching by position.

    A are the tokens at even positions, B those at odd ones. Each a takes its best b by cosine; the ``r`` most similar
    a merge into their b, with weights :math:`t_i = s_i / \sum s`. New order: prefix, unmerged A by position, all of B.

    Several prefix tokens count as one position and stay in front, see :func:`~nsr.tokens.matching.alternate`.

    Args:
        metric: What is compared, ``[B, N, D]``, or ``[B, H, N, D]``: the mean over heads.
        r: Tokens to remove, at most ``P // 2``.
        size: Original patches each token stands for, ``[B, N]``; all 1 if not given.
        num_prefix: Leading tokens that never merge.

    Returns:
        The plan, or ``None`` where ``r`` or ``P // 2`` is 0.
    """
    batch, length = metric.shape[0], metric.shape[-2]
    r = tome_merge_count(length - num_prefix, r)
    if r == 0:
        return None
    if kernels.use_kernels(metric):
        layout = kernels.tome_layout(heads_of(metric).detach(), None if size is None else size.detach(), r, num_prefix)
        return laid_out_plan(layout)
    at_a, at_b = alternate(length, num_prefix, metric.device)
    features = grid_features(compared(metric))
    best, partner = grid_cosine(features[:, at_a], features[:, at_b]).max(dim=-1)  # shape: [B, A]
    order = descending(best)
    return bipartite_plan(
        kept=at_a[order[:, r:].sort(dim=1).values],
        source=at_a[order[:, :r]],
        target=at_b.expand(batch, -1),
        partner=partner.gather(1, order[:, :r]),
        num_prefix=num_prefix,
        size=size,
    )


def laid_out_plan(layout: kernels.GroupLayout) -> MergePlan:
    """ToMe's plan whose groups a kernel has found."""
    length, num_groups = layout.group.shape[1], layout.size.shape[1]
    return MergePlan(layout.group, layout.share, num_groups, 2 * (length - num_groups), size=layout.size, layout=layout)
