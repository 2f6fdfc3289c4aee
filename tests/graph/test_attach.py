"""Attaching to PyG models: the contract on every kind of host, then what is particular to graphs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import HeteroData
from torch_geometric.nn import GAT, GCN, GIN, PNA, GraphSAGE, HeteroConv, Sequential, to_hetero
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils import to_torch_coo_tensor

import nsr
from contracts.attachment import AttachmentContract, Case, outputs, same, train_branches
from nsr.branches import find
from nsr.graph import GraphModel

NODES, WIDTH = 10, 8


def graph() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NODES, WIDTH, generator=generator), torch.randint(0, NODES, (2, 30), generator=generator)


def with_edge_features() -> tuple[Tensor, Tensor, Tensor]:
    return *graph(), torch.randn(30, 4, generator=torch.Generator().manual_seed(1))


def mlp(width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.BatchNorm1d(width), nn.ReLU())


class Own(MessagePassing):
    """A user's conv, in a user's module, with a name of its own for the features and an unused max beside it."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.in_channels = WIDTH
        self.lin = nn.Linear(2 * WIDTH, 5)

    def forward(self, feats: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, feats=feats)

    def message(self, feats_i: Tensor, feats_j: Tensor) -> Tensor:
        return self.lin(torch.cat([feats_i, feats_j], dim=-1))


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = Own(), pyg.SAGEConv(5, 5, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.pool(self.conv(feats=x, edge_index=edge_index), edge_index)


class Initial(nn.Module):
    """GCN2Conv takes the initial features too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.GCN2Conv(WIDTH, alpha=0.1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, x, edge_index)


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = HeteroConv(
            {
                ("a", "to", "b"): pyg.SAGEConv((WIDTH, 3), 6),
                ("b", "to", "b"): pyg.GATConv(3, 3, heads=2),
                ("b", "to", "a"): pyg.GraphConv((3, WIDTH), 6),
            }
        )

    def forward(self, a: Tensor, b: Tensor, edges: Tensor) -> dict[str, Tensor]:
        inside = edges.clamp(max=b.shape[0] - 1)
        across = torch.stack([edges[0], inside[1]])
        both = {("a", "to", "b"): across, ("b", "to", "b"): inside, ("b", "to", "a"): across.flip(0)}
        return self.conv({"a": a, "b": b}, both)


def two_sets() -> tuple[Tensor, Tensor, Tensor]:
    a, edges = graph()
    return a, torch.randn(6, 3, generator=torch.Generator().manual_seed(2)), edges


DEGREES = torch.tensor([1, 3, 4, 2])
HOSTS: dict[str, Case] = {
    "GCN": Case(lambda: GCN(WIDTH, 6, 2, 3, dropout=0.5), graph),
    "GCN jk": Case(lambda: GCN(WIDTH, 6, 2, 3, jk="cat"), graph),
    "GCN cached": Case(lambda: pyg.GCNConv(WIDTH, 6, cached=True), graph),
    "GraphSAGE": Case(lambda: GraphSAGE(WIDTH, 6, 2, 3, jk="max"), graph),
    "GIN": Case(lambda: GIN(WIDTH, 6, 2, 3, train_eps=True), graph),
    "GAT": Case(lambda: GAT(WIDTH, 6, 2, 3, heads=3, dropout=0.5), graph),
    "GATv2": Case(lambda: GAT(WIDTH, 6, 2, 4, heads=2, v2=True), graph),
    "PNA": Case(
        lambda: PNA(WIDTH, 6, 2, 3, aggregators=["mean", "sum"], scalers=["identity", "amplification"], deg=DEGREES),
        graph,
    ),
    "Sequential": Case(
        lambda: Sequential(
            "x, edge_index",
            [(pyg.GraphConv(WIDTH, 6), "x, edge_index -> x"), nn.ReLU(), (pyg.GCNConv(6, 3), "x, edge_index -> x")],
        ),
        graph,
    ),
    "own": Case(OwnModel, graph),
    "HeteroConv": Case(Relations, two_sets),
    "TransformerConv": Case(lambda: pyg.TransformerConv(WIDTH, 3, heads=2, edge_dim=4, dropout=0.3), with_edge_features),
    "ARMAConv": Case(lambda: pyg.ARMAConv(WIDTH, 6, num_stacks=2, num_layers=2), graph),
    "APPNP": Case(lambda: pyg.APPNP(K=2, alpha=0.1), graph, {"example": graph()}),
    "TAGConv": Case(lambda: pyg.TAGConv(WIDTH, 6), graph),
    "SGConv": Case(lambda: pyg.SGConv(WIDTH, 6, K=2), graph),
    "ChebConv": Case(lambda: pyg.ChebConv(WIDTH, 6, K=2), graph),
    "GCN2Conv": Case(Initial, graph),
    "GINEConv": Case(lambda: pyg.GINEConv(mlp(), edge_dim=4), with_edge_features),
    "EdgeConv": Case(lambda: pyg.EdgeConv(nn.Linear(2 * WIDTH, 6), aggr="sum"), graph, {"example": graph()}),
    "lazy": Case(lambda: pyg.GraphConv(-1, 6), graph, {"example": graph()}),
    "paper gcn": Case(lambda: GraphModel("gcn", nn.Linear(WIDTH, 6), 6, 3, layers=2), graph),
    "paper sage, raw": Case(lambda: GraphModel("sage", nn.Linear(WIDTH, 6), 6, 3, layers=2), graph, {"source": "raw"}),
    "paper gin, aggregate": Case(
        lambda: GraphModel("gin", nn.Linear(WIDTH, 6), 6, 3, layers=2), graph, {"source": "aggregate"}
    ),
}


class TestHosts(AttachmentContract):
    cases = HOSTS

    @pytest.fixture(params=HOSTS)
    def name(self, request: pytest.FixtureRequest) -> str:
        return request.param
