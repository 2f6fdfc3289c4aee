"""The diagnostic equals its definition (projections over the unfolded tree) and the known means."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from nsr.graph.diagnostic import accuracy_by_score, local_scores, null_space_scores, score_bins


def random_members(nodes: int, members: int, classes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source, target = torch.randint(nodes, (2, members))
    return source, target, torch.randn(members, dtype=torch.float64), torch.randint(classes, (nodes,))


def projected(source: Tensor, target: Tensor, t: Tensor, labels: Tensor, node: int) -> tuple[float, int]:
    """r and k of one aggregation by the projection matrix itself."""
    members = (target == node).nonzero().squeeze(1)
    s = one_hot(labels[source[members]], int(labels.max()) + 1).double()
    t = t[members]
    p = torch.eye(len(t), dtype=torch.float64) - torch.outer(t, t) / t.dot(t)
    return float((p @ s).square().sum() / s.square().sum()) if len(t) else 0.0, len(t)


def unfolded(source: Tensor, target: Tensor, t: Tensor, labels: Tensor, node: int, layers: int) -> tuple[float, float]:
    """Sums of k r and of k over the computation tree, by walking all of it."""
    if layers == 0:
        return 0.0, 0.0
    r, k = projected(source, target, t, labels, node)
    score, count = k * r, float(k)
    for member in source[target == node].tolist():
        below = unfolded(source, target, t, labels, member, layers - 1)
        score, count = score + below[0], count + below[1]
    return score, count


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_recursion_equals_brute_force_projection(layers: int) -> None:
    source, target, t, labels = random_members(nodes=12, members=30, classes=3)
    scores = null_space_scores(source, target, t, labels, 12, layers)
    for node in range(12):
        score, count = unfolded(source, target, t, labels, node, layers)
        assert scores[node].item() == pytest.approx(score / count if count else 0.0, abs=1e-12)


def test_uniform_coefficients_give_the_gini_impurity() -> None:
    source, target = torch.arange(6), torch.zeros(6, dtype=torch.long)
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    share, count = local_scores(source, target, torch.full((6,), 0.3), labels, 6)
    assert share[0].item() == pytest.approx(1 - (9 + 4 + 1) / 36)
    assert count.tolist() == [6, 0, 0, 0, 0, 0]


def test_only_the_direction_of_t_matters() -> None:
    source, target, t, labels = random_members(nodes=10, members=40, classes=4)
    scale = torch.rand(10, dtype=torch.float64)[target] + 0.5
    plain = null_space_scores(source, target, t, labels, 10, 2)
    torch.testing.assert_close(null_space_scores(source, target, -t * scale, labels, 10, 2), plain)


def test_nodes_without_members_and_without_coefficients() -> None:
    source, target = torch.tensor([0, 1]), torch.tensor([1, 2])
    scores = null_space_scores(source, target, torch.tensor([1.0, 0.0]), torch.tensor([0, 1, 1]), 3, 1)
    # no member: 0; one member, seen in full: 0; a zero coefficient sees nothing: 1
    assert scores.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.data
@pytest.mark.parametrize(("backbone", "expected"), [("gcn", 0.71469), ("gin", 0.71328), ("sage", 0.63590)])
def test_known_means_on_roman_empire(data_dir: Path, backbone: str, expected: float) -> None:
    with np.load(data_dir / "heterophilous/roman_empire_topology.npz") as file:
        once, labels = torch.from_numpy(file["edges"]).long(), torch.from_numpy(file["node_labels"]).long()
    edges = torch.cat([once, once.flip(1)]).T
    nodes = torch.arange(len(labels))
    if backbone in ("gcn", "gin"):  # the self-loop of GCN, the root member of GIN
        edges = torch.cat([edges, nodes.expand(2, -1)], dim=1)
    source, target = edges
    degree = torch.bincount(target).double()
    t = {
        "gcn": (degree[source] * degree[target]).rsqrt(),
        "gin": torch.ones(len(source)),
        "sage": 1 / degree[target],
    }[backbone]
    scores = null_space_scores(source, target, t, labels, len(labels), layers=4)
    assert scores.mean().item() == pytest.approx(expected, abs=5e-6)


def test_bins_are_even_and_keep_ties_together() -> None:
    assert torch.bincount(score_bins(torch.rand(1000))).tolist() == [100] * 10
    scores = torch.tensor([0.1] * 35 + [0.2] * 5 + [0.3] * 60)
    bins = score_bins(scores)
    for value in scores.unique():
        assert bins[scores == value].unique().numel() == 1

    assert bins[-1] > bins[35] > bins[0]


def test_accuracy_and_gain_per_bin() -> None:
    scores = torch.arange(20) / 20
    original = torch.arange(20) < 10
    nsr = torch.arange(20) < 15
    table = accuracy_by_score(scores, original, nsr, bins=4)
    assert table.count.tolist() == [5, 5, 5, 5]
    assert table.original.tolist() == [1, 1, 0, 0]
    assert table.gain.tolist() == [0, 0, 1, 0]


def test_an_empty_bin_is_nan() -> None:
    table = accuracy_by_score(torch.zeros(8), torch.ones(8, dtype=torch.bool), torch.ones(8, dtype=torch.bool), 2)
    assert table.count.tolist() == [8, 0]
    assert table.original[0] == 1
    assert table.original[1].isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(4)}, "one class index for each of the 4 nodes"),
        ({"labels": torch.full((4,), -1)}, "class indices from 0"),
        ({"source": torch.tensor([0, 4])}, "source runs from 0 to 4"),
        ({"coefficient": torch.ones(3)}, "one entry for each member"),
        ({"layers": 0}, "layers must be at least 1"),
    ],
)
def test_bad_input_is_named(change: dict, message: str) -> None:
    arguments = {
        "source": torch.tensor([0, 1]),
        "target": torch.tensor([1, 2]),
        "coefficient": torch.ones(2),
        "labels": torch.zeros(4, dtype=torch.long),
        "num_nodes": 4,
        "layers": 2,
    }
    with pytest.raises(ValueError, match=message):
        null_space_scores(**(arguments | change))
