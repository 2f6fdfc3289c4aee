"""Train on Tree-NeighborsMatch: the paper's protocol, with shared work and any number of seeds at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.data.tree import TreeTask
from nsr.graph.models import GraphModel
from nsr.training import loop
from nsr.training.capture import CapturedStep
from nsr.training.noise import key_of, permutation
from nsr.training.plateau import Plateau, PlateauRule
from nsr.training.progress import Watch, nobody
from nsr.training.replicas import Replicas
from nsr.training.soap import Soap
from nsr.training.tree_batches import Queries, grouped, sampled
from nsr.training.tree_layer import fusible
from nsr.training.tree_model import TreeModel, kind_of
from nsr.training.tree_native import NativeTreeModel, tree_library

# The paper's effective batches. One step with the whole batch is its gradient accumulation, but for GIN's BatchNorm.
BATCH = {2: 64, 3: 64, 4: 1024, 5: 1024, 6: 1024, 7: 2048, 8: 2048}
RULE = PlateauRule("max", rate=1e-3, patience=1000, stop_after=2000, perfect=1.0)
EPOCHS = 50_000
_SHUFFLE = 1  # what the hash of an epoch's order is for
_FRESH_SAMPLES = 6400


@dataclass(frozen=True)
class TreeOutcome:
    """What became of each replica; accuracies are fractions of one, a list entry a replica.

    Attributes:
        train_accuracy: The highest over an epoch while the weights moved, which is what the paper reports.
        train_accuracy_at_best: On the same samples with the weights after that epoch at rest.
        test_accuracy: With those weights, on the held-out queries of the training permutations.
        fresh_accuracy: With those weights, on permutations never seen; ``None`` where there are none left.
        best_epoch: When the highest was reached.
        epochs: How many epochs were trained.
        stopped: Whether the time was up before the replica had met its rule or done all epochs.
    """

    train_accuracy: list[float]
    train_accuracy_at_best: list[float]
    test_accuracy: list[float]
    fresh_accuracy: list[float] | None
    best_epoch: list[int]
    epochs: int
    seconds: float
    stopped: list[bool]


def tree_run(
    models: Sequence[GraphModel],
    tasks: Sequence[TreeTask],
    *,
    epochs: int = EPOCHS,
    rule: PlateauRule = RULE,
    trees_per_batch: int | None = None,
    soap: bool = False,
    device: torch.device | str = "cpu",
    max_seconds: float | None = None,
    watch: Watch = nobody,
    look_every: int = 10,
    save_to: Path | None = None,
    configuration: dict[str, Any] | None = None,
) -> loop.Run[TreeOutcome]:
    """Train one model on each task, all of one depth, as replicas.

    Args:
        models: One a task, of equal structure.
        tasks: One a model, each with its own seed, which also orders its batches.
        epochs: At most so many.
        rule: Schedule and stopping; a replica at 100 % stops.
        trees_per_batch: By default batches are samples in random order, as the paper has them. With a number, a batch
            is so many trees with all of their training queries: far less work a sample, but not the paper's batches.
        soap: Let the matrices of the layers follow :class:`nsr.training.soap.Soap`, not Adam as the paper has it.
        device: Where to train.
        max_seconds: Stop after about this time and report what has been reached.
        watch: Told where the run stands every ``look_every`` epochs.
        look_every: Also how often it is seen whether all replicas have stopped.
        save_to: Where to keep a checkpoint about once a minute; a run that finds one goes on from it.
        configuration: What makes a checkpoint that of this run.
    """
    trainer = _Trainer(models, tasks, rule, trees_per_batch, torch.device(device), soap)
    done, seconds = yield from loop.train(trainer, epochs, look_every, watch, save_to, configuration, max_seconds)
    return trainer.outcome(done, seconds, in_time=done == epochs)


train_trees = loop.at_once(tree_run)


class _Trainer:
    """The tensors of a run. A step reads and writes them in place, so it can be captured and replayed."""

    def __init__(
        self,
        models: Sequence[GraphModel],
        tasks: Sequence[TreeTask],
        rule: PlateauRule,
        trees_per_batch: int | None,
        device: torch.device,
        soap: bool = False,
    ) -> None:
        depths = {task.depth for task in tasks}
        if len(depths) != 1 or len(tasks) != len(models):
            raise ValueError(
                f"Give one task a model, all of one depth; got {len(models)} models and {len(tasks)} tasks "
                f"of depths {sorted(depths)}."
            )
        depth = depths.pop()
        self.models, self.tasks, self.rule, self.trees_per_batch = models, tasks, rule, trees_per_batch
        self.device, self.grouped = device, trees_per_batch is not None
        self.permutations = _stack([task.permutations for task in tasks], device)  # shape: [R, P, L]
        replicas, trees, leaves = self.permutations.shape
        self.train = _stack([task.train for task in tasks], device)  # shape: [R, M]
        self.counted = torch.zeros(replicas, trees * leaves, device=device).scatter(1, self.train, 1.0)
        self.slots = trees_per_batch or min(trees, BATCH[depth])
        self.batch = self.slots * leaves if self.grouped else BATCH[depth]
        self.replicas = Replicas(models, device)
        self.soap = Soap(self.replicas, "layers.") if soap else None
        self.model = _tree_model(models[0], depth, self.slots, self.batch, self.replicas)
        self.plateau = Plateau(rule, replicas, device)
        self.best = [tensor.detach().clone() for tensor in self.replicas.weights()]
        self.seeds = torch.tensor([task.seed for task in tasks], device=device)
        self.steps = -(-(trees * leaves if self.grouped else self.train.shape[1]) // self.batch)
        self.order = torch.zeros(replicas, self.steps, self.batch, dtype=torch.int64, device=device)
        self.weight = torch.zeros(replicas, self.steps, self.batch, device=device)
        self.queries = self._queries(self.permutations, self.order, self.weight)
        self.number = torch.zeros((), dtype=torch.int32, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.correct = torch.zeros(replicas, device=device)
        self.latest = torch.zeros(replicas, device=device)
        step = self._gradient if soap else self._step
        self.begin, self.step, self.end = (CapturedStep(s, device) for s in (self._begin, step, self._end))

    def epoch(self, number: int) -> None:
        """Train one epoch; the accuracy over it is the monitored metric."""
        self.number.fill_(number)
        self.begin()
        for step in range(self.steps):
            self.step()
            if self.soap:
                self.soap.step(self._rate(), number * self.steps + step)
        self.end()

    def _begin(self) -> None:
        """Order the epoch's samples; what fills up the last batch does not count."""
        self.cursor.zero_()
        self.correct.zero_()
        key = key_of(self.seeds, _SHUFFLE, self.number)
        if self.grouped:
            leaves = self.permutations.shape[2]
            trees = permutation(self.permutations.shape[1], key)
            samples = (trees.unsqueeze(2) * leaves + torch.arange(leaves, device=self.device)).flatten(1)
            counts = self.counted.gather(1, samples)
        else:
            samples = self.train.gather(1, permutation(self.train.shape[1], key))
            counts = torch.ones_like(samples, dtype=self.weight.dtype)
        self.order.flatten(1)[:, : samples.shape[1]] = samples
        self.weight.flatten(1)[:, : samples.shape[1]] = counts
        self.queries.copy_(self._queries(self.permutations, self.order, self.weight))

    def _end(self) -> None:
        torch.div(self.correct, self.train.shape[1], out=self.latest)
        self.replicas.keep(self.best, self.plateau.update(self.latest))

    def _queries(self, permutations: Tensor, samples: Tensor, count: Tensor) -> Queries:
        if self.grouped:
            return grouped(permutations, samples, count)
        return sampled(permutations, samples, count, self.slots)

    def _step(self) -> None:
        self._gradient()
        self.replicas.adam(self._rate())

    def _gradient(self) -> None:
        losses, right = self.model.loss(self._weights(), self.queries.batch(self.cursor))
        self.replicas.backward(losses)
        self.correct.add_(right)
        self.cursor.add_(1)

    def _rate(self) -> Tensor:
        return self.plateau.rate * self.plateau.active

    def _weights(self) -> dict[str, Tensor]:
        return self.replicas.parameters | self.replicas.buffers

    @torch.no_grad()
    def correct_answers(self, permutations: Tensor) -> Tensor:
        """Whether each query of permutations ``[R, P', L]`` is answered right with the present weights at rest."""
        replicas, trees, leaves = permutations.shape
        right = []
        for part in torch.arange(trees * leaves, device=self.device).split(self.batch):
            samples = F.pad(part, (0, self.batch - len(part))).expand(replicas, -1)
            weight = (torch.arange(self.batch, device=self.device) < len(part)).float().expand(replicas, -1)
            batch = self._queries(permutations, samples, weight)
            right.append((self.model.logits(self._weights(), batch).argmax(2) == batch.label)[:, : len(part)])
        return torch.cat(right, dim=1)  # shape: [R, P' L]

    def outcome(self, epochs: int, seconds: float, in_time: bool) -> TreeOutcome:
        """The results, with the best weights of each replica; ``in_time``: whether all epochs have been done."""
        self.replicas.restore(self.best)
        right = self.correct_answers(self.permutations)
        test = _stack([task.test for task in self.tasks], self.device)
        fresh_accuracy = None
        if self.tasks[0].depth > 2:
            count = _FRESH_SAMPLES // self.permutations.shape[2]
            fresh = _stack([task.fresh(count) for task in self.tasks], self.device)
            fresh_accuracy = _mean(self.correct_answers(fresh))
        return TreeOutcome(
            train_accuracy=self.plateau.best.tolist(),
            train_accuracy_at_best=_mean(right.gather(1, self.train)),
            test_accuracy=_mean(right.gather(1, test)),
            fresh_accuracy=fresh_accuracy,
            best_epoch=self.plateau.best_evaluation.tolist(),
            epochs=epochs,
            seconds=seconds,
            stopped=[active and not in_time for active in self.plateau.active.tolist()],
        )

    def state(self) -> dict[str, Tensor]:
        parts = {"soap": self.soap.state()} if self.soap else {}
        return loop.named(replicas=self.replicas.state(), plateau=self.plateau.state(), best=self.best, **parts)

    def narrowed(self, replicas: Sequence[int]) -> "_Trainer":
        models, tasks = [self.models[r] for r in replicas], [self.tasks[r] for r in replicas]
        return _Trainer(models, tasks, self.rule, self.trees_per_batch, self.device, self.soap is not None)


def _tree_model(model: GraphModel, depth: int, trees: int, pairs: int, replicas: Replicas) -> TreeModel:
    """The model as Triton's kernels on a GPU and in C++ on a CPU, where there are such; otherwise plain operators."""
    kind, width, device = kind_of(model), model.head.in_features, replicas.rows.device
    fast = fusible(kind, width) and replicas.rows.dtype == torch.float32
    if fast and device.type == "cuda":
        from nsr.training.tree_fused import FusedParts  # needs Triton

        parts = FusedParts(kind, replicas, len(model.layers))
        return TreeModel(model, depth, trees, pairs, device, parts)
    if fast and device.type == "cpu" and (library := tree_library(width)) is not None:
        return NativeTreeModel(model, depth, trees, pairs, replicas, library)
    return TreeModel(model, depth, trees, pairs, device)


def _stack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(device)


def _mean(right: Tensor) -> list[float]:
    return right.double().mean(1).tolist()
