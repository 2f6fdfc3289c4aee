"""Appendix F of the paper: the setting of each merger at each operating point, and where tokens merge.

ToMe's and PiToMe's settings follow from shapes alone. MPM's schedules are searched for on training images, coarsely on
32 and then on 200; the paper's own schedules are measured on the same 200 beside them. Expected on VOC: 1.79, 2.48,
2.98 and 3.42 times fewer FLOPs for the paper's four schedules, with ImageNet's weights (paper: 1.80, 2.49, 3.00, 3.44).
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from nsr.experiments import record
from nsr.experiments.merge_survey import cost, image_events, merged_share, survey
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_model import make_backbone
from nsr.experiments.segmentation_task import SegmentationTask
from nsr.tokens import MPM, MergedViT, PiToMe, ToMe
from nsr.tokens.operating_point import mpm_point
from nsr.tokens.pairs import pair_counter
from nsr.training.segmentation_evaluation import centre_batches

COARSE, FINE = 32, 200  # images
EXPERIMENT = "operating-points"


def point_cell(task: SegmentationTask, merger: str, point: str) -> dict[str, Any]:
    """An operating point, as it stands in a result."""
    return {"dataset": task.name, "merger": merger, "point": point}


def point_config(task: SegmentationTask, search: bool) -> dict[str, Any]:
    """What the operating points depend on."""
    return {"shape": asdict(task.shape), "coarse_images": COARSE, "fine_images": FINE, "search": search}


def operating_point(lab: SegmentationLab, merger: str, point: str, search: bool = True) -> dict[str, Any]:
    """The control, its cost and the share of the initial tokens that each block merges.

    For MPM, ``search`` is the reduction of the paper's schedule measured on training images with pretrained weights;
    where a search is asked for, ``blocks_found`` and ``search_found`` are the schedule that ours prefers.
    """
    task = lab.task
    rule = task.rule(merger, point)
    assert rule is not None, "the model that merges nothing has no operating point"
    if isinstance(rule, MPM):
        return _mpm_point(lab, rule, task.mpm_targets[point], search)
    assert isinstance(rule, ToMe | PiToMe)
    events = image_events(task.shape, rule, {})
    control = {"r": rule.r} if isinstance(rule, ToMe) else {"keep": rule.keep}
    return {**control, **cost(task.shape, events, residual=None), "merged_share": merged_share(task.shape, events)}


def _mpm_point(lab: SegmentationLab, rule: MPM, target: float, search: bool) -> dict[str, Any]:
    shape, images = lab.task.shape, _training_images(lab)
    backbone = make_backbone(lab.task, lab.folder).to(lab.device)
    events = image_events(shape, rule, survey(MergedViT(backbone, rule), images.split(64)))
    measured = cost(shape, events, residual=None)
    result: dict[str, Any] = {
        "target": target,
        "blocks": list(rule.blocks),
        "search": measured.pop("achieved"),
        **measured,
        "merged_share": merged_share(shape, events),
    }
    if search:
        coarse = mpm_point(shape, target, pair_counter(backbone, images[:COARSE]))
        fine = mpm_point(shape, target, pair_counter(backbone, images), start=coarse.control)
        result |= {"blocks_found": list(fine.control), "search_found": fine.achieved}
    return result


def _training_images(lab: SegmentationLab) -> Tensor:
    """Centre crops of the first training images, ``[200, 3, H, W]``."""
    _, resident = lab.training_data
    batches = centre_batches(resident or lab.training_split, lab.task.window, FINE, lab.device, lab.workers)
    return next(iter(batches)).image


def with_found_schedules(task: SegmentationTask, results: Path) -> SegmentationTask:
    """The task with MPM at the schedules that our search found; its points are called ``1.8x-search`` and so on.

    Raises:
        ValueError: There has been no search.
    """
    schedules, targets = {}, {}
    for point, target in task.mpm_targets.items():
        path = record.path_of(results, EXPERIMENT, point_cell(task, "mpm", point))
        found = record.read(path).metrics.get("blocks_found") if path.is_file() else None
        if not found:
            raise ValueError(
                f"{path} holds no searched schedule. Search first: nsr run {EXPERIMENT} --task {task.name} --merger mpm"
            )
        schedules[f"{point}-search"], targets[f"{point}-search"] = tuple(found), target
    return replace(task, mpm=schedules, mpm_targets=targets)
