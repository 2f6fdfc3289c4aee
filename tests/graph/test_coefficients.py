"""Every reader against the conv itself: the members' weighted sum is the conv's own aggregate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.typing import OptTensor
from torch_geometric.utils import to_torch_coo_tensor

from nsr.graph import Members, attach, coefficients

NODES, WIDTH = 12, 8


@pytest.fixture
def graph() -> tuple[Tensor, Tensor]:
    """Features and edges with a self-loop, a node with one neighbour and two nodes (10, 11) without any."""
    x = torch.randn(NODES, WIDTH)
    source = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2, 7, 8, 3, 6, 9])
    target = torch.tensor([1, 2, 0, 2, 2, 2, 3, 4, 5, 5, 3, 7, 8])
    return x, torch.stack([source, target])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def aggregate_of(conv: MessagePassing, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Tensor]:
    """The first call of ``propagate`` in a forward pass, by PyG's own hook: its arguments and its result."""
    calls: list[tuple[dict[str, Any], Tensor]] = []
    handle = conv.register_propagate_forward_hook(lambda _, inputs, out: calls.append((inputs[-1], out.clone())))
    conv(*args, **kwargs)
    handle.remove()
    return calls[0]


def as_table(conv: MessagePassing, value: Tensor) -> Tensor:
    return value.movedim(conv.node_dim, 0).flatten(1)


CONVS: dict[str, Callable[[], MessagePassing]] = {
    "gcn": lambda: pyg.GCNConv(WIDTH, 6),
    "gcn improved": lambda: pyg.GCNConv(WIDTH, 6, improved=True),
    "gcn no loops": lambda: pyg.GCNConv(WIDTH, 6, add_self_loops=False),
    "gcn unnormalised": lambda: pyg.GCNConv(WIDTH, 6, normalize=False),
    "gcn cached": lambda: pyg.GCNConv(WIDTH, 6, cached=True),
    "gcn mean": lambda: pyg.GCNConv(WIDTH, 6, aggr="mean"),
    "gcn reversed": lambda: pyg.GCNConv(WIDTH, 6, flow="target_to_source"),
    "sage mean": lambda: pyg.SAGEConv(WIDTH, 6),
    "sage sum": lambda: pyg.SAGEConv(WIDTH, 6, aggr="sum"),
    "sage projected": lambda: pyg.SAGEConv(WIDTH, 6, project=True),
    "sage reversed": lambda: pyg.SAGEConv(WIDTH, 6, flow="target_to_source"),
    "graph sum": lambda: pyg.GraphConv(WIDTH, 6),
    "graph mean": lambda: pyg.GraphConv(WIDTH, 6, aggr="mean"),
    "gat": lambda: pyg.GATConv(WIDTH, 5, heads=3),
    "gat averaged": lambda: pyg.GATConv(WIDTH, 5, heads=3, concat=False),
    "gat dropout": lambda: pyg.GATConv(WIDTH, 5, heads=3, dropout=0.5),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 5, heads=3),
    "transformer": lambda: pyg.TransformerConv(WIDTH, 5, heads=3),
    "transformer dropout": lambda: pyg.TransformerConv(WIDTH, 5, heads=3, dropout=0.5),
    "arma": lambda: pyg.ARMAConv(WIDTH, 6, num_stacks=2, num_layers=2),
    "appnp": lambda: pyg.APPNP(K=3, alpha=0.1),
    "tag": lambda: pyg.TAGConv(WIDTH, 6, K=2),
    "sg": lambda: pyg.SGConv(WIDTH, 6, K=2),
    "cheb": lambda: pyg.ChebConv(WIDTH, 6, K=3),
    "gcn2": lambda: pyg.GCN2Conv(WIDTH, alpha=0.1),
}
WEIGHTED = ["gcn", "gcn improved", "gcn unnormalised", "graph sum", "graph mean", "arma", "appnp", "tag", "sg", "cheb"]


@pytest.mark.parametrize("name", CONVS)
def test_members_reproduce_the_aggregate(name: str, graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv = CONVS[name]()
    extra = {"x_0": x} if name == "gcn2" else {}
    torch.manual_seed(1)  # attention dropout draws the same numbers both times
    arguments, aggregate = aggregate_of(conv, x, edge_index=edge_index, **extra)
    torch.manual_seed(1)
    members = coefficients(conv, x, edge_index)
    _compare(conv, members, arguments, aggregate)


@pytest.mark.parametrize("name", WEIGHTED)
def test_members_reproduce_the_aggregate_with_edge_weights(name: str, graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv, weight = CONVS[name](), torch.rand(edge_index.shape[1]) + 0.1
    arguments, aggregate = aggregate_of(conv, x, edge_index, edge_weight=weight)
    _compare(conv, coefficients(conv, x, edge_index, weight), arguments, aggregate)


def _compare(conv: MessagePassing, members: Members, arguments: dict[str, Any], aggregate: Tensor) -> None:
    summed = arguments.get("value", arguments.get("x"))
    table = summed[0 if conv.flow == "source_to_target" else 1] if isinstance(summed, tuple) else summed
    assert members.heads == getattr(conv, "heads", 1)
    torch.testing.assert_close(
        members.aggregate(as_table(conv, table)), as_table(conv, aggregate), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("train_eps", [False, True])
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("bipartite", [False, True])
def test_gin_has_its_root_as_a_member(
    train_eps: bool, aggr: str, bipartite: bool, graph: tuple[Tensor, Tensor]
) -> None:
    x, edge_index = graph
    conv = pyg.GINConv(mlp(), eps=0.3, train_eps=train_eps, aggr=aggr)
    features = (x, torch.randn(9, WIDTH)) if bipartite else x
    seen: list[Tensor] = []
    handle = conv.nn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    conv(features, edge_index)
    handle.remove()
    members = coefficients(conv, features, edge_index)
    table = members.source_table(*features) if bipartite else x
    assert members.num_roots == members.num_targets == (9 if bipartite else NODES)
    torch.testing.assert_close(members.aggregate(table), seen[0], rtol=1e-5, atol=1e-5)
    assert members.coefficient.requires_grad == train_eps  # the branch's loss reaches a trainable eps


def test_gin_without_target_features_has_no_root(graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    assert coefficients(pyg.GINConv(mlp()), (x, None), edge_index, size=(NODES, 9)).num_roots == 0


class Squared(pyg.GCNConv):
    """A subclass with a message of its own: the parent's coefficients no longer hold."""

    def message(self, x_j: Tensor, edge_weight: OptTensor) -> Tensor:
        return super().message(x_j, edge_weight).square()


MESSAGE_VIEW: dict[str, Callable[[], MessagePassing]] = {
    "gine": lambda: pyg.GINEConv(mlp(), edge_dim=4),
    "edge": lambda: pyg.EdgeConv(nn.Linear(2 * WIDTH, 6), aggr="mean"),
    "pna mean": lambda: pyg.PNAConv(WIDTH, 6, ["mean"], ["identity"], deg=torch.tensor([2, 4, 3, 1])),
    "cg": lambda: pyg.CGConv(WIDTH, aggr="mean"),
    "resgated": lambda: pyg.ResGatedGraphConv(WIDTH, 6),
    "leconv": lambda: pyg.LEConv(WIDTH, 6),
    "lg": lambda: pyg.LGConv(),
    "supergat": lambda: pyg.SuperGATConv(WIDTH, 5, heads=2),
    "gated": lambda: pyg.GatedGraphConv(WIDTH, num_layers=1),
    "subclass": lambda: Squared(WIDTH, 6),
}


@pytest.mark.parametrize("name", MESSAGE_VIEW)
def test_message_view_reproduces_the_aggregate(name: str, graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv = MESSAGE_VIEW[name]().eval()
    extra = {"edge_attr": torch.randn(edge_index.shape[1], 4)} if name == "gine" else {}
    _, aggregate = aggregate_of(conv, x, edge_index, **extra)
    members = coefficients(conv, x, edge_index, **extra)
    assert members.messages is not None
    assert torch.equal(members.source, torch.arange(members.messages.shape[0]))
    torch.testing.assert_close(members.aggregate(members.messages), as_table(conv, aggregate), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:Converting sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize(
    "name",
    ["gcn", "gcn unnormalised", "sage mean", "sage sum", "graph mean", "gat", "gatv2", "transformer", "sg", "tag"],
)
def test_a_sparse_adjacency_gives_the_same_members(
    name: str, layout: torch.layout, graph: tuple[Tensor, Tensor]
) -> None:
    x, edge_index = graph
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]  # PyG adds a second self-loop in a sparse matrix
    conv = CONVS[name]()
    members = coefficients(conv, x, edge_index)
    adjacency = to_torch_coo_tensor(edge_index, size=NODES).t().coalesce()
    sparse = coefficients(conv, x, adjacency if layout == torch.sparse_coo else adjacency.to_sparse_csr())
    assert dense(members, x.shape[0]).allclose(dense(sparse, x.shape[0]), atol=1e-6)


def dense(members: Members, sources: int) -> Tensor:
    """The aggregation as a matrix, ``[T, S, H]``."""
    matrix = torch.zeros(members.num_targets, sources, members.heads)
    return matrix.index_put((members.target, members.source), members.coefficient.detach(), accumulate=True)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_fused_message_view_is_the_same(graph: tuple[Tensor, Tensor]) -> None:
    """LGConv multiplies with a sparse adjacency without ever making its messages."""
    x, edge_index = graph
    conv = pyg.LGConv(normalize=False)
    adjacency = to_torch_coo_tensor(edge_index, size=NODES).t().to_sparse_csr()
    members = coefficients(conv, x, adjacency)
    assert members.messages is not None
    torch.testing.assert_close(members.aggregate(members.messages), conv(x, adjacency))
    torch.testing.assert_close(members.aggregate(members.messages), conv(x, edge_index))


@pytest.mark.parametrize("order", ["row", "col"])  # by column, GraphConv multiplies without making messages
def test_an_edge_index_object_gives_the_same_members(order: str, graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv, weight = pyg.GraphConv(WIDTH, 6), torch.rand(edge_index.shape[1])
    sorting = edge_index[0 if order == "row" else 1].argsort(stable=True)
    ordered = EdgeIndex(edge_index[:, sorting], sparse_size=(NODES, NODES), sort_order=order)
    members = coefficients(conv, x, ordered, weight[sorting])
    torch.testing.assert_close(dense(members, NODES), dense(coefficients(conv, x, edge_index, weight), NODES))


def test_a_bipartite_graph_indexes_its_own_sides(graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv, other = pyg.SAGEConv((WIDTH, 3), 6), torch.randn(9, 3)
    arguments, aggregate = aggregate_of(conv, (x, other), edge_index)
    members = coefficients(conv, (x, other), edge_index)
    assert members.num_targets == 9
    torch.testing.assert_close(members.aggregate(arguments["x"][0]), aggregate)


def test_reading_leaves_the_conv_alone(graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    cached, gin = pyg.GCNConv(WIDTH, 6, cached=True), pyg.GINConv(mlp())
    state = {key: value.clone() for key, value in gin.state_dict().items()}
    for conv in (cached, gin):
        before = dict(vars(conv))
        coefficients(conv, x, edge_index)
        assert vars(conv) == before
    assert cached._cached_edge_index is None
    assert all(torch.equal(state[key], value) for key, value in gin.state_dict().items())


def test_an_attached_conv_is_read_like_any_other(graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv = pyg.GCNConv(WIDTH, 6)
    plain = coefficients(conv, x, edge_index)
    attach(conv)
    assert torch.equal(coefficients(conv, x, edge_index).coefficient, plain.coefficient)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: pyg.SAGEConv(WIDTH, 6, aggr="max"), "MaxAggregation selects"),
        (lambda: pyg.SAGEConv(WIDTH, 6, aggr="min"), "MinAggregation selects"),
        (lambda: pyg.SAGEConv(WIDTH, 6, aggr="median"), "MedianAggregation selects"),
        (lambda: pyg.SAGEConv(WIDTH, 6, aggr="lstm"), "LSTMAggregation is not a weighted sum"),
        (lambda: pyg.SAGEConv(WIDTH, 6, aggr="softmax"), "SoftmaxAggregation is not a weighted sum"),
        (lambda: pyg.SAGEConv(WIDTH, 6, aggr=["mean", "max"]), "MaxAggregation selects"),
        (
            lambda: pyg.PNAConv(WIDTH, 6, ["mean", "std"], ["identity"], deg=torch.tensor([1, 2])),
            "StdAggregation is not a weighted sum",
        ),
        (lambda: pyg.SGConv(WIDTH, 6, cached=True), "use cached=False"),
        (lambda: pyg.GCNConv(WIDTH, 6, decomposed_layers=2), "decomposed_layers > 1"),
        (lambda: pyg.EGConv(WIDTH, 8), "overrides aggregate"),
    ],
)
def test_what_is_not_linear_is_refused(
    make: Callable[[], MessagePassing], word: str, graph: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(ValueError, match=word):
        coefficients(make(), *graph)


def test_a_conv_that_propagates_twice_is_refused_in_the_message_view(graph: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(ValueError, match="more than once"):
        attach(pyg.GatedGraphConv(WIDTH, num_layers=2), example=graph)


def test_wrong_edge_indices_are_named(graph: tuple[Tensor, Tensor]) -> None:
    x, edge_index = graph
    conv = pyg.SAGEConv(WIDTH, 6)
    with pytest.raises(ValueError, match=r"float32; expected integers"):
        coefficients(conv, x, edge_index.float())
    with pytest.raises(ValueError, match=r"expected \[2, E\]"):
        coefficients(conv, x, edge_index.t())
    with pytest.raises(ValueError, match="takes no edge weights"):
        coefficients(conv, x, edge_index, torch.ones(13))
    with pytest.raises(IndexError, match="larger than 11"):
        coefficients(conv, x, edge_index + 5)


def test_asking_leaves_running_statistics_alone(graph: tuple[Tensor, Tensor]) -> None:
    conv = pyg.EdgeConv(nn.Sequential(nn.Linear(2 * WIDTH, 6), nn.BatchNorm1d(6)), aggr="add")
    before = {name: buffer.clone() for name, buffer in conv.named_buffers()}
    coefficients(conv, *graph)
    assert all(torch.equal(buffer, before[name]) for name, buffer in conv.named_buffers())
