"""Appendix F of the paper: the setting of each merger at each operating point, and where tokens merge.

ToMe's and PiToMe's settings follow from shapes alone. MPM's schedules are searched for on training images, coarsely on
32 and then on 200; the paper's own schedules are measured on the same 200 beside them.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from nsr.data.segmentation.batch import Batch
from nsr.experiments.merge_survey import cost, image_events, merged_share, survey
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_model import make_backbone
from nsr.tokens import MPM, MergedViT, PiToMe, ToMe
from nsr.tokens.operating_point import mpm_point
from nsr.tokens.pairs import pair_counter
from nsr.training.segmentation_evaluation import centre_batches

COARSE, FINE = 32, 200  # images


def operating_point(lab: SegmentationLab, merger: str, point: str, search: bool = True) -> dict[str, Any]:
    """The control, its cost and the share of the initial tokens that each block merges.

    For MPM, ``search`` is the reduction of the paper's schedule measured on training images with pretrained weights;
    with ``search`` asked for, ``blocks_found`` and ``search_found`` are the schedule that our search prefers.
    """
    task = lab.task
    rule = task.rule(merger, point)
    assert rule is not None, "the model that merges nothing has no operating point"
    if not isinstance(rule, MPM):
        events = image_events(task.shape, rule, {})
        control = {"r": rule.r} if isinstance(rule, ToMe) else {"keep": rule.keep} if isinstance(rule, PiToMe) else {}
        return {**control, **cost(task.shape, events, nsr=False), "merged_share": merged_share(task.shape, events)}
    images = _training_images(lab, FINE)
    backbone = make_backbone(task, lab.folder).to(lab.device)
    labels = torch.zeros(0)
    found = survey(MergedViT(backbone, rule), (Batch(part, labels) for part in images.split(64)))
    events = image_events(task.shape, rule, found)
    measured = cost(task.shape, events, nsr=False)
    result: dict[str, Any] = {
        "blocks": list(rule.blocks),
        "search": measured.pop("achieved"),
        **measured,
        "merged_share": merged_share(task.shape, events),
    }
    if search:
        target = task.mpm_targets[point]
        coarse = mpm_point(task.shape, target, pair_counter(backbone, images[:COARSE]))
        fine = mpm_point(task.shape, target, pair_counter(backbone, images), start=coarse.control)
        result |= {"target": target, "blocks_found": list(fine.control), "search_found": fine.achieved}
    return result


def _training_images(lab: SegmentationLab, count: int) -> Tensor:
    """Centre crops of the first training images, ``[count, 3, H, W]``."""
    _, resident = lab.training_data
    batches = centre_batches(resident or lab.training_split, lab.task.window, count, lab.device, lab.workers)
    return next(iter(batches)).image


def point_config(lab: SegmentationLab) -> dict[str, Any]:
    """What the operating points depend on."""
    return {"shape": asdict(lab.task.shape), "coarse_images": COARSE, "fine_images": FINE}
