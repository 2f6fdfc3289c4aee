"""What MPM finds in images: the pair counts that its budget and its operating point depend on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nsr.tokens import host
from nsr.tokens.at_rest import at_rest
from nsr.tokens.mpm import MPM
from nsr.tokens.plan import MergePlan
from nsr.tokens.vit import MergedViT


@torch.no_grad()
def count_pairs(backbone: nn.Module, images: Tensor, blocks: Sequence[int], batch: int = 32) -> list[list[int]]:
    """Mutual pairs of every image at every scheduled block, ``[images][blocks]``.

    Args:
        backbone: A plain timm ViT, used in evaluation mode.
        images: ``[images, C, H, W]``.
        blocks: MPM's schedule.
        batch: Images in one forward pass; padding within a batch never counts as a pair.
    """
    vit = MergedViT(backbone, MPM(tuple(blocks)))
    grid = host.grid_of(vit.backbone, images)
    counts: list[list[int]] = []
    with at_rest(backbone):
        for part in images.split(batch):
            found = {block: [0] * len(part) for block in blocks}

            def observe(block: int, _: Tensor, plan: MergePlan, found: dict[int, list[int]] = found) -> None:
                members, groups = (plan.weight > 0).sum(dim=1), (plan.counts() > 0).sum(dim=1)
                found[block] = (members - groups).tolist()

            state = vit.start(part)
            for block in range(vit.depth):
                state = vit.step(block, state, grid, observe)
            counts += [list(pairs) for pairs in zip(*(found[block] for block in blocks), strict=True)]
    return counts


def pair_counter(backbone: nn.Module, images: Tensor) -> Callable[[Sequence[int]], list[list[int]]]:
    """The callback of :func:`nsr.tokens.operating_point.mpm_point`: pair counts of a schedule on these images."""
    return lambda blocks: count_pairs(backbone, images, blocks)
