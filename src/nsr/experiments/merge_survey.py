r"""What the merge events of a model do to real images.

For each event, with :math:`A` the realised merge and :math:`Z` what it makes invisible of the tokens :math:`X`:

.. math:: \epsilon_{null} = \|A Z\|_\infty, \qquad \rho_Z = \|Z\|_F / \|X\|_F
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsr.tokens import MergePlan, TokenResidual
from nsr.tokens.at_rest import at_rest
from nsr.tokens.budget import MergeEvent, ViTShape, backbone_flops, executed_flops, merge_events, nsr_flops
from nsr.tokens.host import grid_of
from nsr.tokens.mpm import MPM
from nsr.tokens.rule import MergeRule
from nsr.tokens.vit import MergedViT
from nsr.training.segmentation import Precision, autocast


@dataclass
class BlockSurvey:
    """One block's merge events over all images.

    Attributes:
        merged: Tokens that disappear, for each image.
        null_violation: The largest :math:`\\epsilon_{null}` of a batch.
        residual: Sum of squares of ``Z``.
        tokens: Sum of squares of ``X``.
    """

    merged: list[int] = field(default_factory=list)
    null_violation: float = 0.0
    residual: float = 0.0
    tokens: float = 0.0

    @property
    def residual_share(self) -> float:
        """:math:`\\rho_Z` over all images."""
        return (self.residual / self.tokens) ** 0.5


@torch.inference_mode()
def survey(vit: MergedViT, batches: Iterable[Tensor], precision: Precision = "fp32") -> dict[int, BlockSurvey]:
    """Watch every merge event while ``vit`` sees batches of images in evaluation mode; by block, counted from 0."""
    found: dict[int, BlockSurvey] = {}

    def observe(block: int, x: Tensor, plan: MergePlan) -> None:
        at = found.setdefault(block, BlockSurvey())
        real = plan.weight > 0
        x = torch.where(real.unsqueeze(-1), x.float(), 0.0)
        residual = torch.where(real.unsqueeze(-1), x - plan.unmerge(plan.merge(x)), 0.0)
        at.merged += (real.sum(1) - (plan.counts() > 0).sum(1)).tolist()
        at.null_violation = max(at.null_violation, float(plan.merge(residual).abs().max()))
        at.residual += float(residual.double().square().sum())
        at.tokens += float(x.double().square().sum())

    device = next(vit.parameters()).device
    with at_rest(vit), autocast(device, precision):
        for image in batches:
            grid = grid_of(vit.backbone, image)
            state = vit.start(image)
            for block in range(vit.depth):
                state = vit.step(block, state, grid, observe)
    return found


def image_events(shape: ViTShape, rule: MergeRule | None, found: dict[int, BlockSurvey]) -> list[list[MergeEvent]]:
    """The merge events that the budget counts: one list for all images, or for MPM one an image."""
    if rule is None:
        return [[]]
    if not isinstance(rule, MPM):
        return [merge_events(shape, rule)]
    # a block with no event at all, because one token was left, has merged nothing
    images = max((len(at.merged) for at in found.values()), default=0)
    counts = [found[block].merged if block in found else [0] * images for block in rule.blocks]
    return [merge_events(shape, rule, pairs) for pairs in zip(*counts, strict=True)]


def cost(shape: ViTShape, images: list[list[MergeEvent]], residual: TokenResidual | None) -> dict[str, float]:
    """GFLOPs in the paper's convention and as executed, and the achieved reduction; means over images."""
    full = backbone_flops(shape, [])
    base = sum(backbone_flops(shape, events) for events in images) / len(images)
    added = sum(nsr_flops(shape, events, residual) for events in images) / len(images) if residual else 0.0
    executed = sum(executed_flops(shape, events, residual) for events in images) / len(images)
    return {"gflops_paper": (base + added) / 1e9, "gflops_executed": executed / 1e9, "achieved": full / base}


def merged_share(shape: ViTShape, images: list[list[MergeEvent]]) -> list[float]:
    """``r_l / T_0``: the share of the initial patch tokens that each block merges, a mean over images."""
    share = [0.0] * shape.depth
    for events in images:
        for event in events:
            share[event.block] += event.merged / shape.patches / len(images)
    return share
