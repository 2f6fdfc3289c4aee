"""The tree loop: seeds together equal one by one, grouped batches see the same samples, a small task is learned."""

from pathlib import Path

import pytest
import torch
from torch import nn

from nsr.data.tree import tree_task
from nsr.experiments.graph_models import Variant, graph_model
from nsr.graph.models import Backbone, GraphModel
from nsr.training import loop
from nsr.training.plateau import PlateauRule
from nsr.training.progress import Progress
from nsr.training.tree import _Trainer, train_trees

RULE = PlateauRule("max", rate=1e-2, patience=20, stop_after=1000, perfect=1.0)


def build(backbone: Backbone, variant: Variant, seed: int) -> GraphModel:
    return graph_model(
        backbone, variant, lambda w: nn.Linear(10, w), seed=seed, width=16, outputs=4, layers=3, readout="root"
    )


@pytest.mark.parametrize(("backbone", "variant"), [("gcn", "nsr"), ("gin", "nsr")])
def test_seeds_together_equal_one_by_one(backbone: Backbone, variant: Variant) -> None:
    seeds = [11, 12, 13]
    together = train_trees(
        [build(backbone, variant, s) for s in seeds], [tree_task(2, s) for s in seeds], epochs=15, rule=RULE
    )
    for r, seed in enumerate(seeds):
        alone = train_trees([build(backbone, variant, seed)], [tree_task(2, seed)], epochs=15, rule=RULE)
        assert alone.train_accuracy[0] == pytest.approx(together.train_accuracy[r], abs=0.02)
        assert alone.test_accuracy[0] == pytest.approx(together.test_accuracy[r], abs=0.06)


def test_learns_the_smallest_task_and_stops_there() -> None:
    outcome = train_trees([build("gcn", "nsr", 11)], [tree_task(2)], epochs=400, rule=RULE)
    assert outcome.train_accuracy == [1.0]
    assert outcome.epochs < 400
    assert outcome.fresh_accuracy is None


@pytest.mark.parametrize("trees_per_batch", [None, 5])
def test_an_epoch_sees_every_training_sample_once(trees_per_batch: int | None) -> None:
    task = tree_task(2)
    trainer = _Trainer([build("gcn", "original", 11)], [task], RULE, trees_per_batch, torch.device("cpu"))
    trainer._begin()
    counted = trainer.order[trainer.weight > 0].tolist()
    assert sorted(counted) == sorted(task.train.tolist())


@pytest.mark.parametrize("trees_per_batch", [None, 5])
def test_every_epoch_has_an_order_of_its_own(trees_per_batch: int | None) -> None:
    """With the same batches again and again a model learns more slowly, and by heart."""
    trainer = _Trainer([build("gcn", "nsr", 11)], [tree_task(2)], RULE, trees_per_batch, torch.device("cpu"))
    orders = []
    for number in range(5):
        trainer.epoch(number)
        orders.append(tuple(trainer.order.flatten().tolist()))
    assert len(set(orders)) == 5
    trainer.epoch(1)
    assert tuple(trainer.order.flatten().tolist()) == orders[1]


@pytest.mark.parametrize("soap", [False, True])
def test_interrupted_and_resumed_equals_run_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soap: bool
) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)

    def stop(progress: Progress) -> None:
        if progress.epoch == 20:
            raise KeyboardInterrupt

    task, path = tree_task(2), tmp_path / "run.safetensors"
    whole = train_trees([build("gcn", "nsr", 11)], [task], epochs=30, rule=RULE, soap=soap)
    with pytest.raises(KeyboardInterrupt):
        train_trees([build("gcn", "nsr", 11)], [task], epochs=30, rule=RULE, soap=soap, watch=stop, save_to=path)
    resumed = train_trees([build("gcn", "nsr", 11)], [task], epochs=30, rule=RULE, soap=soap, save_to=path)
    assert resumed.train_accuracy == whole.train_accuracy
    assert resumed.test_accuracy == whole.test_accuracy
    assert resumed.best_epoch == whole.best_epoch


def test_tasks_of_different_depths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"depths \[2, 3\]"):
        train_trees([build("gcn", "nsr", 11)] * 2, [tree_task(2), tree_task(3)])
