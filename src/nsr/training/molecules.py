"""Train graph regression on ZINC: the paper's protocol, seeds as replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsr.data.zinc import Molecules, Part
from nsr.graph.models import GraphModel
from nsr.training import loop
from nsr.training.batch_norm import row_weights, weigh_batch_norm
from nsr.training.capture import CapturedStep
from nsr.training.fused_norms import fuse_norms
from nsr.training.molecule_batches import Batch, MoleculeStore
from nsr.training.noise import key_of, permutation, seed_dropout
from nsr.training.normalisation import gcn_members, preset_normalisation
from nsr.training.plateau import Plateau, PlateauRule
from nsr.training.progress import Watch, nobody
from nsr.training.replicas import Replicas
from nsr.training.split_products import split_long_products

EPOCHS = 400
BATCH = 128
RULE = PlateauRule("min", rate=1e-3, patience=20, stop_after=100, min_rate=1e-5)
WEIGHT_DECAY = 1e-5
MAX_NORM = 1.0
_SHUFFLE = 1  # what the hash of an epoch's order is for
_ORDER_SEED = 0


@dataclass(frozen=True)
class MoleculeOutcome:
    """What became of each seed, at the weights with the lowest validation error; a list entry a seed.

    Attributes:
        val_mae: Mean absolute error over validation graphs.
        test_mae: Over test graphs, evaluated once.
        best_epoch: When the best was reached.
        epochs: How many epochs were trained, until the last seed had stopped.
        seconds: Wall time.
    """

    val_mae: list[float]
    test_mae: list[float]
    best_epoch: list[int]
    epochs: int
    seconds: float


def molecule_run(
    models: Sequence[GraphModel],
    data: Mapping[Part, Molecules],
    seeds: Sequence[int],
    *,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    rule: PlateauRule = RULE,
    device: torch.device | str = "cpu",
    watch: Watch = nobody,
    look_every: int = 5,
    save_to: Path | None = None,
    configuration: dict[str, Any] | None = None,
) -> loop.Run[MoleculeOutcome]:
    """Train one model a seed, as replicas.

    A seed decides initialisation (by the caller) and dropout; the order of the batches is the same for all seeds, so
    that replicas share each batch's graph.

    Args:
        models: One a seed, of equal structure, with graph readout.
        data: The three splits.
        seeds: Of the dropout.
        epochs: At most so many.
        batch: Graphs in a batch.
        rule: Schedule and stopping, in epochs.
        device: Where to train.
        watch: Told where the run stands every ``look_every`` epochs.
        look_every: Also how often it is seen whether all replicas have stopped.
        save_to: Where to keep a checkpoint about once a minute; a run that finds one goes on from it.
        configuration: What makes a checkpoint that of this run.
    """
    if len(models) != len(seeds):
        raise ValueError(f"Give one model a seed; got {len(models)} models and {len(seeds)} seeds.")
    seeded = [seed_dropout(model, seed) for model, seed in zip(models, seeds, strict=True)]
    ready = [fuse_norms(weigh_batch_norm(model)) for model in seeded]
    trainer = _Trainer(ready, data, epochs, batch, rule, torch.device(device))
    done, seconds = yield from loop.train(trainer, epochs, look_every, watch, save_to, configuration)
    return trainer.outcome(done, seconds)


train_molecules = loop.at_once(molecule_run)


class _Trainer:
    """The tensors of a run; its steps read and write them in place."""

    def __init__(
        self,
        models: Sequence[GraphModel],
        data: Mapping[Part, Molecules],
        epochs: int,
        batch: int,
        rule: PlateauRule,
        device: torch.device,
    ) -> None:
        self.models, self.data, self.epochs, self.batch, self.rule = models, data, epochs, batch, rule
        self.store = MoleculeStore(data["train"], device)
        self.val_batch = MoleculeStore(data["val"], device).everything()
        self.test_batch = MoleculeStore(data["test"], device).everything()
        keys = key_of(torch.tensor(_ORDER_SEED, device=device), _SHUFFLE, torch.arange(epochs, device=device).int())
        order = permutation(len(self.store), keys)  # shape: [epochs, G]
        self.steps = -(-len(self.store) // batch)
        empty = self.steps * batch - len(self.store)
        # A batch that is not full is filled up with graphs that do not count.
        self.orders = torch.nn.functional.pad(order, (0, empty)).view(epochs, self.steps, batch)
        self.counted = torch.arange(self.steps * batch, device=device).view(self.steps, batch) < len(self.store)
        self.size = self.store.sizes(self.orders, self.counted)
        self.order = self.orders[0].clone()
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.device, self.replicas = device, Replicas(models, device)
        self.plateau = Plateau(rule, len(models), device)
        self.best = [tensor.detach().clone() for tensor in self.replicas.weights()]
        self.latest = torch.zeros(len(models), device=device)
        self.train = CapturedStep(self._train, device)
        self.evaluate = CapturedStep(self._evaluate, device)

    def epoch(self, number: int) -> None:
        """Train one epoch and evaluate."""
        self.order.copy_(self.orders[number])
        self.cursor.zero_()
        for _ in range(self.steps):
            self.train()
        self.evaluate()

    def _train(self) -> None:
        chosen = self.order.index_select(0, self.cursor).squeeze(0)
        counted = self.counted.index_select(0, self.cursor).squeeze(0)
        errors = self._errors(self.store.gather(chosen, counted, *self.size), training=True)  # shape: [R, B]
        with split_long_products(self.device):
            self.replicas.backward((errors * counted).sum(1) / counted.sum())
        self.replicas.adam(self.plateau.rate * self.plateau.active, WEIGHT_DECAY, MAX_NORM)
        self.cursor.add_(1)

    @torch.no_grad()
    def _evaluate(self) -> None:
        self.latest.copy_(self._errors(self.val_batch, training=False).mean(1))
        self.replicas.keep(self.best, self.plateau.update(self.latest))

    def _errors(self, batch: Batch, training: bool) -> Tensor:
        """Absolute error of each graph, ``[R, B]``."""
        preset_normalisation(self.replicas.template, *gcn_members(batch.edge_index, len(batch.atom)))
        graphs = len(batch.y)
        with row_weights(self.replicas.template, batch.real):
            predicted = self.replicas.call(
                lambda model, atom, edge_index, graph: model(atom, edge_index, batch=graph, num_graphs=graphs + 1),
                batch.atom,
                batch.edge_index,
                batch.graph,
                in_dims=(None, None, None),
                training=training,
            )  # shape: [R, B + 1, 1]
        return (predicted[:, :graphs, 0] - batch.y).abs()

    @torch.no_grad()
    def outcome(self, epochs: int, seconds: float) -> MoleculeOutcome:
        self.replicas.restore(self.best)
        test = self._errors(self.test_batch, training=False).mean(1).tolist()
        return MoleculeOutcome(self.plateau.best.tolist(), test, self.plateau.best_evaluation.tolist(), epochs, seconds)

    def state(self) -> dict[str, Tensor]:
        return loop.named(replicas=self.replicas.state(), plateau=self.plateau.state(), best=self.best)

    def narrowed(self, replicas: Sequence[int]) -> "_Trainer":
        models = [self.models[r] for r in replicas]
        return _Trainer(models, self.data, self.epochs, self.batch, self.rule, self.device)
