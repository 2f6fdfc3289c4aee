"""Cells that train together: which of them go on from where, and whose results are written."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from nsr.experiments.replicated import Cell, Configuration, Place, Trained, run_configurations
from nsr.training import checkpoint
from nsr.training.loop import Run
from nsr.training.progress import nobody


class Task:
    """Seed 11 is done after one part of a run, the others after two; an accuracy tells how many parts there were."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.trained = folder, []

    def run(self, seconds: float, seeds: Sequence[int] = (11, 12, 13), force: bool = False, **config: int) -> None:
        cells = [{"depth": 2, "seed": seed} for seed in seeds]
        whole = {"max_seconds": seconds, **config}
        one = Configuration("tree", cells, whole, "nsr run tree", self._train, limit=("max_seconds",))
        told = {"force": force, "say": lambda _: None, "watch": lambda _: nobody}
        run_configurations([one], self.folder / "r", self.folder / "o", torch.device("cpu"), **told)

    def _train(self, cells: Sequence[Cell], place: Place) -> Run[Trained]:
        found = checkpoint.load(place.save_to, place.configuration)
        parts = 1 + (found.epoch if found else 0)
        self.trained.append(([cell["seed"] for cell in cells], parts))
        checkpoint.save(place.save_to, {"x": torch.zeros(1)}, place.configuration, parts)
        yield
        stopped = [cell["seed"] != 11 and parts == 1 for cell in cells]
        return Trained([{"train_accuracy": parts / 10}] * len(cells), 1.0, stopped)

    def accuracies(self) -> dict[int, float]:
        records = [json.loads(path.read_text()) for path in sorted((self.folder / "r").glob("*/*.json"))]
        return {one["cell"]["seed"]: one["metrics"]["train_accuracy"] for one in records}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


def test_what_was_stopped_goes_on_beside_what_is_done(task: Task) -> None:
    task.run(seconds=1)
    task.run(seconds=2)
    assert task.trained == [([11, 12, 13], 1), ([11, 12, 13], 2)]
    assert task.accuracies() == {11: 0.1, 12: 0.2, 13: 0.2}
    task.run(seconds=3)
    assert len(task.trained) == 2
    assert list((task.folder / "o" / "unfinished").glob("*")) == []


def test_whoever_trained_beside_a_cell_goes_on_with_it(task: Task) -> None:
    task.run(seconds=1)
    task.run(seconds=2, seeds=[13, 14])
    assert task.trained[1:] == [([11, 12, 13], 2), ([14], 1)]
    assert task.accuracies() == {11: 0.1, 12: 0.2, 13: 0.2, 14: 0.1}


def test_force_begins_anew(task: Task) -> None:
    task.run(seconds=1)
    task.run(seconds=1, force=True)
    assert task.trained == [([11, 12, 13], 1)] * 2


def test_another_configuration_leaves_a_checkpoint_alone(task: Task) -> None:
    task.run(seconds=1)
    task.run(seconds=9, epochs=5, force=True)
    (task.folder / "r" / "tree" / "2-12.json").unlink()
    task.run(seconds=2)
    assert task.trained[-1] == ([11, 12, 13], 2)
