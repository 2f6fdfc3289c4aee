"""The segmentation tasks of the paper and a generated one: data, model size, evaluation, operating points."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nsr.data.segmentation import ade20k, cityscapes, shapes, voc
from nsr.data.segmentation.split import Split
from nsr.tokens import MPM, MergeRule, PiToMe, ToMe
from nsr.tokens.budget import ViTShape
from nsr.tokens.operating_point import pitome_point, tome_point
from nsr.training.segmentation import SegmentationProtocol

Part = Literal["train", "val"]
MERGERS = ("tome", "pitome", "mpm")
FULL_POINT = "1.0x"  # of the model that merges nothing
_TARGETS = ("1.8x", "2.5x", "3.4x", "3.8x")  # of ToMe and PiToMe on every data set


@dataclass(frozen=True)
class SegmentationTask:
    """What is trained on, how large the model is, and how it is judged.

    Attributes:
        name: Also the name of the experiment.
        shape: Grid, classes and widths; the crop is the grid times the patch.
        read: The split below a folder.
        mpm: MPM's insertion schedule at each of its operating points, by the paper's label.
        mpm_targets: What each of these schedules was searched for.
        stride: Step of the sliding window over whole validation images; ``None``: centre crops.
        shorter_side: Of an image at training scale 1; ``None``: its own.
        photometric: Whether training distorts colours.
        pretrained: Whether the backbone starts from DeiT-Tiny's weights.
        protocol: How to train.
    """

    name: str
    shape: ViTShape
    read: Callable[[Path, Part], Split]
    mpm: dict[str, tuple[int, ...]]
    mpm_targets: dict[str, float]
    stride: tuple[int, int] | None = None
    shorter_side: int | None = None
    photometric: bool = False
    pretrained: bool = True
    protocol: SegmentationProtocol = field(default_factory=SegmentationProtocol)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of what the model sees, in pixels."""
        return self.shape.grid[0] * self.shape.patch, self.shape.grid[1] * self.shape.patch

    def points(self, merger: str) -> tuple[str, ...]:
        """The labels of a merger's operating points in the paper."""
        if merger == "none":
            return (FULL_POINT,)
        if merger not in MERGERS:
            raise ValueError(f"Unknown merger {merger!r}; expected none, {', '.join(MERGERS)}.")
        return tuple(self.mpm) if merger == "mpm" else _TARGETS

    def rule(self, merger: str, point: str) -> MergeRule | None:
        """The merger at an operating point; ``None`` for the model that merges nothing."""
        if point not in self.points(merger):
            raise ValueError(
                f"{merger} has no point {point!r} on {self.name}; it has {', '.join(self.points(merger))}."
            )
        if merger == "none":
            return None
        if merger == "mpm":
            return MPM(self.mpm[point])
        target = float(point.removesuffix("x"))
        if merger == "tome":
            return ToMe(int(tome_point(self.shape, target).control))
        return PiToMe(float(pitome_point(self.shape, target).control))


_VOC_SCHEDULES = {
    "1.8x": (0, 4, 5, 9),
    "2.4x": (0, 1, 3, 5, 6, 10),
    "3.0x": (0, 1, 2, 4, 5, 6, 8, 9, 10, 11),
    "3.3x": tuple(range(12)),
}
_VOC_TARGETS = {"1.8x": 1.8, "2.4x": 2.5, "3.0x": 3.0, "3.3x": 3.8}

TASKS = {
    task.name: task
    for task in (
        SegmentationTask(
            "voc", ViTShape((14, 14), voc.NUM_CLASSES), voc.voc, _VOC_SCHEDULES, _VOC_TARGETS, shorter_side=224
        ),
        SegmentationTask(
            "ade20k",
            ViTShape((32, 32), ade20k.NUM_CLASSES),
            ade20k.ade20k,
            {
                "1.8x": (2, 4, 7, 9, 11),
                "2.4x": (0, 1, 4, 7, 9, 11),
                "3.2x": (0, 1, 2, 3, 4, 7, 8, 9, 10, 11),
                "3.4x": tuple(range(12)),
            },
            {"1.8x": 1.8, "2.4x": 2.5, "3.2x": 3.4, "3.4x": 3.8},
            shorter_side=512,
        ),
        SegmentationTask(
            "cityscapes",
            ViTShape((32, 64), cityscapes.NUM_CLASSES),
            cityscapes.cityscapes,
            {
                "1.8x": (0, 2),
                "2.6x": (1, 2, 3, 4, 5, 6, 10),
                "3.0x": (0, 1, 2, 4, 5, 6, 7, 10),
                "3.4x": tuple(range(12)),
            },
            {"1.8x": 1.8, "2.6x": 2.5, "3.0x": 3.0, "3.4x": 3.4},
            stride=(341, 682),
            photometric=True,
        ),
        # small enough for a laptop; from scratch, so with a larger learning rate. MPM's labels are nominal here.
        SegmentationTask(
            "shapes",
            ViTShape((8, 8), shapes.NUM_CLASSES, dim=64, heads=2, patch=8),
            lambda _, part: shapes.shapes(part),
            _VOC_SCHEDULES,
            _VOC_TARGETS,
            pretrained=False,
            protocol=SegmentationProtocol(epochs=20, batch=16, lr=1e-3),
        ),
    )
}
