"""Shared work changes nothing: logits, gradients and BatchNorm's statistics are those of whole trees in one graph."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.data.tree import node_inputs, topology, tree_task
from nsr.experiments.graph_models import Variant, graph_model
from nsr.graph.models import Backbone, GraphModel
from nsr.training.batch_norm import row_weights, weigh_batch_norm
from nsr.training.tree_batches import assign_slots, grouped, sampled
from nsr.training.tree_model import TreeModel
from nsr.training.tree_plan import layer_plans

DEPTH, LEAVES, PAIRS, REPLICAS = 3, 8, 24, 2


def build(backbone: Backbone, variant: Variant, seed: int) -> GraphModel:
    model = graph_model(
        backbone,
        variant,
        lambda width: nn.Linear(2 * (LEAVES + 1), width),
        seed=seed,
        width=8,
        outputs=LEAVES,
        layers=DEPTH + 1,
        readout="root",
    )
    return weigh_batch_norm(model.double())


def whole_trees(model: nn.Module, permutations: np.ndarray, queries: np.ndarray, weight: Tensor) -> Tensor:
    """B whole trees as one disconnected graph: the task as the benchmark states it."""
    inputs = torch.from_numpy(node_inputs(permutations, queries))
    one_hot = F.one_hot(inputs, LEAVES + 1).flatten(2).double()  # shape: [B, n, 2 (L + 1)]
    trees, nodes, width = one_hot.shape
    edges = torch.from_numpy(topology(DEPTH).edge_index())
    edge_index = (edges.unsqueeze(1) + nodes * torch.arange(trees).view(1, -1, 1)).flatten(1)
    with row_weights(model, weight.repeat_interleave(nodes)):
        return model(one_hot.view(-1, width), edge_index, root=torch.arange(trees) * nodes)


def samples_of(kind: str) -> tuple[Tensor, Tensor]:
    """Pairs of each replica over few trees, so that work is shared, and which of them count."""
    count = torch.ones(REPLICAS, PAIRS, dtype=torch.float64)
    if kind == "grouped":
        trees = torch.tensor([[0, 2, 4], [7, 1, 5]])
        return (trees.unsqueeze(2) * LEAVES + torch.arange(LEAVES)).flatten(1), count
    if kind == "filled up":
        count[:, -3:] = 0
    generator = torch.Generator().manual_seed(0)
    return torch.randint(6 * LEAVES, (REPLICAS, PAIRS), generator=generator), count


@pytest.mark.parametrize("batched", ["full", "filled up", "grouped"])
@pytest.mark.parametrize("variant", ["original", "nsr", "raw-source", "post-aggregation"])
@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_equal_to_whole_trees(backbone: Backbone, variant: Variant, batched: str) -> None:
    models = [build(backbone, variant, seed) for seed in range(REPLICAS)]
    stacked = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in models]
    weights = {name: torch.stack([own[name].detach() for own in stacked]) for name in stacked[0]}
    parameters = {name: weights[name].requires_grad_() for name, _ in models[0].named_parameters()}

    samples, count = samples_of(batched)
    permutations = torch.from_numpy(tree_task(DEPTH).permutations).expand(REPLICAS, -1, -1)
    batch = grouped(permutations, samples, count) if batched == "grouped" else sampled(permutations, samples, count, 7)
    ours = TreeModel(models[0], DEPTH, batch.values.shape[1] // LEAVES, PAIRS)
    tree, query, label = samples // LEAVES, samples % LEAVES, batch.label
    assert torch.equal(label, permutations[0][tree, query] - 1)

    def expected(r: int) -> Tensor:
        return whole_trees(models[r], permutations[0][tree[r]].numpy(), query[r].numpy() + 1, count[r])

    def loss(logits: Tensor, r: int) -> Tensor:
        return (F.cross_entropy(logits, label[r], reduction="none") * count[r]).sum() / count[r].sum()

    losses, right = ours.loss(weights, batch)
    gradients = dict(zip(parameters, torch.autograd.grad(losses.sum(), list(parameters.values())), strict=True))
    for r, model in enumerate(models):
        plain = expected(r)
        torch.testing.assert_close(losses[r], loss(plain, r))
        assert right[r] == ((plain.argmax(1) == label[r]) * count[r]).sum()
        for name, gradient in zip(
            parameters, torch.autograd.grad(loss(plain, r), list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(gradients[name][r], gradient, msg=name)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(weights[name][r], buffer, msg=name)

    at_rest = ours.logits(weights, batch)
    for r, model in enumerate(models):
        model.eval()
        torch.testing.assert_close(at_rest[r], expected(r))


@pytest.mark.parametrize(
    ("depth", "pairs", "trees", "times"), [(6, 1024, 500, 9), (7, 2048, 250, 36), (8, 2048, 125, 72)]
)
def test_fewer_node_updates(depth: int, pairs: int, trees: int, times: float) -> None:
    updates = sum(len(plan.members) for plan in layer_plans("gcn", depth, trees, pairs))
    whole = pairs * (2 ** (depth + 1) - 1) * (depth + 1)
    assert whole / updates >= times


def test_uses_are_the_members_the_other_way_round() -> None:
    for plan in layer_plans("gin", 4, 3, 10):
        own = plan.members[: plan.first_pair if plan.own_moves else None, 0]
        children = plan.members[: plan.first_pair, 1:].flatten()
        for row, (as_own, as_child) in enumerate(plan.uses.tolist()):
            assert (row == plan.blank and as_own < 0) or as_own == _only(own == row)
            assert (row == plan.blank and as_child < 0) or as_child == _only(children == row)


def _only(there: Tensor) -> int:
    found = there.nonzero().flatten().tolist()
    assert len(found) <= 1
    return found[0] if found else -1


def test_a_model_of_another_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes 3 layers; the model has 4"):
        TreeModel(build("gcn", "nsr", 0), 2, 3, 12)


def test_slots() -> None:
    tree = torch.tensor([[5, 2, 5, 9], [1, 1, 1, 1]])
    slot, content = assign_slots(tree, 3)
    assert torch.equal(content.gather(1, slot), tree)
    assert content.tolist() == [[2, 5, 9], [1, 0, 0]]
