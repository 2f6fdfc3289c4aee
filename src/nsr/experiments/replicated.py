"""Cells that train together: runs of one configuration that differ in seed or split alone, as replicas of one model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nsr.experiments import record
from nsr.experiments.attempt import attempt
from nsr.experiments.record import Record
from nsr.training import checkpoint
from nsr.training.progress import Watch

Cell = dict[str, Any]
Metrics = dict[str, Any]


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
        train: Trains the given cells together; returns the metrics of each and the seconds of all.
    """

    experiment: str
    cells: Sequence[Cell]
    config: dict[str, Any]
    command: str
    train: Callable[[Sequence[Cell], Place], tuple[list[Metrics], float]]


def run_configurations(
    configurations: Sequence[Configuration],
    results: Path,
    outputs: Path,
    device: torch.device,
    *,
    together: int = 10,
    force: bool = False,
    say: Callable[[str], None] = print,
    watch: Callable[[str], Watch],
) -> None:
    """Train every cell that has no result yet; each leaves ``results/<experiment>/<cell>.json``.

    Args:
        configurations: What to run.
        results: Where results go.
        outputs: Where unfinished runs are kept.
        device: Where to train.
        together: At most so many replicas at once.
        force: Whether to run again what has a result.
        say: Told a line for each configuration.
        watch: Makes what is told where a run stands, from the name of the run.
    """
    for one in configurations:
        todo = [cell for cell in one.cells if force or not record.exists(results, one.experiment, cell, one.config)]
        title = " ".join(str(value) for value in list(one.cells[0].values())[:-1])
        if not todo:
            say(f"{one.experiment} {title}: there already")
        for first in range(0, len(todo), together):
            _run(one, todo[first : first + together], title, results, outputs, device, force, say, watch)


def _run(
    one: Configuration,
    cells: Sequence[Cell],
    title: str,
    results: Path,
    outputs: Path,
    device: torch.device,
    force: bool,
    say: Callable[[str], None],
    watch: Callable[[str], Watch],
) -> None:
    replicate = list(cells[0])[-1]
    name = f"{one.experiment} {title} {replicate} {','.join(str(cell[replicate]) for cell in cells)}"
    planned = [
        Record(one.experiment, cell, {}, one.config, one.command, 0.0, record.environment(device)) for cell in cells
    ]
    save_to = outputs / "unfinished" / f"{name.replace(' ', '-')}.safetensors"
    with attempt(results, planned, again=force):
        try:
            metrics, seconds = one.train(
                cells, Place(watch(name), save_to, {"config": one.config, "cells": list(cells)})
            )
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"{name}: the GPU's memory does not hold {len(cells)} replicas at once ({error}). "
                "Train fewer at a time with --together."
            ) from error
        for plan, found in zip(planned, metrics, strict=True):
            record.write(results, replace(plan, metrics=found, seconds=seconds))
        checkpoint.remove(save_to)
    say(f"{name}: {_summary(metrics)}, {seconds:.1f} s")


def _summary(metrics: Sequence[Metrics]) -> str:
    """Mean and spread of the metric that the paper reports."""
    key = next(key for key in ("test_mae", "train_accuracy", "test") if key in metrics[0])
    values = torch.tensor([entry[key] for entry in metrics], dtype=torch.float64)
    spread = f" ± {values.std():.4f}" if len(values) > 1 else ""
    return f"{key} {values.mean():.4f}{spread}"
