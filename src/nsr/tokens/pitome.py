"""PiToMe: tokens in dense clusters merge, tokens that stand alone are protected."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nsr.kernels import tokens as kernels
from nsr.tokens.matching import bipartite_plan, descending
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule, require_unpadded
from nsr.tokens.similarity import compared, grid_cosine, grid_features, heads_of

_MARGIN = 0.75


@dataclass(frozen=True)
class PiToMe(MergeRule):
    """Energy-guided merging that keeps a fixed ratio of the patch tokens in each block.

    The first half of the blocks matches all tokens, the second half only the most redundant ones. The margin falls
    from 0.75 in the first block towards 0.

    Args:
        keep: Share of the patch tokens that a block keeps, in [0.5, 1), in steps of 0.001.
        proportional: Weigh keys by their size in attention. The published DeiT code never did.
    """

    keep: float
    proportional: bool = True

    where: ClassVar[Literal["after_attention"]] = "after_attention"
    metric: ClassVar[Literal["keys"]] = "keys"

    def __post_init__(self) -> None:
        if not 0.5 <= self.keep < 1:
            raise ValueError(
                f"keep must lie in [0.5, 1), got {self.keep!r}: a token has one partner, so at most half go."
            )
        if abs(self.keep * 1000 - self.keep_thousandths) > 1e-6:
            raise ValueError(
                f"keep must be a multiple of 0.001, got {self.keep!r}: counts are computed exactly from thousandths. "
                f"Use {self.keep_thousandths / 1000}."
            )

    @property
    def keep_thousandths(self) -> int:
        """``keep`` as an exact number of thousandths."""
        return round(self.keep * 1000)

    def merge_count(self, layer: int, num_patches: int, depth: int) -> int:
        """``floor(P (1 - keep))``."""
        return pitome_merge_count(num_patches, self.keep_thousandths)

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
        """See :func:`pitome_plan`."""
        require_unpadded("PiToMe", valid)
        return pitome_plan(
            metric,
            self.merge_count(layer, metric.shape[-2] - num_prefix, depth),
            margin=_MARGIN - _MARGIN * layer / depth,
            protect=layer >= depth // 2,
            size=size,
            num_prefix=num_prefix,
        )


def pitome_merge_count(num_patches: int, keep_thousandths: int) -> int:
    """``floor(P (1 - q))`` in integers; floating point gets one in 500 wrong, such as P = 450, q = 0.54: 207."""
    return num_patches * (1000 - keep_thousandths) // 1000


def pitome_energy(features: Tensor, margin: float) -> Tensor:
    r"""How redundant a token is, high in a dense cluster.

    .. math:: E_i = \frac{1}{P} \sum_j \mathrm{ELU}(\cos(x_i, x_j) - m)

    Terms are rounded to multiples of a small unit, which makes their sum exact in any order; a NaN counts 0.

    Args:
        features: Of the patch tokens, ``[B, P, D]``, of any length.
        margin: ``m``.

    Returns:
        ``[B, P]``.
    """
    features, units = grid_features(features), kernels.energy_units(features.shape[1])
    over = grid_cosine(features, features).double().sub_(torch.tensor(margin, dtype=torch.float32, device="cpu"))
    terms = torch.where(over > 0, over, over.exp() - 1).mul_(units).round_()
    return terms.where(~terms.isnan(), 0.0).sum(dim=-1).float() * (1 / (units * features.shape[1]))


def pitome_plan(
    metric: Tensor, r: int, *, margin: float, protect: bool, size: Tensor | None = None, num_prefix: int = 1
) -> MergePlan | None:
    r"""Bipartite soft matching by energy.

    Tokens are ranked by energy, descending; A are the even ranks, B the odd ones; each a takes its best b by cosine.

    - ``protect=False``: all tokens take part, and the ``r`` most similar a merge. New order: prefix, unmerged A by
      descending similarity, B by rank.
    - ``protect=True``: the top ``2r`` take part, and every a merges. New order: prefix, the others by rank, B by rank.

    Weights are :math:`t_i = s_i / \sum s`.

    Args:
        metric: What is compared, ``[B, N, D]``, or ``[B, H, N, D]``: the mean over heads.
        r: Tokens to remove, at most half of the patch tokens.
        margin: See :func:`pitome_energy`.
        protect: Whether tokens of low energy are protected.
        size: Original patches each token stands for, ``[B, N]``; all 1 if not given.
        num_prefix: Leading tokens that never merge.

    Returns:
        The plan, or ``None`` where ``r`` is 0.
    """
    num_patches = metric.shape[-2] - num_prefix
    if not 0 <= 2 * r <= num_patches:
        raise ValueError(f"r must lie between 0 and half of the {num_patches} patch tokens, got {r}.")
    if r == 0:
        return None
    patches = metric.detach()[..., num_prefix:, :]
    fused = kernels.use_kernels(patches)
    if fused:
        terms = kernels.split_features(heads_of(patches))
        energy = kernels.energy(terms, margin)
    else:
        patches = compared(patches)
        energy = pitome_energy(patches, margin)
    rank = descending(energy)  # shape: [B, P]
    taking_part = rank[:, : 2 * r] if protect else rank
    a, b = taking_part[:, ::2], taking_part[:, 1::2]
    if fused:
        best, partner = kernels.best_match(terms, rank, None, 0, a.shape[1], 1, b.shape[1], 2, False)
    else:
        features = grid_features(patches)
        best, partner = grid_cosine(_take(features, a), _take(features, b)).max(dim=-1)  # shape: [B, A]
    if protect:
        kept, source = rank[:, 2 * r :], a
    else:
        order = descending(best)
        kept, source = a.gather(1, order[:, r:]), a.gather(1, order[:, :r])
        partner = partner.gather(1, order[:, :r])
    return bipartite_plan(
        num_prefix + kept, num_prefix + source, num_prefix + b, partner, num_prefix=num_prefix, size=size
    )


def _take(features: Tensor, index: Tensor) -> Tensor:
    return features.gather(1, index.unsqueeze(-1).expand(*index.shape, features.shape[-1]))
