"""Table 1 of the paper and its ablations: train and judge segmenters, several side by side.

On one H200 the 25 runs of the VOC column, 100 epochs each, take seven minutes side by side; the generated shapes take
about a minute on a laptop. Expected on VOC (mIoU in per cent; in brackets the paper's): full ViT 61.9 (64.9); ToMe at
3.4x 16.5 (18.3), with NSR 48.9 (49.8); PiToMe at 3.4x 41.3 and 50.5 (43.7 and 54.0); MPM at 3.3x 48.6 and 50.8 (51.3
and 54.9).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nsr.data.segmentation.resident import ResidentSplit
from nsr.data.segmentation.split import Split
from nsr.experiments.merge_survey import cost, image_events, merged_share, survey
from nsr.experiments.segmentation_cells import SegmentationCell
from nsr.experiments.segmentation_model import VARIANTS, make_backbone, make_segmenter, shared_weights
from nsr.experiments.segmentation_task import FULL_POINT, SegmentationTask
from nsr.tokens import Segmenter
from nsr.tokens.mpm import MPM
from nsr.tokens.segmenter_file import load_segmenter, save_segmenter
from nsr.training.checkpoint import Keeper
from nsr.training.distributed import ALONE, Group
from nsr.training.segmentation import SegmentationProtocol, SegmentationTrainer, TrainingProgress, train
from nsr.training.segmentation_evaluation import centre_batches, evaluate
from nsr.training.segmentation_feed import EpochDraws, Feed, ResidentFeed, WorkerFeed, place
from nsr.training.segmentation_metrics import intersection_over_union, mean_iou, pixel_accuracy
from nsr.training.segmentation_stack import SegmenterStack
from nsr.training.whole_file import replacing

_SECONDS_BETWEEN_CHECKPOINTS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of one cell.

    Attributes:
        cell: Which.
        metrics: Its numbers, as fractions of one.
        seconds: Training, of all cells that were trained side by side, and its own evaluation.
        model: The trained model.
    """

    cell: SegmentationCell
    metrics: dict[str, Any]
    seconds: float
    model: Segmenter


class SegmentationLab:
    """What the runs of a task share: the splits on the device, and the weights that they start from.

    Args:
        task: The task.
        folder: Where the data is.
        outputs: Where trained weights and unfinished runs are kept.
        device: Where to train.
        workers: Processes that decode a split too large for the device.
        resume: Whether to go on with unfinished runs.
        compile_branches: Whether to train with compiled branches: once compiled, one kernel serves every merge event
            of every model of a variant, whatever its sizes.
        group: The processes that make each run together.
    """

    def __init__(
        self,
        task: SegmentationTask,
        folder: Path,
        outputs: Path,
        device: torch.device,
        *,
        workers: int = 4,
        resume: bool = True,
        compile_branches: bool = False,
        group: Group = ALONE,
    ) -> None:
        self.task, self.folder, self.device, self.workers, self.resume = task, folder, device, workers, resume
        self.compile_branches, self.group = compile_branches, group
        self.outputs = outputs / task.name
        self.shared = cache(lambda seed: shared_weights(task, seed, folder))

    @cached_property
    def training_split(self) -> Split:
        """The training split, not yet decoded."""
        return self.task.read(self.folder, "train")

    @cached_property
    def training_data(self) -> tuple[np.ndarray, ResidentSplit | None]:
        """The sizes of the training images, and the split on the device if it fits there."""
        return place(self.training_split, self.device)

    @cached_property
    def validation_data(self) -> ResidentSplit | Split:
        """The validation split, on the device if it fits there."""
        split = self.task.read(self.folder, "val")
        return place(split, self.device)[1] or split

    def config(self, cell: SegmentationCell, protocol: SegmentationProtocol) -> dict[str, Any]:
        """Everything that decides the outcome of a cell."""
        return {
            **asdict(protocol),
            **cell.as_dict(),
            "task": self.task.name,
            "rule": repr(self.task.rule(cell.merger, cell.point)),
            "shorter_side": self.task.shorter_side,
            "data": f"{self.training_split.name}, {len(self.training_split)} images",
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }

    def weights_of(self, cell: SegmentationCell) -> Path:
        """Where the trained weights of a cell are kept."""
        return self.outputs / f"{cell.name}.safetensors"

    def trained(self, cell: SegmentationCell) -> Segmenter:
        """The trained model of a cell, from its kept weights.

        Raises:
            ValueError: It was not trained here.
        """
        path = self.weights_of(cell)
        if not path.is_file():
            raise ValueError(
                f"There are no trained weights at {path}. Train them first: nsr run {self.task.name} "
                f"--merger {cell.merger} --point {cell.point} --variant {cell.variant} --seed {cell.seed}"
            )
        return load_segmenter(path, make_backbone(self.task, self.folder)).to(self.device)

    def trainer(self, cells: Sequence[SegmentationCell], protocol: SegmentationProtocol) -> SegmentationTrainer:
        """The models of cells that can be trained as one, with their data, at their start.

        An adapter starts from the trained full model.
        """
        capture = self.device.type == "cuda" and self.group.size == 1
        first = cells[0]
        weights = self.shared(first.seed)
        if first.variant == "adapter":
            weights = self.trained(SegmentationCell("none", FULL_POINT, "original", first.seed)).state_dict()
        rule = self.task.rule(first.merger, first.point)
        if capture and isinstance(rule, MPM):  # a captured step can read no length back
            rule = replace(rule, keep_length=True)
        models = [
            make_segmenter(self.task, rule, cell.variant, weights, cell.seed, self.folder).to(self.device)
            for cell in cells
        ]
        if self.compile_branches:
            for branch in (branch for model in models for branch in model.vit.branches.values()):
                branch.compile(dynamic=True)
        protocol = replace(protocol, seed=first.seed)
        bets = isinstance(rule, MPM) and rule.keep_length  # a stack cuts what has merged away
        model = SegmenterStack(models) if len(models) > 1 or bets else models[0]
        return SegmentationTrainer(model, self._feed(protocol), protocol, capture=capture, group=self.group)

    def run(
        self,
        cells: Sequence[SegmentationCell],
        protocol: SegmentationProtocol,
        watch: Callable[[TrainingProgress], None] | None = None,
        every: float = 1.0,
    ) -> Iterator[Outcome]:
        """Train cells side by side, then judge each by its final weights.

        Cells that differ in their variant alone are trained as one stack on a GPU.

        Args:
            cells: What to train; their seeds replace the protocol's.
            protocol: How.
            watch: Told where they stand.
            every: Seconds between two looks.

        Raises:
            ValueError: A model diverged; raised after the others have been judged.
        """
        begin = time.perf_counter()
        stacks = self.stacks(cells, protocol)
        trainers = [self.trainer(stack, protocol) for stack in stacks]
        before = {
            cell: self._before(cell, model, protocol)
            for stack, trainer in zip(stacks, trainers, strict=True)
            for cell, model in zip(stack, trainer.models, strict=True)
        }
        keepers = [self._keeper(stack, trainer) for stack, trainer in zip(stacks, trainers, strict=True)]
        self._train(trainers, keepers, watch, every)
        seconds = time.perf_counter() - begin
        diverged = []
        for stack, trainer, keeper in zip(stacks, trainers, keepers, strict=True):
            for cell, model, loss in zip(stack, trainer.models, trainer.mean_losses(), strict=True):
                if not isfinite(loss):
                    diverged.append(cell.name)
                    continue
                begin = time.perf_counter()
                at_rest = self._at_rest(cell, model)
                metrics = {**self._judge(cell, at_rest, protocol), **before[cell], "loss": loss}
                self._keep(cell, at_rest)
                judged = time.perf_counter() - begin
                yield Outcome(cell, metrics, keeper.earlier + seconds + judged, at_rest)
            keeper.finish()
        if diverged:
            raise ValueError(f"{self.task.name} {', '.join(diverged)}: the loss diverged. Try --precision fp32.")

    def stacks(self, cells: Sequence[SegmentationCell], protocol: SegmentationProtocol) -> list[list[SegmentationCell]]:
        """Cells that are trained as one: on a GPU those that share rule, data order and initial weights.

        A group of processes shares the batches of one model, and loss scaling is a model's own.
        """
        if self.device.type != "cuda" or self.group.size > 1 or protocol.precision == "fp16":
            return [[cell] for cell in cells]
        stacks: dict[tuple, list[SegmentationCell]] = {}
        for cell in cells:
            stacks.setdefault((cell.merger, cell.point, cell.seed, cell.variant == "adapter"), []).append(cell)
        return list(stacks.values())

    def _before(self, cell: SegmentationCell, model: Segmenter, protocol: SegmentationProtocol) -> dict[str, float]:
        """What is measured before an adapter is trained: NSR starts at zero, so this is compression alone."""
        if cell.variant != "adapter":
            return {}
        return {"miou_untrained": self._judge(cell, self._at_rest(cell, model), protocol)["miou"]}

    def _at_rest(self, cell: SegmentationCell, model: Segmenter) -> Segmenter:
        """A copy of the model, plain and with the cell's own rule: what trains may be compiled or of fixed length."""
        rule = self.task.rule(cell.merger, cell.point)
        weights = model.state_dict()
        return make_segmenter(self.task, rule, cell.variant, weights, cell.seed, self.folder).to(self.device)

    def _feed(self, protocol: SegmentationProtocol) -> Feed:
        sizes, resident = self.training_data
        task = self.task
        draws = EpochDraws(
            sizes, task.window, protocol.batch, protocol.seed, task.photometric, task.shorter_side, self.group
        )
        if resident is not None:
            return ResidentFeed(resident, draws)
        return WorkerFeed(self.training_split, draws, self.device, self.workers)

    def _train(
        self,
        trainers: Sequence[SegmentationTrainer],
        keepers: Sequence[Keeper],
        watch: Callable[[TrainingProgress], None] | None,
        every: float,
    ) -> None:
        """Train, with a checkpoint a minute, going on from one where it is of the same run."""
        for trainer, keeper in zip(trainers, keepers, strict=True):
            found = keeper.resume() if self.resume else None
            if found is not None:
                trainer.load_state(found.state, found.epoch)
        of = dict(zip(map(id, trainers), keepers, strict=True))

        def save(trainer: SegmentationTrainer) -> None:
            of[id(trainer)].keep(trainer.state, trainer.epoch)

        train(trainers, watch=watch, every=every, after_epoch=save)

    def _judge(self, cell: SegmentationCell, model: Segmenter, protocol: SegmentationProtocol) -> dict[str, Any]:
        data, window = self.validation_data, self.task.window
        confusion = evaluate(
            model,
            data,
            window,
            stride=self.task.stride,
            precision=protocol.precision,
            workers=self.workers,
            group=self.group,
        )
        rule = self.task.rule(cell.merger, cell.point)
        found = {}
        if isinstance(rule, MPM):  # its cost depends on the images
            batches = centre_batches(data, window, None, self.device, self.workers)
            found = survey(model.vit, (batch.image for batch in batches), protocol.precision)
        events = image_events(self.task.shape, rule, found)
        iou = intersection_over_union(confusion)
        return {
            "miou": mean_iou(confusion),
            "pixel_accuracy": pixel_accuracy(confusion),
            **cost(self.task.shape, events, VARIANTS[cell.variant]),
            "params": sum(p.numel() for p in model.parameters()),
            "class_iou": [None if value.isnan() else float(value) for value in iou],
            "merged_share": merged_share(self.task.shape, events),
        }

    def _keeper(self, cells: Sequence[SegmentationCell], trainer: SegmentationTrainer) -> Keeper:
        others = "".join(f"+{cell.variant}" for cell in cells[1:])
        path = self.outputs / f"{cells[0].name}{others}.unfinished.safetensors"
        config = {cell.name: self.config(cell, trainer.protocol) for cell in cells}
        return Keeper(path, config, _SECONDS_BETWEEN_CHECKPOINTS, self.group.writes)

    def _keep(self, cell: SegmentationCell, model: Segmenter) -> None:
        if self.group.writes:
            with replacing(self.weights_of(cell)) as partial:
                save_segmenter(model, partial)
