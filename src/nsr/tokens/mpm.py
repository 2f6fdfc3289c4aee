"""MPM: tokens that are each other's nearest neighbour merge into their mean."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nsr.kernels import tokens as kernels
from nsr.tokens.matching import leader_plan
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule, require_count, require_layers
from nsr.tokens.similarity import grid_cosine, grid_features


@dataclass(frozen=True)
class MPM(MergeRule):
    """Mutual-pair merging ahead of the scheduled blocks.

    Sizes play no part: pairs average with equal weights, so that twice merged is a mean of means, and attention is not
    weighed. How many pairs there are depends on the image.

    Args:
        blocks: Blocks ahead of which to merge, counted from 0, ascending.
        keep_length: Keep the length of the sequence, so that no value is read back from the device and launches can be
            captured; what merged away becomes padding that attention skips. The result is the same.
    """

    blocks: tuple[int, ...]
    keep_length: bool = field(default=False, kw_only=True, repr=False)
    proportional: bool = field(default=False, init=False)

    where: ClassVar[Literal["before_block"]] = "before_block"
    metric: ClassVar[Literal["tokens"]] = "tokens"

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        for block in self.blocks:
            require_count("Each of blocks", block, 0)
        if not self.blocks or list(self.blocks) != sorted(set(self.blocks)):
            raise ValueError(f"blocks must name at least one block, ascending and each once, got {self.blocks}.")

    def layers(self, depth: int) -> tuple[int, ...]:
        """The schedule."""
        require_layers("MPM", self.blocks, depth)
        return self.blocks

    def merge_count(self, layer: int, num_patches: int, depth: int) -> int | None:
        """Unknown where the rule acts, 0 elsewhere."""
        return None if layer in self.blocks else 0

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
        """See :func:`mpm_plan`."""
        if layer not in self.blocks:
            return None
        return mpm_plan(metric, num_prefix=num_prefix, valid=valid, keep_length=self.keep_length)


def mpm_plan(
    tokens: Tensor, *, num_prefix: int = 1, valid: Tensor | None = None, keep_length: bool = False
) -> MergePlan | None:
    r"""Merge mutual nearest neighbours.

    With :math:`b(i) = \arg\max_{j \neq i} \cos(x_i, x_j)`, tokens ``i`` and ``b(i)`` merge where ``b(b(i)) = i``. A
    pair takes the place of its first token, so the order is kept.

    Args:
        tokens: What is compared, ``[B, N, D]``.
        num_prefix: Leading tokens that never merge.
        valid: Which tokens are real, ``[B, N]``; all if not given.
        keep_length: Pad to the length of ``tokens`` rather than to the longest sample, which has to be read back.

    Returns:
        The plan, padded to the longest sample, or ``None`` where there are fewer than two patch tokens.
    """
    batch, length, _ = tokens.shape
    if length - num_prefix < 2:
        return None
    real = None if valid is None else valid[:, num_prefix:]
    nearest = nearest_other(tokens.detach()[:, num_prefix:], real)  # shape: [B, P]

    patch = torch.arange(length - num_prefix, device=tokens.device)
    mutual = (nearest.gather(1, nearest) == patch) & (nearest != patch)
    if real is not None:
        mutual = mutual & real & real.gather(1, nearest)
    leader = torch.where(mutual, torch.minimum(nearest, patch), patch)
    prefix = torch.arange(num_prefix, device=tokens.device).expand(batch, -1)
    return leader_plan(torch.cat([prefix, num_prefix + leader], dim=1), valid=valid, keep_length=keep_length)


def nearest_other(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """The token most similar to each, itself excepted: ``[B, P, D] -> [B, P]``, int64.

    Args:
        tokens: What is compared.
        valid: Which may be chosen, ``[B, P]``; all if not given.
    """
    count = tokens.shape[1]
    if kernels.use_kernels(tokens):
        terms = kernels.split_features(tokens.unsqueeze(1))
        return kernels.best_match(terms, None, valid, 0, count, 0, count, 1, True)[1]
    features = grid_features(tokens)
    similarity = grid_cosine(features, features)  # shape: [B, P, P]
    similarity.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    if valid is not None:
        similarity.masked_fill_(~valid.unsqueeze(1), -torch.inf)
    return similarity.argmax(dim=-1)
