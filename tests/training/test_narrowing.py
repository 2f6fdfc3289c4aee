"""A stack that sheds the replicas that have stopped ends as one that carries them along, task by task."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nsr.data.minesweeper import minesweeper
from nsr.data.tree import tree_task
from nsr.data.zinc import ATOMS, Molecules, Part
from nsr.experiments.graph_models import graph_model
from nsr.graph.models import GraphModel
from nsr.training import loop, molecules, nodes, tree
from nsr.training.molecules import train_molecules
from nsr.training.nodes import train_nodes
from nsr.training.plateau import PlateauRule
from nsr.training.tree import train_trees

REPLICAS = [0, 1, 2, 3]
GRAPH = minesweeper(side=8, splits=4, seed=2)


def train_on_nodes(**more: Any) -> Any:
    def model() -> GraphModel:
        return graph_model(
            "gin", "nsr", lambda w: nn.Linear(7, w), seed=42, width=8, outputs=2, layers=2, dropout=0.5, fuse=True
        )

    rule = PlateauRule("max", rate=1e-2, patience=1, stop_after=4)
    return train_nodes([model() for _ in REPLICAS], GRAPH, REPLICAS, epochs=300, rule=rule, **more)


def train_on_molecules(**more: Any) -> Any:
    def model(seed: int) -> GraphModel:
        return graph_model(
            "gcn",
            "nsr",
            lambda w: nn.Embedding(ATOMS, w),
            seed=seed,
            width=16,
            outputs=1,
            layers=2,
            dropout=0.5,
            readout="graph",
        )

    rule = PlateauRule("min", rate=1e-2, patience=1, stop_after=5)
    models = [model(seed) for seed in REPLICAS]
    return train_molecules(models, DATA, REPLICAS, epochs=60, batch=8, rule=rule, look_every=2, **more)


def train_on_trees(**more: Any) -> Any:
    def model(seed: int) -> GraphModel:
        return graph_model(
            "gcn", "nsr", lambda w: nn.Linear(10, w), seed=seed, width=32, outputs=4, layers=3, readout="root"
        )

    rule = PlateauRule("max", rate=5e-3, patience=20, stop_after=1000, perfect=1.0)
    tasks = [tree_task(2, seed) for seed in REPLICAS]
    models = [model(seed) for seed in REPLICAS]
    return train_trees(models, tasks, epochs=400, rule=rule, look_every=2, **more)


def chains(count: int, seed: int) -> Molecules:
    rng = np.random.default_rng(seed)
    num_nodes = rng.integers(3, 9, count)
    edges = np.concatenate([np.stack([np.arange(n - 1), np.arange(1, n)], 1) for n in num_nodes])
    atom = rng.integers(0, ATOMS, num_nodes.sum())
    y = rng.standard_normal(count).astype(np.float32)
    return Molecules(num_nodes, num_nodes - 1, atom, edges, np.ones(len(edges), dtype=np.int64), y)


DATA: dict[Part, Molecules] = {"train": chains(20, 0), "val": chains(9, 1), "test": chains(9, 2)}

Train = Callable[..., Any]
TASKS = [(train_on_nodes, nodes), (train_on_molecules, molecules), (train_on_trees, tree)]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the stacks that are made along the way."""
    monkeypatch.setattr(nodes, "LOOK_EVERY", 10)
    seen: list[int] = []
    for _, module in TASKS:
        made = module._Trainer.narrowed

        def narrowed(self: Any, replicas: Sequence[int], made: Callable[..., Any] = made) -> Any:
            seen.append(len(replicas))
            return made(self, replicas)

        monkeypatch.setattr(module._Trainer, "narrowed", narrowed)
    return seen


def same(one: Any, other: Any) -> None:
    for name, value in vars(one).items():
        if name == "seconds":
            continue
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(other, name)), name
        else:
            assert getattr(other, name) == (pytest.approx(value, abs=1e-4) if name != "epochs" else value), name


@pytest.mark.parametrize("train", [train for train, _ in TASKS])
def test_the_same_with_and_without(train: Train, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    narrowed = train()
    assert len(sizes) >= 1
    assert sizes == sorted(set(sizes), reverse=True)  # smaller each time
    assert sizes[0] <= 3
    monkeypatch.setattr(loop, "NARROW_BELOW", 0.0)
    carried = train()
    assert len(set(carried.best_epoch)) > 1  # they did stop at different times
    same(narrowed, carried)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("train", [train for train, _ in TASKS])
def test_a_narrowed_run_is_interrupted_and_resumed(
    train: Train, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = train(), list(sizes)
    looks = 0

    def watch(_: Any) -> None:
        nonlocal looks
        looks += 1
        if len(sizes) > len(made):  # a narrowed stack has trained up to here
            raise _KilledError

    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    path = tmp_path / "run.safetensors"
    with pytest.raises(_KilledError):
        train(save_to=path, watch=watch)
    before = looks
    same(whole, train(save_to=path, watch=lambda _: None))
    assert before > 1
    assert sizes[-len(made) :] == made  # narrowed again after it was resumed
