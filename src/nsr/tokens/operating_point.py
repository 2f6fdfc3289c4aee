"""Which setting of a merger reaches a wanted reduction of computation, ``F_full / F_merged ≈ target``.

ToMe and PiToMe cost what their settings say, so every setting is tried. MPM's cost depends on the images: its insertion
schedule is searched locally with a callback that measures the pairs found.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from nsr.tokens.budget import ViTShape, backbone_flops, merge_events
from nsr.tokens.mpm import MPM
from nsr.tokens.pitome import PiToMe
from nsr.tokens.rule import MergeRule
from nsr.tokens.tome import ToMe

Control = TypeVar("Control")
Schedule = tuple[int, ...]
CountPairs = Callable[[Schedule], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class OperatingPoint(Generic[Control]):
    """A merger's setting, the reduction it achieves, and its cost in the paper's convention."""

    control: Control
    achieved: float
    base: int


def tome_point(shape: ViTShape, target: float) -> OperatingPoint[int]:
    """The ``r`` in ``1 … N0 - 1`` whose reduction is nearest to ``target``; the smallest such."""
    return _nearest(shape, target, {r: ToMe(r) for r in range(1, max(2, shape.patches))})


def pitome_point(shape: ViTShape, target: float) -> OperatingPoint[float]:
    """The keep ratio in ``0.500, 0.501, … 0.999`` whose reduction is nearest to ``target``; the smallest such."""
    keeps = [thousandths / 1000 for thousandths in range(500, 1000)]
    return _nearest(shape, target, {keep: PiToMe(keep) for keep in keeps})


def _nearest(shape: ViTShape, target: float, rules: Mapping[Control, MergeRule]) -> OperatingPoint[Control]:
    _check_target(target)
    full = backbone_flops(shape, [])
    costs = {control: backbone_flops(shape, merge_events(shape, rule)) for control, rule in rules.items()}
    control = min(costs, key=lambda control: abs(full / costs[control] - target))  # the first of equals
    return OperatingPoint(control, full / costs[control], costs[control])


def mpm_point(
    shape: ViTShape, target: float, count_pairs: CountPairs, start: Schedule = ()
) -> OperatingPoint[Schedule]:
    """Local search over insertion schedules: add, remove or move one block while that comes nearer to ``target``.

    The paper searches coarsely on 32 images and refines on 200: two calls, the second starting from the first's result.

    Args:
        shape: The segmenter.
        target: Wanted ``F_full / F_merged``.
        count_pairs: For a schedule, the mutual pairs of every image at every scheduled block, ``[images][blocks]``.
            Cost is averaged over images, as pairs enter it quadratically. See :func:`nsr.tokens.pairs.pair_counter`.
        start: The schedule to start from; by default none at all.

    Returns:
        The best schedule of the last round. With every block in it, the target may be out of MPM's reach.
    """
    _check_target(target)
    full = backbone_flops(shape, [])

    def cost(schedule: Schedule) -> int:
        if not schedule:
            return full
        images = count_pairs(schedule)
        return round(
            sum(backbone_flops(shape, merge_events(shape, MPM(schedule), pairs)) for pairs in images) / len(images)
        )

    costs = {start: cost(start)}
    best = start
    while True:
        candidates = [best, *_neighbours(best, shape.depth)]
        for schedule in candidates:
            if schedule not in costs:
                costs[schedule] = cost(schedule)
        nearest = min(candidates, key=lambda schedule: abs(full / costs[schedule] - target))
        if nearest == best:
            return OperatingPoint(best, full / costs[best], costs[best])
        best = nearest


def _neighbours(schedule: Schedule, depth: int) -> list[Schedule]:
    """Every schedule one addition, removal or move away."""
    present = set(schedule)
    absent = [block for block in range(depth) if block not in present]
    added = [present | {new} for new in absent]
    removed = [present - {old} for old in schedule]
    moved = [present - {old} | {new} for old in schedule for new in absent]
    return [tuple(sorted(blocks)) for blocks in added + removed + moved]


def _check_target(target: float) -> None:
    if not target >= 1:
        raise ValueError(f"The target is how many times fewer FLOPs than the full model, at least 1; got {target}.")
