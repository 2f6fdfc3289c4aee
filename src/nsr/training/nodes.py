"""Train node classifiers on one graph: the paper's protocol, the splits of a data set as replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.data.node_graph import NodeGraph
from nsr.graph.models import GraphModel
from nsr.training import loop
from nsr.training.capture import CapturedStep
from nsr.training.fused_norms import fuse_norms
from nsr.training.node_metrics import accuracy, roc_auc
from nsr.training.noise import seed_dropout
from nsr.training.normalisation import gcn_members, preset_normalisation
from nsr.training.plateau import Plateau, PlateauRule
from nsr.training.progress import Watch, nobody
from nsr.training.replicas import Replicas
from nsr.training.split_products import split_long_products

EPOCHS = 3000
EVALUATE_EVERY = 10
RULE = PlateauRule("max", rate=1e-3, patience=50, stop_after=100, min_rate=1e-6)
WEIGHT_DECAY = 5e-4
MAX_NORM = 1.0
LOOK_EVERY = 100  # epochs between two looks at the device


@dataclass(frozen=True)
class NodeOutcome:
    """What became of each split, at the weights with the best validation metric; a list entry a split.

    Attributes:
        val: Validation metric.
        test: Test metric.
        predictions: Predicted class of every node, ``[S, N]``, int64, on the CPU.
        best_epoch: When the best was reached.
        epochs: How many epochs were trained, until the last split had stopped.
        seconds: Wall time.
    """

    val: list[float]
    test: list[float]
    predictions: Tensor
    best_epoch: list[int]
    epochs: int
    seconds: float


def node_run(
    models: Sequence[GraphModel],
    graph: NodeGraph,
    splits: Sequence[int],
    *,
    seed: int = 42,
    epochs: int = EPOCHS,
    rule: PlateauRule = RULE,
    device: torch.device | str = "cpu",
    watch: Watch = nobody,
    save_to: Path | None = None,
    configuration: dict[str, Any] | None = None,
) -> loop.Run[NodeOutcome]:
    """Train one model on each of the given splits, as replicas.

    Args:
        models: One a split, of equal structure.
        graph: The data set.
        splits: Which of its splits.
        seed: Of the dropout, the same for each split as in the paper.
        epochs: At most so many.
        rule: Schedule and stopping, in evaluations.
        device: Where to train.
        watch: Told where the run stands every hundred epochs.
        save_to: Where to keep a checkpoint about once a minute; a run that finds one goes on from it.
        configuration: What makes a checkpoint that of this run.
    """
    ready = [fuse_norms(seed_dropout(model, seed)) for model in models]
    if epochs < EVALUATE_EVERY:
        raise ValueError(
            f"{epochs} epochs end before the first evaluation, after {EVALUATE_EVERY}; give more (--epochs)."
        )
    trainer = _Trainer(ready, graph, splits, rule, torch.device(device))
    done, seconds = yield from loop.train(trainer, epochs, LOOK_EVERY, watch, save_to, configuration)
    return trainer.outcome(done, seconds)


train_nodes = loop.at_once(node_run)


class _Trainer:
    """The tensors of a run; its steps read and write them in place."""

    def __init__(
        self,
        models: Sequence[GraphModel],
        graph: NodeGraph,
        splits: Sequence[int],
        rule: PlateauRule,
        device: torch.device,
    ) -> None:
        if len(models) != len(splits):
            raise ValueError(f"Give one model a split; got {len(models)} models and {len(splits)} splits.")
        self.models, self.graph, self.splits, self.rule = models, graph, splits, rule
        self.metric = roc_auc if graph.metric == "roc_auc" else accuracy
        self.x = torch.from_numpy(graph.features).to(device)
        self.labels = torch.from_numpy(graph.labels).to(device)
        self.edge_index = torch.from_numpy(graph.edge_index()).to(device)
        masks = (graph.train_masks, graph.val_masks, graph.test_masks)
        train, self.val_mask, self.test_mask = (torch.from_numpy(mask[list(splits)]).to(device) for mask in masks)
        self.weight = train / train.sum(1, keepdim=True)  # shape: [R, N], the mean over training nodes
        self.device, self.replicas = device, Replicas(models, device)
        # GCN's coefficients depend on the graph alone.
        preset_normalisation(self.replicas.template, *gcn_members(self.edge_index, len(self.labels)))
        self.plateau = Plateau(rule, len(models), device)
        self.best = [tensor.detach().clone() for tensor in self.replicas.weights()]
        self.latest = torch.zeros(len(models), device=device)
        self.test = torch.zeros(len(models), device=device)
        self.train = CapturedStep(self._train, device)
        self.evaluate = CapturedStep(self._evaluate, device)

    def epoch(self, number: int) -> None:
        """One step on the whole graph; every tenth time an evaluation."""
        self.train()
        if (number + 1) % EVALUATE_EVERY == 0:
            self.evaluate()

    def _logits(self, training: bool) -> Tensor:
        return self.replicas.call(
            lambda model, x, edge_index: model(x, edge_index),
            self.x,
            self.edge_index,
            in_dims=(None, None),
            training=training,
        )  # shape: [R, N, C]

    def _train(self) -> None:
        logits = self._logits(training=True)
        labels = self.labels.expand(len(logits), -1)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # shape: [R, N]
        with split_long_products(self.device):
            self.replicas.backward((losses * self.weight).sum(1))
        self.replicas.adam(self.plateau.rate * self.plateau.active, WEIGHT_DECAY, MAX_NORM)

    @torch.no_grad()
    def _evaluate(self) -> None:
        logits = self._logits(training=False)
        self.latest.copy_(self.metric(logits, self.labels, self.val_mask))
        improved = self.plateau.update(self.latest)
        self.test.copy_(torch.where(improved, self.metric(logits, self.labels, self.test_mask), self.test))
        self.replicas.keep(self.best, improved)

    @torch.no_grad()
    def outcome(self, epochs: int, seconds: float) -> NodeOutcome:
        self.replicas.restore(self.best)
        predictions = self._logits(training=False).argmax(-1).cpu()
        best_epoch = (self.plateau.best_evaluation * EVALUATE_EVERY).tolist()
        return NodeOutcome(self.plateau.best.tolist(), self.test.tolist(), predictions, best_epoch, epochs, seconds)

    def state(self) -> dict[str, Tensor]:
        metrics = {"latest": self.latest, "test": self.test}
        return loop.named(replicas=self.replicas.state(), plateau=self.plateau.state(), best=self.best, metrics=metrics)

    def narrowed(self, replicas: Sequence[int]) -> "_Trainer":
        models, splits = [self.models[r] for r in replicas], [self.splits[r] for r in replicas]
        return _Trainer(models, self.graph, splits, self.rule, self.device)
