"""Layer by layer, in blocks, from disk: what the whole graph at once gives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCN, GCNConv, GraphSAGE, TAGConv

import nsr
from nsr.data.generated_graph import generated_graph
from nsr.graph.layerwise import InNeighbours, aggregated, infer, nodewise
from nsr.graph.models import GraphModel


def by_target(edge_index: torch.Tensor, nodes: int) -> InNeighbours:
    source, target = edge_index.numpy()
    order = np.argsort(target, kind="stable")
    pointer = np.concatenate([[0], np.cumsum(np.bincount(target, minlength=nodes))])
    return InNeighbours(pointer, source[order])


@pytest.fixture
def edge_index() -> torch.Tensor:
    # random, with self-loops, a repeated edge, a node (49) without members and a hub (0)
    edges = torch.randint(0, 49, (2, 300))
    loops = torch.tensor([[3, 3, 7], [3, 3, 7]])
    hub = torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.int64)])
    return torch.cat([edges, edges[:, :5], loops, hub], dim=1)


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
@pytest.mark.parametrize("branch", [False, True])
def test_equals_the_whole_graph(backbone: str, branch: bool, edge_index: torch.Tensor, tmp_path: Path) -> None:
    model = GraphModel(backbone, torch.nn.Linear(6, 8), width=8, outputs=3, layers=3)
    if branch:
        nsr.attach(model, init="paper")
    x = torch.randn(50, 6)
    expected = model.eval()(x, edge_index).detach().numpy()
    neighbours = by_target(edge_index, 50)
    np.testing.assert_allclose(infer(model, x.numpy(), neighbours, block=7), expected, atol=2e-5)
    np.testing.assert_allclose(infer(model, x.numpy(), neighbours, block=64, folder=tmp_path), expected, atol=2e-5)


@pytest.mark.parametrize("options", [{"improved": True}, {"add_self_loops": False}, {"cached": True}])
def test_degrees_of_the_whole_graph(options: dict[str, bool], edge_index: torch.Tensor) -> None:
    conv = GCNConv(4, 4, **options)
    x = torch.randn(50, 4)
    expected = conv(x, edge_index).detach().numpy()  # fills the cache where there is one
    kept = conv._cached_edge_index
    found = aggregated(conv, x.numpy(), by_target(edge_index, 50), block=11)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert conv._cached_edge_index is kept


def test_any_model_is_composed_of_its_layers(edge_index: torch.Tensor) -> None:
    for build in (GCN, GraphSAGE):
        model = build(5, 8, num_layers=2)
        nsr.attach(model, init="paper")
        x = torch.randn(50, 5)
        expected = model.eval()(x, edge_index).detach().numpy()
        neighbours = by_target(edge_index, 50)
        hidden = aggregated(model.convs[0], x.numpy(), neighbours, block=16)
        hidden = nodewise(model.act, hidden, block=16)
        np.testing.assert_allclose(aggregated(model.convs[1], hidden, neighbours, block=16), expected, atol=2e-5)


def test_a_layer_of_two_hops_is_refused(edge_index: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="looks further than the incoming edges"):
        aggregated(TAGConv(4, 4, K=2), np.random.randn(50, 4).astype(np.float32), by_target(edge_index, 50))


def test_wrong_inputs_are_named(edge_index: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="h has 3 rows, the graph 50 nodes"):
        aggregated(GCNConv(4, 4), np.zeros((3, 4), np.float32), by_target(edge_index, 50))
    model = GraphModel("gcn", torch.nn.Linear(6, 8), 8, 3, layers=1, readout="graph")
    with pytest.raises(ValueError, match="readout is 'graph'"):
        infer(model, np.zeros((50, 6), np.float32), by_target(edge_index, 50))


def test_a_generated_graph_on_disk(tmp_path: Path) -> None:
    graph = generated_graph(tmp_path / "graph", nodes=2000, edges=16000)
    model = GraphModel("gcn", torch.nn.Linear(16, 8), width=8, outputs=4, layers=2)
    nsr.attach(model, init="paper")
    neighbours = InNeighbours(graph.pointer, graph.source)
    target = np.repeat(np.arange(2000), np.diff(graph.pointer))
    edge_index = torch.from_numpy(np.stack([graph.source, target]))
    expected = model.eval()(torch.from_numpy(graph.features), edge_index).detach().numpy()
    found = infer(model, graph.features, neighbours, block=300, folder=tmp_path)
    np.testing.assert_allclose(found, expected, atol=2e-5)
