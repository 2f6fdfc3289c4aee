"""Cells that train together: runs of one configuration that differ in seed or split alone, as replicas of one model."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsr.experiments import record
from nsr.experiments.attempt import attempt, say_what_is_replaced
from nsr.experiments.curves import curves
from nsr.experiments.record import Record
from nsr.training import checkpoint, loop
from nsr.training.loop import Run
from nsr.training.progress import Progress, Watch

Cell = dict[str, Any]
Metrics = dict[str, Any]


class Trained(NamedTuple):
    """What training has made of cells.

    Attributes:
        metrics: Of each.
        seconds: Of all.
        stopped: Whether a time limit ended it before its own criterion did, of each.
    """

    metrics: list[Metrics]
    seconds: float
    stopped: list[bool]


@dataclass(frozen=True)
class Place:
    """Where a run reports and keeps its state.

    Attributes:
        watch: Told where training stands.
        save_to: Its checkpoint.
        configuration: What makes a checkpoint that of this run.
    """

    watch: Watch
    save_to: Path
    configuration: dict[str, Any]


@dataclass(frozen=True)
class Configuration:
    """One configuration and the cells that replicate it.

    Attributes:
        experiment: Which.
        cells: Equal but for the last entry, the seed or split.
        config: Everything else that decides the outcome.
        command: What repeats it.
        train: Trains the given cells together.
        limit: Entries of the config that say when to end; a run stopped under one limit goes on under another.
    """

    experiment: str
    cells: Sequence[Cell]
    config: dict[str, Any]
    command: str
    train: Callable[[Sequence[Cell], Place], Run[Trained]]
    limit: tuple[str, ...] = ()


def run_configurations(
    configurations: Sequence[Configuration],
    results: Path,
    outputs: Path,
    device: torch.device,
    *,
    together: int = 10,
    concurrent: int = 1,
    force: bool = False,
    say: Callable[[str], None] = print,
    watch: Callable[[str], Watch],
    tensorboard: Path | None = None,
) -> None:
    """Train every cell that has no result yet; each leaves ``results/<experiment>/<cell>.json``.

    Args:
        configurations: What to run.
        results: Where results go.
        outputs: Where unfinished runs are kept.
        device: Where to train.
        together: At most so many replicas in one model.
        concurrent: So many models take turns on the device.
        force: Whether to run again what has a result.
        say: Told a line for each model.
        watch: Makes what is told where a run stands, from the name of the run.
        tensorboard: Where curves go, one folder a cell; drawn from what ``watch`` is told.
    """
    models = []
    for one in configurations:

        def missing(cell: Cell, one: Configuration = one) -> bool:
            return force or not record.exists(results, one.experiment, cell, one.config, one.limit)

        todo = [cell for cell in one.cells if missing(cell)]
        if not todo:
            say(f"{one.experiment} {_title(one)}: there already")
        if not force:
            say_what_is_replaced(results, one.experiment, todo, say)
            # cells that were stopped go on with those that they trained beside, though these be done or not asked for
            for cells in _unfinished(one, outputs):
                if any(cell in todo for cell in cells):
                    models.append(_Model(one, cells, [cell for cell in cells if missing(cell)]))
                    todo = [cell for cell in todo if cell not in cells]
        groups = [todo[first : first + together] for first in range(0, len(todo), together)]
        models += [_Model(one, cells, cells, anew=force) for cells in groups]
    for first in range(0, len(models), concurrent):
        group = models[first : first + concurrent]
        with ExitStack() as drawing:  # opened before the attempt: a missing package is no failure of the runs
            watches = [drawing.enter_context(_drawn(model, watch(model.name), tensorboard)) for model in group]
            with attempt(results, [plan for model in group for plan in model.planned(device)], again=force):
                runs = [
                    model.run(results, outputs, device, say, told) for model, told in zip(group, watches, strict=True)
                ]
                loop.take_turns(runs, device)


@dataclass(frozen=True)
class _Model:
    """Cells of one configuration that train as one model.

    Attributes:
        configuration: Theirs.
        cells: The replicas.
        wanted: Those of them whose results are wanted.
        anew: Whether to begin at the beginning, whatever was left unfinished.
    """

    configuration: Configuration
    cells: Sequence[Cell]
    wanted: Sequence[Cell]
    anew: bool = False

    @property
    def name(self) -> str:
        replicate = list(self.cells[0])[-1]
        replicates = ",".join(str(cell[replicate]) for cell in self.cells)
        return f"{self.configuration.experiment} {_title(self.configuration)} {replicate} {replicates}"

    def planned(self, device: torch.device) -> list[Record]:
        one, environment = self.configuration, record.environment(device)
        return [Record(one.experiment, cell, {}, one.config, one.command, 0.0, environment) for cell in self.wanted]

    def run(
        self, results: Path, outputs: Path, device: torch.device, say: Callable[[str], None], watch: Watch
    ) -> Run[None]:
        identity = _identity(self.configuration, self.cells)
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=4).hexdigest()
        save_to = outputs / "unfinished" / f"{self.name.replace(' ', '-')}-{digest}.safetensors"
        if self.anew:
            checkpoint.remove(save_to)
        try:
            trained = yield from self.configuration.train(self.cells, Place(watch, save_to, identity))
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"{self.name}: the GPU's memory does not hold {len(self.cells)} replicas at once ({error}). "
                "Train fewer at a time with --together, or fewer models with --concurrent."
            ) from error
        for plan in self.planned(device):
            place = list(self.cells).index(plan.cell)
            status = "stopped" if trained.stopped[place] else "done"
            record.write(results, replace(plan, metrics=trained.metrics[place], seconds=trained.seconds, status=status))
        if not any(trained.stopped):  # else the same cells go on from it when they are given more time
            checkpoint.remove(save_to)
        say(f"{self.name}: {_summary(trained)}")


def _identity(configuration: Configuration, cells: Sequence[Cell]) -> dict[str, Any]:
    """What makes a checkpoint that of these cells: everything but how long they may take."""
    config = {key: value for key, value in configuration.config.items() if key not in configuration.limit}
    return {"config": config, "cells": list(cells)}


def _unfinished(configuration: Configuration, outputs: Path) -> list[list[Cell]]:
    """The cells of each checkpoint of this configuration, those of the most cells first."""
    known = json.loads(json.dumps(_identity(configuration, [])["config"]))
    groups = []
    for path in sorted((outputs / "unfinished").glob("*.safetensors")):
        found = checkpoint.configuration_of(path) or {}
        cells = found.get("cells", [])
        if found.get("config") == known:
            groups.append(cells)
    return sorted(groups, key=len, reverse=True)


@contextmanager
def _drawn(model: _Model, watch: Watch, folder: Path | None) -> Iterator[Watch]:
    """Watch a model, and draw what is told of each of its replicas."""
    with curves(folder, model.configuration.experiment, model.cells) as logs:

        def told(progress: Progress) -> None:
            watch(progress)
            for log, metric, best, rate in zip(logs, progress.metric, progress.best, progress.rate, strict=True):
                log(progress.epoch, metric=metric, best=best, learning_rate=rate)

        yield told


def _title(configuration: Configuration) -> str:
    return " ".join(str(value) for value in list(configuration.cells[0].values())[:-1])


def _summary(trained: Trained) -> str:
    """Mean and spread of what the paper reports and of what it should be read with, and how long it took."""
    said = []
    for key in ("test_mae", "train_accuracy", "test_accuracy", "fresh_accuracy", "test"):
        if key in trained.metrics[0]:
            values = torch.tensor([entry[key] for entry in trained.metrics], dtype=torch.float64)
            spread = f" ± {values.std():.4f}" if len(values) > 1 else ""
            said.append(f"{key} {values.mean():.4f}{spread}")
    stopped = sum(trained.stopped)
    said.append(f"{trained.seconds:.1f} s" + (f", stopped by the time limit: {stopped}" if stopped else ""))
    return ", ".join(said)
