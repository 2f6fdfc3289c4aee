"""The segmentation experiments as runs that leave one result a cell: what exists is not run again."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nsr.experiments import record
from nsr.experiments.attempt import attempt, say_what_is_replaced
from nsr.experiments.curves import curves
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_cells import SegmentationCell
from nsr.experiments.segmentation_numerics import numerics
from nsr.experiments.segmentation_points import EXPERIMENT, operating_point, point_cell, point_config
from nsr.tokens import Segmenter
from nsr.training.segmentation import SegmentationProtocol, TrainingProgress
from nsr.training.tensorboard import Log

Say = Callable[[str], None]
Watch = Callable[[TrainingProgress], None]


def run_table(
    lab: SegmentationLab,
    cells: Sequence[SegmentationCell],
    protocol: SegmentationProtocol,
    results: Path,
    *,
    together: int | None = None,
    force: bool = False,
    with_numerics: bool = False,
    say: Say = print,
    watch: Watch | None = None,
    every: float = 1.0,
    tensorboard: Path | None = None,
) -> None:
    """Train and judge cells; each leaves ``results/<task>/<cell>.json`` as soon as it is known.

    Args:
        lab: What the runs share.
        cells: What to run.
        protocol: How to train; a cell's seed replaces the protocol's.
        results: Where results go.
        together: How many models are trained side by side; by default those of one stack.
        force: Whether to run again what has a result.
        with_numerics: Whether to measure the residuals of the NSR models too, while they are at hand.
        say: Told a line for each cell.
        watch: Told where the models stand.
        every: Seconds between two looks.
        tensorboard: Where curves go, one folder a cell, with a point at each look.
    """
    task = lab.task.name
    todo = []
    for cell in cells:
        if not force and record.exists(
            results, task, cell.as_dict(), lab.config(cell, replace(protocol, seed=cell.seed))
        ):
            say(f"{task} {cell.name}: there already")
        else:
            todo.append(cell)
    if not force:
        say_what_is_replaced(results, task, [cell.as_dict() for cell in todo], say)
        for cell in todo:
            if lab.weights_of(cell).is_file() and not record.has_result(results, task, cell.as_dict()):
                say(
                    f"{lab.weights_of(cell)} has the weights of a run whose result is not in {results}; they will be "
                    "replaced; --outputs takes another folder"
                )
    for group in _groups(lab.stacks(todo, protocol), together):
        say(f"{task} {', '.join(cell.name for cell in group)}: training for {protocol.epochs} epochs")
        planned = {cell: _planned(lab, cell, protocol, len(group)) for cell in group}
        drawn_to = tensorboard if lab.group.writes else None
        with (  # curves first: a missing package is no failure of the runs
            curves(drawn_to, task, [cell.as_dict() for cell in group]) as logs,
            attempt(results, list(planned.values()) if lab.group.writes else [], again=force),
        ):
            for outcome in lab.run(group, protocol, _drawn(watch, logs) if drawn_to else watch, every):
                if not lab.group.writes:
                    continue
                cell, seconds = outcome.cell, outcome.seconds
                record.write(results, replace(planned[cell], metrics=outcome.metrics, seconds=seconds))
                say(f"{task} {cell.name}: mIoU {100 * outcome.metrics['miou']:.2f} after {seconds:.1f} s")
                if with_numerics and cell.variant == "nsr":
                    _write_numerics(lab, results, cell, outcome.model, say)


def _groups(stacks: Sequence[Sequence[SegmentationCell]], together: int | None) -> Iterator[list[SegmentationCell]]:
    """Whole stacks side by side as long as they have at most ``together`` cells; a larger one is cut.

    By default a stack after another.
    """
    if together is None:
        yield from map(list, stacks)
        return
    group: list[SegmentationCell] = []
    for stack in stacks:
        for first in range(0, len(stack), together):
            part = stack[first : first + together]
            if len(group) + len(part) > together:
                yield group
                group = []
            group = [*group, *part]
    if group:
        yield group


def run_numerics(
    lab: SegmentationLab, cells: Sequence[SegmentationCell], results: Path, *, force: bool = False, say: Say = print
) -> None:
    """Measure the residuals of trained NSR models, from the weights that their training kept."""
    for cell in cells:
        where = _numerics_cell(lab, cell)
        if not force and record.exists(results, "numerics", where, _numerics_config(lab)):
            say(f"numerics {lab.task.name} {cell.name}: there already")
        else:
            _write_numerics(lab, results, cell, lab.trained(cell), say)


def run_points(
    lab: SegmentationLab,
    mergers: Sequence[str],
    points: Sequence[str],
    results: Path,
    *,
    search: bool = True,
    force: bool = False,
    say: Say = print,
) -> None:
    """The settings of the mergers at their operating points, and where they merge."""
    config = point_config(lab.task, search)
    for merger in mergers:
        for point in lab.task.points(merger):
            where = point_cell(lab.task, merger, point)
            if points and point not in points:
                continue
            if not force and record.exists(results, EXPERIMENT, where, config):
                say(f"{EXPERIMENT} {lab.task.name} {merger} {point}: there already")
                continue
            begin = time.perf_counter()
            metrics = operating_point(lab, merger, point, search)
            command = f"nsr run {EXPERIMENT} --task {lab.task.name} --merger {merger} --point {point}"
            _write(lab, results, EXPERIMENT, where, metrics, config, command, time.perf_counter() - begin)
            achieved = metrics.get("achieved", metrics.get("search"))
            say(f"{EXPERIMENT} {lab.task.name} {merger} {point}: {achieved:.3f} times fewer FLOPs")


def _drawn(watch: Watch | None, logs: Sequence[Log]) -> Watch:
    """Watch models that are trained side by side, and draw what is told of each."""

    def told(progress: TrainingProgress) -> None:
        if watch is not None:
            watch(progress)
        for log, loss in zip(logs, progress.losses, strict=True):
            log(progress.epoch, loss=loss)

    return told


def _write_numerics(lab: SegmentationLab, results: Path, cell: SegmentationCell, model: Segmenter, say: Say) -> None:
    begin = time.perf_counter()
    metrics = numerics(lab, model)
    command = f"nsr run numerics --task {lab.task.name} --merger {cell.merger} --point {cell.point} --seed {cell.seed}"
    seconds = time.perf_counter() - begin
    _write(lab, results, "numerics", _numerics_cell(lab, cell), metrics, _numerics_config(lab), command, seconds)
    say(
        f"numerics {lab.task.name} {cell.name}: null violation {metrics['null_violation']:.1e}, "
        f"residual share {metrics['residual_share']:.3f}"
    )


def _numerics_cell(lab: SegmentationLab, cell: SegmentationCell) -> dict[str, Any]:
    return {"dataset": lab.task.name, "merger": cell.merger, "point": cell.point, "seed": cell.seed}


def _numerics_config(lab: SegmentationLab) -> dict[str, Any]:
    return {"precision": "fp32", "split": "val", "shape": asdict(lab.task.shape)}


def _planned(
    lab: SegmentationLab, cell: SegmentationCell, protocol: SegmentationProtocol, together: int
) -> record.Record:
    """What a run will be recorded as, before anything is known of it."""
    config = lab.config(cell, replace(protocol, seed=cell.seed))
    command = f"nsr run {lab.task.name} {_cell_options(cell)}{_protocol_options(protocol, lab.task.protocol)}"
    environment = {**record.environment(lab.device), "trained_together": together, "processes": lab.group.size}
    return record.Record(lab.task.name, cell.as_dict(), {}, config, command, 0.0, environment)


def _write(
    lab: SegmentationLab,
    results: Path,
    experiment: str,
    cell: dict[str, Any],
    metrics: dict[str, Any],
    config: dict[str, Any],
    command: str,
    seconds: float,
) -> None:
    environment = {**record.environment(lab.device), "trained_together": 1}
    record.write(results, record.Record(experiment, cell, metrics, config, command, seconds, environment))


def _cell_options(cell: SegmentationCell) -> str:
    return " ".join(f"--{name} {value}" for name, value in cell.as_dict().items())


def _protocol_options(protocol: SegmentationProtocol, usual: SegmentationProtocol) -> str:
    """The options that differ from the task's own protocol."""
    given, default = asdict(protocol), asdict(usual)
    return "".join(
        f" --{name.replace('_', '-')} {value}"
        for name, value in given.items()
        if name != "seed" and value != default[name]
    )
