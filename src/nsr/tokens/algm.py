"""ALGM: first similar 2 x 2 windows merge, later similar tokens anywhere; a threshold decides how many."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from nsr.tokens.matching import alternate, cosine, descending, leader_plan, unit
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule, require_count, require_layers


@dataclass(frozen=True)
class ALGM(MergeRule):
    """Adaptive local-then-global merging, by the similarity of the tokens themselves.

    How many tokens go depends on the image, and on that image alone unless ``batch_reduce`` says otherwise.

    Args:
        threshold: Cosine from which tokens merge; 0.9 suits a Tiny model.
        local_layer: Block, counted from 0, in which windows merge. No rule may have merged before it.
        global_layer: Block in which tokens merge across the image.
        batch_reduce: ``"min"``: every sample merges as many windows or tokens as the sample of the batch with the
            fewest, the most similar first, as published. ``None``: each merges its own.
        proportional: Weigh keys by their size in attention.
    """

    threshold: float = 0.9
    local_layer: int = 0
    global_layer: int = 4
    batch_reduce: Literal["min"] | None = None
    proportional: bool = True

    where: ClassVar[Literal["after_attention"]] = "after_attention"
    metric: ClassVar[Literal["tokens"]] = "tokens"

    def __post_init__(self) -> None:
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold is a cosine, between -1 and 1, got {self.threshold!r}.")
        require_count("local_layer", self.local_layer, 0)
        require_count("global_layer", self.global_layer, 0)
        if self.local_layer >= self.global_layer:
            raise ValueError(
                f"Windows merge first: local_layer must be below global_layer, got {self.local_layer} and "
                f"{self.global_layer}."
            )
        if self.batch_reduce not in (None, "min"):
            raise ValueError(f"batch_reduce is {self.batch_reduce!r}; expected None or 'min'.")

    def layers(self, depth: int) -> tuple[int, ...]:
        """The two stages."""
        layers = (self.local_layer, self.global_layer)
        require_layers("ALGM", layers, depth)
        return layers

    def merge_count(self, layer: int, num_patches: int, depth: int) -> int | None:
        """Unknown where the rule acts, 0 elsewhere."""
        return None if layer in (self.local_layer, self.global_layer) else 0

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
        """See :func:`algm_local_plan` and :func:`algm_global_plan`."""
        reduce = self.batch_reduce == "min"
        if layer == self.local_layer:
            if valid is not None:
                raise ValueError("ALGM merges windows of the unmerged grid, which has no padding; got a mask.")
            return algm_local_plan(metric, grid, self.threshold, batch_min=reduce, size=size, num_prefix=num_prefix)
        if layer == self.global_layer:
            return algm_global_plan(
                metric, self.threshold, batch_min=reduce, size=size, num_prefix=num_prefix, valid=valid
            )
        return None


def algm_local_plan(
    tokens: Tensor,
    grid: tuple[int, int] | None,
    threshold: float,
    *,
    batch_min: bool = False,
    size: Tensor | None = None,
    num_prefix: int = 1,
) -> MergePlan | None:
    """Merge the 2 x 2 windows whose mean cosine between different tokens reaches ``threshold``.

    A window takes the place of its first token, so raster order is kept. A last odd row or column stays as it is.

    Args:
        tokens: What is compared, ``[B, N, D]``.
        grid: Rows and columns of the patches.
        threshold: Least similarity of a window.
        batch_min: Merge as many windows everywhere as the sample with the fewest has.
        size: Original patches each token stands for, ``[B, N]``; all 1 if not given.
        num_prefix: Leading tokens that never merge.

    Returns:
        The plan, padded to the longest sample, or ``None`` where the grid holds no window.
    """
    batch, length, _ = tokens.shape
    if grid is None or grid[0] * grid[1] != length - num_prefix:
        given = "no grid" if grid is None else f"a grid of {grid[0]} x {grid[1]}"
        raise ValueError(
            f"ALGM merges windows of the patch grid: got {given} for {length - num_prefix} patch tokens. Give rows and "
            "columns whose product is their number."
        )
    rows, columns = grid[0] // 2, grid[1] // 2
    if rows * columns == 0:
        return None
    position = torch.arange(length, device=tokens.device)
    raster = position[num_prefix:].view(grid)[: 2 * rows, : 2 * columns]
    window = raster.reshape(rows, 2, columns, 2).transpose(1, 2).reshape(-1, 4)  # shape: [W, 4]
    features = unit(tokens.detach())[:, window]  # shape: [B, W, 4, D]
    similarity = cosine(features, features)  # shape: [B, W, 4, 4]
    mean = (similarity.sum(dim=(-2, -1)) - similarity.diagonal(dim1=-2, dim2=-1).sum(-1)) / 12  # shape: [B, W]
    merges = _choose(mean, mean >= threshold, batch_min)

    first = window[:, :1].expand(-1, 4)
    joins = torch.where(merges.unsqueeze(-1), first, window).flatten(1)  # shape: [B, 4W]
    leader = position.repeat(batch, 1).scatter(1, window.flatten().expand(batch, -1), joins)
    return leader_plan(leader, size=size)


def algm_global_plan(
    tokens: Tensor,
    threshold: float,
    *,
    batch_min: bool = False,
    size: Tensor | None = None,
    num_prefix: int = 1,
    valid: Tensor | None = None,
) -> MergePlan | None:
    """Bipartite matching by position, as in ToMe, of all pairs whose cosine reaches ``threshold``.

    Each token at an even position takes its best partner at an odd one and merges into it if they are similar enough.
    New order: prefix, unmerged even positions, odd positions, padding.

    Args:
        tokens: What is compared, ``[B, N, D]``.
        threshold: Least similarity of a pair.
        batch_min: Merge as many tokens everywhere as the sample with the fewest.
        size: Original patches each token stands for, ``[B, N]``; all 1 if not given.
        num_prefix: Leading tokens that never merge.
        valid: Which tokens are real, ``[B, N]``; all if not given. Padding is at the end.

    Returns:
        The plan, padded to the longest sample, or ``None`` where there are fewer than two patch tokens.
    """
    batch, length, _ = tokens.shape
    if length - num_prefix < 2:
        return None
    at_a, at_b = alternate(length, num_prefix, tokens.device)
    features = unit(tokens.detach())
    similarity = cosine(features[:, at_a], features[:, at_b])
    if valid is not None:
        similarity.masked_fill_(~valid[:, at_b].unsqueeze(1), -torch.inf)
    best, partner = similarity.max(dim=-1)  # shape: [B, A]
    merges = best >= threshold
    if valid is not None:
        merges = merges & valid[:, at_a]
    merges = _choose(best, merges, batch_min)

    position = torch.arange(length, device=tokens.device)
    joins = torch.where(merges, at_b[partner], at_a)
    leader = position.repeat(batch, 1).scatter(1, at_a.expand(batch, -1), joins)
    late = torch.zeros_like(position, dtype=torch.bool).scatter(0, at_b, True)
    return leader_plan(leader, size=size, valid=valid, late=late)


def _choose(score: Tensor, reached: Tensor, batch_min: bool) -> Tensor:
    """Which candidates merge, ``[B, K]``: all that reached the threshold, or equally many of the best a sample."""
    if not batch_min:
        return reached
    fewest = reached.sum(dim=1).min()
    chosen = (torch.arange(score.shape[1], device=score.device) < fewest).expand_as(reached)
    best_first = descending(torch.where(reached, score, -torch.inf))
    return torch.zeros_like(reached).scatter(1, best_first, chosen)
