"""Batches at a fixed size hold the graphs they should; seeds together equal seeds one by one and a plain torch loop."""

import numpy as np
import pytest
import torch
from torch import nn

from nsr.data.zinc import ATOMS, Molecules, Part
from nsr.experiments.graph_models import Variant, graph_model
from nsr.graph.models import Backbone, GraphModel
from nsr.training.molecule_batches import MoleculeStore
from nsr.training.molecules import train_molecules
from nsr.training.noise import key_of, permutation, seed_dropout
from nsr.training.plateau import PlateauRule

RULE = PlateauRule("min", rate=1e-2, patience=1, stop_after=50, min_rate=1e-5)
BATCH = 8


def random_molecules(count: int, seed: int) -> Molecules:
    """Chains with a few extra bonds; the target depends on atoms and on the graph."""
    rng = np.random.default_rng(seed)
    num_nodes = rng.integers(3, 9, count)
    edges = [np.stack([np.arange(n - 1), np.arange(1, n)], 1) for n in num_nodes]
    edges = [np.concatenate([e, [[0, n - 1]]]) if n % 2 else e for e, n in zip(edges, num_nodes, strict=True)]
    atom = rng.integers(0, ATOMS, num_nodes.sum())
    y = np.array([a.mean() / ATOMS + len(a) % 2 for a in np.split(atom, num_nodes.cumsum()[:-1])], dtype=np.float32)
    num_edges = np.array([len(e) for e in edges])
    return Molecules(num_nodes, num_edges, atom, np.concatenate(edges), np.ones(num_edges.sum(), dtype=np.int64), y)


DATA: dict[Part, Molecules] = {
    "train": random_molecules(20, 0),
    "val": random_molecules(9, 1),
    "test": random_molecules(9, 2),
}


def build(backbone: Backbone, variant: Variant, seed: int, fuse: bool = False) -> GraphModel:
    return graph_model(
        backbone,
        variant,
        lambda width: nn.Embedding(ATOMS, width),
        seed=seed,
        width=16,
        outputs=1,
        layers=2,
        dropout=0.0,
        readout="graph",
        fuse=fuse,
    )


def plain_batch(molecules: Molecules, chosen: list[int]) -> tuple[torch.Tensor, ...]:
    """Graphs put together by hand: atoms, edges in both directions, graph of each node, targets."""
    first_node = np.concatenate([[0], molecules.num_nodes.cumsum()])
    first_edge = np.concatenate([[0], molecules.num_edges.cumsum()])
    atoms, edges, graph, offset = [], [], [], 0
    for number, m in enumerate(chosen):
        atoms.append(molecules.atom[first_node[m] : first_node[m + 1]])
        own = molecules.edges[first_edge[m] : first_edge[m + 1]] + offset
        edges += [own, own[:, ::-1]]
        graph.append(np.full(molecules.num_nodes[m], number))
        offset += molecules.num_nodes[m]
    arrays = (np.concatenate(atoms), np.concatenate(edges).T.copy(), np.concatenate(graph), molecules.y[chosen])
    return tuple(map(torch.from_numpy, arrays))


def test_gathered_batches_hold_their_graphs() -> None:
    store = MoleculeStore(DATA["train"], torch.device("cpu"))
    chosen, real = torch.tensor([4, 0, 17, 5]), torch.tensor([True, True, True, False])
    nodes, edges = store.sizes(torch.tensor([[4, 0, 17, 5], [1, 2, 3, 6]]), real)
    batch = store.gather(chosen, real, nodes, edges)
    atom, edge_index, graph, y = plain_batch(DATA["train"], [4, 0, 17])
    count = len(atom)
    assert batch.real.sum() == count
    assert torch.equal(batch.atom[:count], atom)
    assert torch.equal(batch.graph[:count], graph)
    assert (batch.graph[count:] == 4).all()
    assert torch.equal(batch.y[:3], y)
    ours = {tuple(e) for e in batch.edge_index.T.tolist()} - {(nodes - 1, nodes - 1)}
    assert ours == {tuple(e) for e in edge_index.T.tolist()}
    assert len(batch.atom) == nodes
    assert batch.edge_index.shape == (2, edges)


def train_plainly(model: nn.Module, seed: int, epochs: int) -> tuple[float, float]:
    """The protocol of the paper in the words of torch, with batches of varying size."""
    seed_dropout(model, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=RULE.rate, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, RULE.patience, min_lr=RULE.min_rate)

    def errors(molecules: Molecules, chosen: list[int]) -> torch.Tensor:
        atom, edge_index, graph, y = plain_batch(molecules, chosen)
        return (model(atom, edge_index, batch=graph, num_graphs=len(chosen)).squeeze(1) - y).abs()

    best, best_test = float("inf"), float("inf")
    for epoch in range(epochs):
        model.train()
        order = permutation(20, key_of(torch.tensor(0), 1, epoch)).tolist()
        for start in range(0, 20, BATCH):
            optimizer.zero_grad()
            errors(DATA["train"], order[start : start + BATCH]).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            val, test = (errors(DATA[part], list(range(9))).mean().item() for part in ("val", "test"))
        schedule.step(val)
        if val < best:
            best, best_test = val, test
    return best, best_test


@pytest.mark.parametrize(("backbone", "variant"), [("gcn", "nsr"), ("gin", "original"), ("sage", "original")])
def test_together_one_by_one_and_plainly_are_equal(backbone: Backbone, variant: Variant) -> None:
    settings = {"epochs": 6, "batch": BATCH, "rule": RULE}
    models = [build(backbone, variant, seed, fuse=True) for seed in (0, 1, 2)]
    together = train_molecules(models, DATA, [0, 1, 2], **settings)  # type: ignore[arg-type]
    alone = train_molecules([build(backbone, variant, 1)], DATA, [1], **settings)  # type: ignore[arg-type]
    assert together.val_mae[1] == pytest.approx(alone.val_mae[0], abs=1e-3)
    assert together.test_mae[1] == pytest.approx(alone.test_mae[0], abs=1e-3)
    val, test = train_plainly(build(backbone, variant, 1), 1, epochs=6)
    assert alone.val_mae[0] == pytest.approx(val, abs=1e-3)
    assert alone.test_mae[0] == pytest.approx(test, abs=1e-3)
    assert together.best_epoch[1] == alone.best_epoch[0]
    assert len(set(together.val_mae)) == 3
