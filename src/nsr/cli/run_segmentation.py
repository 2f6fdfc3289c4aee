"""The segmentation half of ``nsr run``: one command a data set, the ablations, and what trained models are asked."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsr.cli.device import chosen_device
from nsr.cli.option_groups import with_groups
from nsr.cli.selection import integers, names
from nsr.cli.spoken import duration

if TYPE_CHECKING:
    from nsr.experiments.segmentation import SegmentationLab
    from nsr.experiments.segmentation_task import SegmentationTask
    from nsr.training.segmentation import TrainingProgress

Mergers = Annotated[str, typer.Option(help="Mergers by commas: none,tome,pitome,mpm. Default: all.")]
Points = Annotated[str, typer.Option(help="Operating points by commas, such as 1.8x,3.4x. Default: all.")]
Variants = Annotated[
    str, typer.Option(help="Variants by commas: original,nsr,feature,spatial,post-merge,raw-source,adapter.")
]
Seeds = Annotated[str, typer.Option(help="Seeds by commas, such as 0,1,2.")]
TaskName = Annotated[str, typer.Option("--task", help="voc, ade20k, cityscapes, or shapes (generated).")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training images. Default: the paper's.")]
BatchSize = Annotated[int | None, typer.Option("--batch", help="Images in a step.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Initial learning rate.")]
Warmup = Annotated[int | None, typer.Option(help="Steps of linear warm-up.")]
PrecisionName = Annotated[str | None, typer.Option("--precision", help="bf16, fp16 or fp32. Default: bf16 on a GPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … Default: a GPU if there is one.")]
Results = Annotated[Path, typer.Option(help="Where results go, one JSON a run.")]
Outputs = Annotated[Path, typer.Option(help="Where trained weights and unfinished runs are kept.")]
TensorBoard = Annotated[
    Path | None, typer.Option(file_okay=False, help="Draw curves for TensorBoard here, one folder a run. Default: off.")
]
Data = Annotated[Path | None, typer.Option(help="Where the data is. Default: $NSR_DATA or the user's cache folder.")]
Together = Annotated[
    int | None,
    typer.Option("--concurrent", min=1, help="Models trained side by side. Default: the variants of a point on a GPU."),
]
Workers = Annotated[int, typer.Option(min=0, help="Processes that decode images where these do not fit the device.")]
Force = Annotated[bool, typer.Option("--force", help="Run again what has a result.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="The same weights to the bit, run after run.")]
WithNumerics = Annotated[bool, typer.Option("--numerics", help="Measure the residuals of the NSR models too.")]
Compile = Annotated[bool, typer.Option("--compile", help="Train with compiled branches: pays off over several runs.")]
Schedule = Annotated[str, typer.Option(help="MPM's schedules: the paper's, or those of our own search (search).")]
Search = Annotated[bool, typer.Option(help="Search MPM's schedules too, on training images.")]

_RESULTS, _OUTPUTS = Path("results"), Path("outputs")
_MERGERS = "tome,pitome,mpm"


@dataclass(frozen=True)
class Place:
    """Where the models of a command are, what they see, and what they leave."""

    device: Device = None
    results: Results = _RESULTS
    outputs: Outputs = _OUTPUTS
    data: Data = None
    workers: Workers = 4
    force: Force = False


@dataclass(frozen=True)
class Training:
    """How models are trained, but for what each command has defaults of its own."""

    batch: BatchSize = None
    precision: PrecisionName = None
    concurrent: Together = None
    deterministic: Deterministic = False
    compile_branches: Compile = False
    tensorboard: TensorBoard = None


def add_segmentation(app: typer.Typer) -> None:
    """Add the segmentation experiments to ``nsr run``."""
    about = "merged ViTs on {}, with NSR and without: mIoU of the final weights."
    for task, title in {
        "voc": "Pascal VOC 2012",
        "ade20k": "ADE20K",
        "cityscapes": "Cityscapes",
        "shapes": "generated textured shapes (about a minute on a laptop)",
    }.items():
        app.command(task, help=f"Train {about.format(title)}")(with_groups(_table_of(task)))
    for command in (token_ablation, adapter, numerics, operating_points):
        app.command(command.__name__.replace("_", "-"))(with_groups(command))


def _table_of(task: str) -> Callable[..., None]:
    def table(
        merger: Mergers = "",
        point: Points = "",
        variant: Variants = "original,nsr",
        seed: Seeds = "0",
        epochs: Epochs = None,
        lr: Rate = None,
        warmup: Warmup = None,
        with_numerics: WithNumerics = False,
        schedule: Schedule = "paper",
        *,
        training: Training,
        place: Place,
    ) -> None:
        lab = _lab(task, place, training)
        lab.task = _scheduled(lab.task, schedule, place.results)
        changes = {"epochs": epochs, "lr": lr, "warmup": warmup}
        _train(lab, (merger, point, variant, seed), changes, training, place, with_numerics)

    return table


def token_ablation(
    task: TaskName = "voc",
    merger: Mergers = _MERGERS,
    point: Points = "",
    variant: Variants = "post-merge,feature,spatial,raw-source",
    seed: Seeds = "0",
    epochs: Epochs = None,
    *,
    training: Training,
    place: Place,
) -> None:
    """Train the controls: post-merge-only, feature path, spatial path, raw source; results beside the main table's."""
    lab = _lab(task, place, training)
    _train(lab, (merger, point, variant, seed), {"epochs": epochs}, training, place)


def adapter(
    task: TaskName = "voc",
    merger: Mergers = "tome",
    point: Points = "",
    seed: Seeds = "0",
    epochs: Epochs = 10,
    lr: Rate = 1e-3,
    *,
    training: Training,
    place: Place,
) -> None:
    """Compress a trained full model and train only NSR and the head, on its frozen backbone.

    The full model comes from `nsr run voc --merger none`, with its weights in `--outputs`.
    """
    lab = _lab(task, place, training)
    _train(lab, (merger, point, "adapter", seed), {"epochs": epochs, "lr": lr}, training, place)


def numerics(
    task: TaskName = "voc", merger: Mergers = _MERGERS, point: Points = "", seed: Seeds = "0", *, place: Place
) -> None:
    """Measure null violation and residual magnitude at every merge of trained NSR models, from their kept weights."""
    from nsr.experiments.segmentation_cells import select_cells
    from nsr.experiments.segmentation_runs import run_numerics

    lab = _lab(task, place)
    cells = select_cells(lab.task, names(merger), names(point), ["nsr"], integers("--seed", seed))
    run_numerics(lab, cells, place.results, force=place.force, say=typer.echo)


def operating_points(
    task: TaskName = "voc", merger: Mergers = _MERGERS, point: Points = "", search: Search = True, *, place: Place
) -> None:
    """Find each merger's setting at each operating point, its cost, and the share of tokens each block merges."""
    from nsr.experiments.segmentation_runs import run_points

    lab = _lab(task, place)
    run_points(lab, names(merger), names(point), place.results, search=search, force=place.force, say=typer.echo)


def _lab(task: str, place: Place, training: Training = Training()) -> "SegmentationLab":
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    from nsr.data.folder import data_folder
    from nsr.experiments.segmentation import SegmentationLab
    from nsr.experiments.segmentation_task import TASKS
    from nsr.training.distributed import join

    if task not in TASKS:
        raise ValueError(f"Unknown task {task!r}; expected {', '.join(TASKS)}.")
    chosen = chosen_device(place.device)
    torch.use_deterministic_algorithms(training.deterministic)
    group = join(chosen)
    return SegmentationLab(
        TASKS[task],
        place.data or data_folder(),
        place.outputs,
        group.device,
        workers=place.workers,
        resume=not place.force,
        compile_branches=training.compile_branches,
        group=group,
    )


def _scheduled(task: "SegmentationTask", schedule: str, results: Path) -> "SegmentationTask":
    from nsr.experiments.segmentation_points import with_found_schedules

    if schedule not in ("paper", "search"):
        raise ValueError(f"--schedule is {schedule!r}; expected paper or search.")
    return with_found_schedules(task, results) if schedule == "search" else task


def _train(
    lab: "SegmentationLab",
    selectors: tuple[str, str, str, str],
    changes: dict[str, Any],
    training: Training,
    place: Place,
    with_numerics: bool = False,
) -> None:
    """Train the cells that mergers, points, variants and seeds name, with changes to the task's own protocol."""
    from nsr.experiments.segmentation_cells import select_cells
    from nsr.experiments.segmentation_runs import run_table

    merger, point, variant, seed = selectors
    cells = select_cells(lab.task, names(merger), names(point), names(variant), integers("--seed", seed))
    precision = training.precision or ("bf16" if lab.device.type == "cuda" else "fp32")
    changes = changes | {"batch": training.batch, "precision": precision}
    protocol = replace(lab.task.protocol, **{name: value for name, value in changes.items() if value is not None})
    terminal = sys.stderr.isatty()
    run_table(
        lab,
        cells,
        protocol,
        place.results,
        together=training.concurrent,
        force=place.force,
        with_numerics=with_numerics,
        say=typer.echo if lab.group.writes else lambda _: None,
        watch=lambda progress: _show(progress, terminal) if lab.group.writes else None,
        every=1.0 if terminal else 15.0,
        tensorboard=training.tensorboard,
    )


def _show(progress: "TrainingProgress", terminal: bool) -> None:
    losses = " ".join(f"{loss:.3f}" for loss in progress.losses)
    line = f"  epoch {progress.epoch}/{progress.epochs}, loss {losses}, {duration(progress.remaining)} left"
    ends = progress.epoch == progress.epochs
    typer.echo(f"\r{line:<78}" if terminal else line, err=True, nl=not terminal or ends)
