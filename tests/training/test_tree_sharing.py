"""Shared work changes nothing: logits, losses and every gradient are those of whole trees in one batch."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.data.tree import node_inputs, topology, tree_task
from nsr.graph.models import Backbone, GraphModel
from nsr.training.batch_norm import row_weights, weigh_batch_norm
from nsr.training.tree_sharing import SharedTrees, assign_slots

DEPTH, LEAVES, BATCH = 3, 8, 24


def plain_logits(model: nn.Module, permutations: np.ndarray, queries: np.ndarray, weight: Tensor) -> Tensor:
    """B whole trees as one disconnected graph: the task as the benchmark states it."""
    inputs = torch.from_numpy(node_inputs(permutations, queries))
    one_hot = F.one_hot(inputs, LEAVES + 1).flatten(2).double()  # shape: [B, n, 2 (L + 1)]
    trees, nodes, width = one_hot.shape
    edges = torch.from_numpy(topology(DEPTH).edge_index())
    edge_index = (edges.unsqueeze(1) + nodes * torch.arange(trees).view(1, -1, 1)).flatten(1)
    root = torch.arange(trees) * nodes
    with row_weights(model, weight.repeat_interleave(nodes)):
        return model(one_hot.view(-1, width), edge_index, root=root)


def build(backbone: Backbone) -> GraphModel:
    encoder = nn.Linear(2 * (LEAVES + 1), 8)
    return GraphModel(backbone, encoder, width=8, outputs=LEAVES, layers=DEPTH + 1, readout="root").double()


def batch(kind: str) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Pairs over few trees, so that sharing happens, and which of them count."""
    rng = np.random.default_rng(0)
    weight = torch.ones(BATCH, dtype=torch.float64)
    if kind == "grouped":
        return np.repeat([0, 2, 4], LEAVES), np.tile(np.arange(1, LEAVES + 1), 3), weight
    if kind == "filled up":
        weight[-3:] = 0
    return rng.integers(0, 6, BATCH), rng.integers(1, LEAVES + 1, BATCH), weight


@pytest.mark.parametrize("batched", ["full", "filled up", "grouped"])
@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_equal_to_whole_trees(backbone: Backbone, batched: str) -> None:
    plain = weigh_batch_norm(build(backbone))
    slots = 3 if batched == "grouped" else 7
    shared = SharedTrees(copy.deepcopy(plain), DEPTH, BATCH, slots, grouped=batched == "grouped")
    permutations = tree_task(DEPTH).permutations
    tree, query, weight = batch(batched)
    label = torch.from_numpy(permutations[tree, query - 1]) - 1
    slot, content = assign_slots(torch.from_numpy(tree), slots)

    expected = plain_logits(plain, permutations[tree], query, weight)
    out = shared(torch.from_numpy(permutations)[content], torch.from_numpy(query), slot, weight)
    torch.testing.assert_close(out[weight > 0], expected[weight > 0])

    def gradients(model: nn.Module, logits: Tensor) -> tuple[Tensor, ...]:
        loss = (F.cross_entropy(logits, label, reduction="none") * weight).sum() / weight.sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    for ours, theirs in zip(gradients(shared, out), gradients(plain, expected), strict=True):
        torch.testing.assert_close(ours, theirs)
    for (name, ours), theirs in zip(shared.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)

    plain.eval(), shared.eval()
    out = shared(torch.from_numpy(permutations)[content], torch.from_numpy(query), slot, weight)
    torch.testing.assert_close(out, plain_logits(plain, permutations[tree], query, weight))


@pytest.mark.parametrize(
    ("depth", "batch", "slots", "expected"), [(6, 1024, 500, 6.8), (7, 2048, 250, 29), (8, 2048, 125, 64)]
)
def test_fewer_node_updates(depth: int, batch: int, slots: int, expected: float) -> None:
    encoder = nn.Linear(2 * (2**depth + 1), 4)
    shared = SharedTrees(GraphModel("gcn", encoder, 4, 2**depth, depth + 1, readout="root"), depth, batch, slots)
    updates = sum(batch + graph.kept for graph in shared.graphs)
    plain = batch * (2 ** (depth + 1) - 1) * (depth + 1)
    assert plain / updates >= expected


def test_slots() -> None:
    tree = torch.tensor([[5, 2, 5, 9], [1, 1, 1, 1]])
    slot, content = assign_slots(tree, 3)
    assert torch.equal(content.gather(1, slot), tree)
    assert content.tolist() == [[2, 5, 9], [1, 0, 0]]
