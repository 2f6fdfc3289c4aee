"""DTEM: ToMe's matching on an embedding that was learned for it.

The embedding is fed with detached tokens, so it learns what to merge without disturbing the backbone's features. At
evaluation the matching is ToMe's. In training it is relaxed, which gives the embedding a gradient::

    cos(a_i, b_j) / τ ──┬── softmax over j ───────────── q_ij   where token i would go
                        └── logsumexp over j ── top-r ── e_i    whether it goes: r rounds of softmax, each taking
                                                                what it chose out of the next

Token ``i`` gives the share ``e_i q_ij`` of its size to token ``j`` and keeps the rest.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from nsr.tokens.matching import alternate, autocast_off, cosine, unit
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule, require_count, require_unpadded
from nsr.tokens.tome import tome_merge_count, tome_plan

# No token is ever chosen whole: its size, whose logarithm attention takes, stays positive.
_LEAST = 1e-6


@dataclass(frozen=True)
class DTEM(MergeRule):
    """Token merging by a learned, decoupled embedding.

    Args:
        r: Tokens removed in each block; ``min(r, P // 2)`` where ``P`` patch tokens are left.
        width: Features of the embedding.
        temperature: ``τ`` of the relaxed matching; towards 0 it becomes the hard one.
        proportional: Weigh keys by their size in attention.
    """

    r: int
    width: int = 64
    temperature: float = 0.1
    proportional: bool = True

    where: ClassVar[Literal["after_attention"]] = "after_attention"
    metric: ClassVar[Literal["learned"]] = "learned"

    def __post_init__(self) -> None:
        require_count("r", self.r, 0)
        require_count("width", self.width, 1)
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be a positive number, got {self.temperature!r}.")

    def merge_count(self, layer: int, num_patches: int, depth: int) -> int:
        """``min(r, P // 2)``."""
        return tome_merge_count(num_patches, self.r)

    def embedding(self, dim: int) -> "DecoupledEmbedding":
        """The layer that makes this rule's metric from ``norm1(x)``; each block has its own."""
        return DecoupledEmbedding(dim, self.width)

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
        """The hard matching, see :func:`~nsr.tokens.tome.tome_plan`."""
        require_unpadded("DTEM", valid)
        return tome_plan(metric, self.r, size=size, num_prefix=num_prefix)

    def soft_merge(self, plan: MergePlan, metric: Tensor, x: Tensor, size: Tensor, num_prefix: int = 1) -> "SoftMerge":
        """What training uses in place of ``plan.merge``, see :func:`dtem_soft_merge`."""
        return dtem_soft_merge(plan, metric, x, size, temperature=self.temperature, num_prefix=num_prefix)


class DecoupledEmbedding(nn.Module):
    """An affine map of detached tokens: what it learns never reaches the backbone.

    Shapes:
        ``[B, N, D] -> [B, N, width]``.
    """

    def __init__(self, dim: int, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, width)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Embed ``norm1(x)``."""
        return self.linear(x.detach())


class SoftMerge(NamedTuple):
    """Tokens ``[B, G, D]`` and sizes ``[B, G]`` after a relaxed merge."""

    tokens: Tensor
    size: Tensor


def dtem_soft_merge(
    plan: MergePlan, metric: Tensor, x: Tensor, size: Tensor, *, temperature: float, num_prefix: int = 1
) -> SoftMerge:
    r"""Merge with shares that are differentiable in ``metric``.

    With :math:`T_{ij}` the share of token ``i`` in A that moves to token ``j`` in B,

    .. math:: s'_j = s_j + \sum_i T_{ij} s_i, \qquad x'_j = \frac{s_j x_j + \sum_i T_{ij} s_i x_i}{s'_j},
              \qquad s'_i = \Big(1 - \sum_j T_{ij}\Big) s_i.

    :math:`T_{ij} = e_i q_{ij}` for tokens that stay. The tokens that the hard matching merges leave the sequence as
    they do at evaluation; what the relaxation would have left of them goes where the hard matching puts it. So shapes,
    order and total size are those of evaluation, and as ``temperature`` goes to 0 so are the values.

    Args:
        plan: The hard plan of ``metric``, from :func:`~nsr.tokens.tome.tome_plan`.
        metric: The learned embedding, ``[B, N, E]``.
        x: Tokens, ``[B, N, D]``.
        size: Their sizes, ``[B, N]``.
        temperature: ``τ``.
        num_prefix: Leading tokens that never merge.
    """
    length = metric.shape[1]
    at_a, at_b = alternate(length, num_prefix, metric.device)
    first_b = plan.num_groups - at_b.shape[0]  # B comes last, in order
    group_a = plan.group[:, at_a]
    with autocast_off(x):
        wide, mass = x.float(), size.float().unsqueeze(-1)
        features = unit(metric)
        logits = cosine(features[:, at_a], features[:, at_b]) / temperature  # shape: [B, A, B]
        goes = soft_top_r(logits.logsumexp(dim=-1), length - plan.num_groups, temperature)  # shape: [B, A]
        share = goes.unsqueeze(-1) * logits.softmax(dim=-1)
        leaves = group_a >= first_b  # shape: [B, A]
        rest = torch.where(leaves, 1 - goes, 0.0).unsqueeze(-1)
        share = share.scatter_add(2, (group_a - first_b).clamp(min=0).unsqueeze(-1), rest)

        size_a, size_b = mass[:, at_a], mass[:, at_b]
        new_size_b = size_b + share.mT @ size_a
        new_b = (size_b * wide[:, at_b] + share.mT @ (size_a * wide[:, at_a])) / new_size_b
        # the tokens of A that stay, ascending
        stays = leaves.long().sort(dim=1, stable=True).indices[:, : first_b - num_prefix].unsqueeze(-1)
        kept = wide[:, at_a].gather(1, stays.expand(-1, -1, x.shape[-1]))
        kept_size = (size_a * (1 - goes).unsqueeze(-1)).gather(1, stays)
        tokens = torch.cat([wide[:, :num_prefix], kept, new_b], dim=1)
        sizes = torch.cat([mass[:, :num_prefix], kept_size, new_size_b], dim=1)
    return SoftMerge(tokens.to(x.dtype), sizes.squeeze(-1))


def soft_top_r(logits: Tensor, r: int, temperature: float) -> Tensor:
    r"""A continuous choice of ``r`` of ``n``: ``[B, n] -> [B, n]`` in [0, 1], summing to about ``r``.

    ``r`` rounds of softmax; what one round chose is lowered for the next:

    .. math:: w^t = \mathrm{softmax}(l^t), \qquad l^{t+1} = l^t + \log(1 - w^t) / \tau, \qquad e = \sum_t w^t.

    A joint softmax over pairs ``(i, j)`` factorises into this one over rows and one within each row, because only
    whole rows are lowered.
    """
    chosen = torch.zeros_like(logits)
    for _ in range(r):
        weight = logits.softmax(dim=-1)
        chosen = chosen + weight
        # short of 1, where the logarithm and its slope end
        logits = logits + torch.log1p(-weight.clamp(max=1 - _LEAST)) / temperature
    return chosen.clamp(max=1 - _LEAST)
