"""``nsr sweep``: the runs of an experiment, many at a time, on this machine or over a Ray cluster."""

import inspect
import itertools
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsr.cli.selection import integers, names

if TYPE_CHECKING:
    from nsr.experiments.sweep import Engine, Task

# The options of each graph experiment that name its cells; segmentation has merger, point, variant and seed.
_CELLS = {
    "tree": ("depth", "backbone", "variant", "seed"),
    "heterophily": ("dataset", "backbone", "variant", "split"),
    "zinc": ("backbone", "variant", "seed"),
}
_SEGMENTATION = ("voc", "ade20k", "cityscapes", "shapes")
_SPLITS = "0-9"  # the official ones
_NUMBERS = ("depth", "seed", "split")
_HELP = f"Which: {', '.join((*_CELLS, *_SEGMENTATION))}. Further options are those of nsr run."

EngineName = Annotated[str, typer.Option("--engine", help="local, or ray (needs the extra cluster).")]
Workers = Annotated[int | None, typer.Option(min=1, help="Runs at a time. Default: cores, or GPUs by their share.")]
GpuShare = Annotated[float, typer.Option(min=0, max=1, help="Share of a GPU that a run takes; 0: none.")]
Retries = Annotated[int, typer.Option(min=0, help="How often a run whose process was lost starts again.")]
Address = Annotated[str | None, typer.Option(help="Ray: the cluster's address. Default: one on this machine.")]
Results = Annotated[Path, typer.Option(help="Where results go, one JSON a run.")]
Outputs = Annotated[Path, typer.Option(help="Where unfinished runs and logs are kept.")]


def sweep(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help=_HELP)],
    engine: EngineName = "local",
    workers: Workers = None,
    gpu_share: GpuShare = 0.0,
    retries: Retries = 2,
    address: Address = None,
    results: Results = Path("results"),
    outputs: Outputs = Path("outputs"),
) -> None:
    """Make many runs, each in a process of its own; what has a result is not made again.

    `nsr sweep tree --depth 2,3,4 --seed 0-9 --epochs 1000 --workers 4` makes the runs that `nsr run tree` would make
    one after the other. Options of the experiment are passed on; those that name cells are dealt out, one cell a run.
    With `--gpu-share` cells that a GPU trains as one model stay one run: seeds, splits, or the variants of a segmenter.
    """
    from nsr.experiments.sweep import run_sweep

    results, outputs = results.resolve(), outputs.resolve()  # runs may start elsewhere
    folders = ["--results", str(results), "--outputs", str(outputs)]
    tasks = sweep_tasks(experiment, context.args, folders, as_one=gpu_share > 0)
    logs = outputs / "sweep"
    logs.mkdir(parents=True, exist_ok=True)
    chosen = _engine(engine, workers, gpu_share, retries, address, experiment)
    ended = run_sweep(tasks, chosen, partial(make_run, logs, gpu_share), typer.echo)
    failed = [one.task.name for one in ended if one.code]
    typer.echo(f"{len(ended) - len(failed)} of {len(ended)} runs done; logs in {logs}")
    for name in failed:
        typer.echo(f"failed: {name}{_last_words(logs / f'{name}.log')}", err=True)
    if failed:
        raise typer.Exit(1)


def _last_words(log: Path) -> str:
    """The last line of a log, which says why its run failed; nothing where it is on another machine."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return f": {lines[-1].strip()}" if lines else ""


def sweep_tasks(experiment: str, options: list[str], folders: list[str], *, as_one: bool = False) -> "list[Task]":
    """One task a cell, from the options of ``nsr run``.

    Args:
        experiment: Which.
        options: As ``--name value`` pairs or flags; those that name cells may list several.
        folders: Options for every task.
        as_one: Leave cells that a GPU trains as one model in one task.

    Raises:
        ValueError: There is no such experiment, or no cell.
    """
    from nsr.experiments.sweep import Task

    chosen, rest = _split(options, _CELLS.get(experiment, ("merger", "point", "variant", "seed")))
    if experiment in _CELLS:
        cells = _graph_cells(experiment, chosen)
    elif experiment in _SEGMENTATION:
        cells = _segmentation_cells(experiment, chosen)
    else:
        raise ValueError(f"There is no sweep of {experiment!r}; there are {', '.join((*_CELLS, *_SEGMENTATION))}.")
    if as_one:  # seeds or splits are replicas of one model, the variants of a segmenter are one stack
        cells = _joined(cells, _CELLS[experiment][-1] if experiment in _CELLS else "variant")
    return [
        Task(
            "-".join((experiment, *cell.values())),
            (
                "run",
                experiment,
                *(part for key, value in cell.items() for part in (f"--{key}", value)),
                *rest,
                *folders,
            ),
        )
        for cell in cells
    ]


def make_run(logs: Path, gpu_share: float, task: "Task") -> int:
    """Make a run in this process, with its output in its log; the exit code. Its records say its share of a GPU."""
    from nsr.cli import main
    from nsr.experiments import record

    if gpu_share:
        record.note(gpu_share=gpu_share)
    sys.argv = ["nsr", *task.arguments]
    with (logs / f"{task.name}.log").open("a") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            main()
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else int(left.code is not None)
        except Exception:
            sys.excepthook(*sys.exc_info())
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for target, descriptor in zip((1, 2), kept, strict=True):
                os.dup2(descriptor, target)
                os.close(descriptor)
    return 0


def _engine(
    name: str, workers: int | None, gpu_share: float, retries: int, address: str | None, experiment: str
) -> "Engine":
    if name == "ray":
        from nsr.experiments.ray_engine import ray_engine

        return ray_engine(address, gpus=gpu_share, retries=retries, workers=workers)
    if name != "local":
        raise ValueError(f"--engine is {name!r}; expected local or ray.")
    from nsr.experiments.local_engine import local_engine

    gpus = []
    if gpu_share:
        import torch

        gpus = [str(index) for index in range(torch.cuda.device_count())]
        if not gpus:
            raise ValueError(f"--gpu-share {gpu_share}: this machine has no CUDA device.")
        workers = workers or int(len(gpus) / gpu_share)
    module = "nsr.experiments.segmentation_runs" if experiment in _SEGMENTATION else f"nsr.experiments.{experiment}"
    return local_engine(workers or os.cpu_count() or 1, retries=retries, gpus=gpus, preload=["nsr.cli", module])


def _split(options: list[str], wanted: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """The values of the named options, and the other options as they are."""
    chosen: dict[str, str] = {}
    rest: list[str] = []
    remaining = iter(options)
    for option in remaining:
        name, equals, value = option.removeprefix("--").partition("=")
        if option.startswith("--") and name in wanted:
            chosen[name] = value if equals else next(remaining, "")
        else:
            rest.append(option)
    return chosen, rest


def _graph_cells(experiment: str, chosen: dict[str, str]) -> list[dict[str, str]]:
    from nsr.cli import run_graph

    defaults = inspect.signature(getattr(run_graph, experiment)).parameters
    values = []
    for name in _CELLS[experiment]:
        given = chosen.get(name) or defaults[name].default or _SPLITS
        values.append([str(v) for v in integers(f"--{name}", given)] if name in _NUMBERS else names(given))
    return [dict(zip(_CELLS[experiment], cell, strict=True)) for cell in itertools.product(*values)]


def _joined(cells: list[dict[str, str]], name: str) -> list[dict[str, str]]:
    """Cells that differ in one option alone as one that lists its values."""
    joined: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in cells:
        others = tuple(value for key, value in cell.items() if key != name)
        values = [joined[others][name]] if others in joined else []
        joined[others] = cell | {name: ",".join([*values, cell[name]])}
    return list(joined.values())


def _segmentation_cells(experiment: str, chosen: dict[str, str]) -> list[dict[str, str]]:
    from nsr.experiments.segmentation_cells import select_cells
    from nsr.experiments.segmentation_task import TASKS

    mergers, points, variants = (names(chosen.get(key, "")) for key in ("merger", "point", "variant"))
    seeds = integers("--seed", chosen.get("seed") or "0")
    cells = select_cells(TASKS[experiment], mergers, points, variants, seeds)
    return [{key: str(value) for key, value in cell.as_dict().items()} for cell in cells]
