"""The cells of a segmentation experiment: which model, at which operating point, in which variant, with which seed."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from nsr.experiments.segmentation_model import VARIANTS
from nsr.experiments.segmentation_task import FULL_POINT, MERGERS, SegmentationTask

MAIN_VARIANTS = ("original", "nsr")
ABLATIONS = ("post-merge", "feature", "spatial", "raw-source")


@dataclass(frozen=True)
class SegmentationCell:
    """One number of the paper's tables."""

    merger: str
    point: str
    variant: str
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.merger}-{self.point}-{self.variant}-{self.seed}"

    def as_dict(self) -> dict[str, str | int]:
        """As it stands in a result."""
        return asdict(self)


def select_cells(
    task: SegmentationTask,
    mergers: Sequence[str] = (),
    points: Sequence[str] = (),
    variants: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
) -> list[SegmentationCell]:
    """Every cell that the selectors name, in their order, variant by variant; an empty selector names all.

    Of variants it names the main ones. The model that merges nothing has one point and is ``original`` alone.

    Raises:
        ValueError: A selector names what there is not, or nothing is left.
    """
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"Unknown variant {variant!r}; expected {', '.join(VARIANTS)}.")
    known = {point for merger in MERGERS for point in task.points(merger)} | {FULL_POINT}
    for point in points:
        if point not in known:
            raise ValueError(f"{task.name} has no point {point!r}; it has {', '.join(sorted(known))}.")
    cells = [
        SegmentationCell(merger, point, variant, seed)
        for seed in seeds
        for variant in variants or MAIN_VARIANTS
        for merger in mergers or ("none", *MERGERS)
        for point in task.points(merger)
        if (not points or point in points) and (merger != "none" or variant == "original")
    ]
    if not cells:
        raise ValueError(
            f"Nothing is selected on {task.name}: mergers {list(mergers)}, points {list(points)}, variants "
            f"{list(variants)} have no cell in common. MPM's points are {', '.join(task.mpm)}."
        )
    return cells
