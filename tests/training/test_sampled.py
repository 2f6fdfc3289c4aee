"""Training on sampled neighbourhoods of a graph on disk. What needs a sampling backend carries the marker."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import nsr
from nsr.data.disk_graph import DiskGraph
from nsr.data.generated_graph import generated_graph
from nsr.graph.layerwise import InNeighbours, infer
from nsr.graph.models import GraphModel
from nsr.training.distributed import Group
from nsr.training.sampled import SampledProtocol, neighbour_loader, train_sampled
from training import processes


@pytest.fixture
def graph(tmp_path: Path) -> DiskGraph:
    return generated_graph(tmp_path / "graph", nodes=2000, edges=16_000, features=4)


def test_without_a_backend_it_says_how_to_get_one(graph: DiskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsr.training.sampled.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-build-isolation torch-scatter torch-sparse"):
        neighbour_loader(graph, torch.arange(10), (5, 5), 10)


def test_what_cannot_be_shared_or_filled_is_refused(graph: DiskGraph) -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="3 cannot be shared equally by 2 processes"):
        train_sampled(model, graph, np.arange(100), SampledProtocol(batch=3), Group(1, 2))
    with pytest.raises(ValueError, match="needs at least as many nodes; there are 100"):
        train_sampled(model, graph, np.arange(100), SampledProtocol(batch=101), Group())


@pytest.mark.sampling
def test_a_batch_holds_the_seeds_first_and_real_edges(graph: DiskGraph) -> None:
    edges = {
        (int(source), node)
        for node in range(graph.num_nodes)
        for source in graph.source[graph.pointer[node] : graph.pointer[node + 1]]
    }
    seeds = torch.arange(100, 164)
    (batch,) = neighbour_loader(graph, seeds, (3, 2), 64)
    assert batch.batch_size == 64
    assert torch.equal(batch.n_id[:64], seeds)
    assert torch.equal(batch.x, torch.from_numpy(graph.features[batch.n_id]))
    assert torch.equal(batch.y, torch.from_numpy(graph.labels[batch.n_id]))
    assert {tuple(edge) for edge in batch.n_id[batch.edge_index].T.tolist()} <= edges
    assert torch.bincount(batch.edge_index[1]).max() <= 3


@pytest.mark.sampling
@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_all_neighbours_sampled_equal_the_whole_graph(graph: DiskGraph, backbone: str) -> None:
    model = GraphModel(backbone, torch.nn.Linear(4, 8), 8, 4, layers=1)
    nsr.attach(model, init="paper")
    exact = infer(model, graph.features, InNeighbours(graph.pointer, graph.source))
    seeds = torch.arange(0, 2000, 7)
    (batch,) = neighbour_loader(graph, seeds, (-1, -1), len(seeds))  # one hop more: GCN needs its neighbours' degrees
    with torch.no_grad():
        sampled = model(batch.x, batch.edge_index)[: len(seeds)]
    np.testing.assert_allclose(sampled.numpy(), exact[seeds], atol=2e-5)


@pytest.mark.sampling
def test_nsr_learns_what_the_mean_makes_invisible(graph: DiskGraph) -> None:
    def accuracy(branch: bool) -> float:
        torch.manual_seed(0)
        model = GraphModel("sage", torch.nn.Linear(4, 16), 16, 4, layers=1)
        if branch:
            nsr.attach(model)
        train_sampled(
            model, graph, np.arange(1000), SampledProtocol(fanout=(-1,), batch=100, steps=300, lr=1e-2), Group()
        )
        logits = infer(model, graph.features, InNeighbours(graph.pointer, graph.source))
        return float((logits[1000:].argmax(1) == graph.labels[1000:]).mean())

    plain, residual = accuracy(False), accuracy(True)
    assert residual > plain + 0.03, (plain, residual)


@pytest.mark.sampling
def test_the_order_of_the_seeds_is_shared(graph: DiskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["nsr.training.sampled"]
    protocol, nodes = SampledProtocol(fanout=(2,), batch=8, steps=30), np.arange(100)

    def seeds(group: Group) -> list[list[int]]:
        return [data.n_id[: data.batch_size].tolist() for data in module._batches(graph, nodes, protocol, group)]

    whole, halves = seeds(Group()), [seeds(Group(rank, 2)) for rank in (0, 1)]
    assert len(whole) == 30
    assert [a + b for a, b in zip(*halves, strict=True)] == whole


@pytest.mark.sampling
def test_two_processes_train_the_weights_of_one(tmp_path: Path) -> None:
    assert processes.start(2, processes.sampled, tmp_path / "two") == [0, 0]
    processes.sampled(Group(), tmp_path / "one")
    one = load_file(tmp_path / "one-0")
    for rank in (0, 1):
        half = load_file(tmp_path / f"two-{rank}")
        for name, expected in one.items():
            torch.testing.assert_close(half[name], expected, atol=1e-5, rtol=0)
