"""Attaching to PyG models: the contract on every kind of host, then what is particular to graphs."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import HeteroData
from torch_geometric.nn import GAT, GCN, GIN, LINKX, PNA, GraphSAGE, HeteroConv, Sequential, to_hetero
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
    "TransformerConv": Case(
        lambda: pyg.TransformerConv(WIDTH, 3, heads=2, edge_dim=4, dropout=0.3), with_edge_features
    ),
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


def attached(model: nn.Module, **options: Any) -> nn.Module:
    """The model with branches that act."""
    nsr.attach(model, **options)
    train_branches(model)
    return model


class AllKinds(nn.Module):
    """Coefficients of every kind: normalised, uniform, per head, by message, with a root, and a layer around a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.gcn, self.sage, self.gat = pyg.GCNConv(WIDTH, 6), pyg.SAGEConv(6, 6), pyg.GATConv(6, 3, heads=2)
        self.gine, self.head = pyg.GINEConv(nn.Linear(6, 6)), GraphModel("gin", nn.Linear(6, 6), 6, 3, layers=1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.gat(self.sage(self.gcn(x, edge_index).relu(), edge_index).relu(), edge_index)
        return self.head(self.gine(x, edge_index, x[edge_index[1]]), edge_index)


@pytest.mark.parametrize(
    ("backend", "make"),
    [
        ("aot_eager", AllKinds),
        ("inductor", lambda: GraphModel("gcn", nn.Linear(WIDTH, 6), 6, 3, layers=1)),
        pytest.param("inductor", AllKinds, marks=pytest.mark.slow),
    ],
)
def test_compiled_equals_eager(backend: str, make: Any) -> None:
    """Without a graph break, and with branches that act."""
    torch._dynamo.reset()
    model = attached(make())
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    losses = [run(*graph()).square().mean() for run in (compiled, plain)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_gradient_checkpointing() -> None:
    x, edge_index = graph()
    model = attached(pyg.GATConv(WIDTH, 4, heads=2))
    gradients = []
    for run in (model, lambda *args: checkpoint(model, *args, use_reentrant=False)):
        model.zero_grad()
        run(x, edge_index).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert same(*gradients)


def test_autocast() -> None:
    x, edge_index = graph()
    for backbone in ("gcn", "sage", "gin"):
        model = attached(GraphModel(backbone, nn.Linear(WIDTH, 16), 16, 3, layers=2).eval())
        exact = model(x, edge_index)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(x, edge_index)
        assert mixed.dtype == torch.bfloat16
        assert (mixed - exact).norm() / exact.norm() < 0.03


def test_replicas_by_vmap() -> None:
    x, edge_index = graph()
    for backbone in ("gcn", "sage", "gin"):
        models = [attached(GraphModel(backbone, nn.Linear(WIDTH, 6), 6, 3, layers=2).eval()) for _ in range(3)]
        parameters, buffers = torch.func.stack_module_state(models)

        def forward(parameters: dict[str, Tensor], buffers: dict[str, Tensor], model: nn.Module = models[0]) -> Tensor:
            return torch.func.functional_call(model, (parameters, buffers), (x, edge_index))

        together = torch.func.vmap(forward)(parameters, buffers)
        apart = torch.stack([model(x, edge_index) for model in models])
        torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: GraphSAGE(WIDTH, 6, 2, 3), lambda: GAT(WIDTH, 6, 2, 3, add_self_loops=False)])
def test_a_sampled_batch_gives_what_the_whole_graph_gives(make: Any) -> None:
    """NeighborLoader's form: destinations first, nodes relabelled, hops outermost last, trimmed layer by layer."""
    x, edge_index = graph()
    model = attached(make().eval())
    whole = model(x, edge_index)
    seeds = torch.tensor([3, 7])
    nodes, edges, nodes_per_hop, edges_per_hop = seeds, [], [len(seeds)], []
    frontier = seeds
    for _ in range(2):
        hop = edge_index[:, torch.isin(edge_index[1], frontier)]
        fresh = torch.unique(hop[0][~torch.isin(hop[0], nodes)])
        nodes, frontier = torch.cat([nodes, fresh]), fresh
        edges.append(hop)
        nodes_per_hop.append(len(fresh))
        edges_per_hop.append(hop.shape[1])
    label = torch.zeros(NODES, dtype=torch.long)
    label[nodes] = torch.arange(len(nodes))
    batch = label[torch.cat(edges, dim=1)]
    sampled = model(x[nodes], batch, num_sampled_nodes_per_hop=nodes_per_hop, num_sampled_edges_per_hop=edges_per_hop)
    torch.testing.assert_close(sampled[:2], whole[seeds], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make", [lambda: pyg.SAGEConv(WIDTH, 6), lambda: pyg.GINConv(mlp()), lambda: pyg.GATConv(WIDTH, 6)]
)
def test_bipartite_input_equals_the_square_graph(make: Any) -> None:
    """Targets are the first sources: ``(x, x[:T])`` gives the first rows of ``x``."""
    x, edge_index = graph()
    model = attached(make().eval())
    inward = edge_index[:, edge_index[1] < 4]
    torch.testing.assert_close(model((x, x[:4]), inward), model(x, inward)[:4], rtol=1e-5, atol=1e-5)


def test_targets_without_features() -> None:
    x, edge_index = graph()
    conv = pyg.SAGEConv(WIDTH, 6)
    plain = conv((x, None), edge_index, size=(NODES, 12))
    nsr.attach(conv)
    assert torch.equal(conv((x, None), edge_index, size=(NODES, 12)), plain)
    train_branches(conv)
    assert conv((x, None), edge_index, size=(NODES, 12)).shape == (12, 6)


@pytest.mark.parametrize("make", [lambda: pyg.GCNConv(WIDTH, 6), lambda: pyg.SAGEConv(WIDTH, 6), lambda: pyg.LGConv()])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_adjacency_equals_an_edge_index(make: Any) -> None:
    x, edge_index = graph()
    edge_index = torch.unique(edge_index[:, edge_index[0] != edge_index[1]], dim=1)
    model = attached(make().eval(), example=(x, edge_index))
    adjacency = to_torch_coo_tensor(edge_index, size=NODES).t().to_sparse_csr()
    torch.testing.assert_close(model(x, adjacency), model(x, edge_index), rtol=1e-5, atol=1e-5)


def hetero_data() -> HeteroData:
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(6, WIDTH), torch.randn(4, WIDTH)
    data["a", "to", "b"].edge_index = torch.stack([torch.randint(0, 6, (9,)), torch.randint(0, 4, (9,))])
    data["b", "to", "a"].edge_index = torch.stack([torch.randint(0, 4, (9,)), torch.randint(0, 6, (9,))])
    return data


@pytest.mark.parametrize("first", ["attach", "to_hetero"])
def test_heterogeneous_graphs(first: str) -> None:
    data = hetero_data()
    model = GraphSAGE((WIDTH, WIDTH), 6, 2, 3)
    if first == "attach":
        nsr.attach(model)
    model = to_hetero(model, data.metadata())
    if first == "to_hetero":
        nsr.attach(model)
    assert len(nsr.sites(model)) == 4, "one branch for each relation of each layer"
    inputs = (data.x_dict, data.edge_index_dict)
    with nsr.disabled(model):
        plain = outputs(model, inputs)
    assert same(outputs(model, inputs), plain)
    train_branches(model)
    assert not same(outputs(model, inputs), plain)


def test_attention_weights_are_still_returned() -> None:
    x, edge_index = graph()
    conv = pyg.GATConv(WIDTH, 3, heads=2)
    plain, (edges, alpha) = conv(x, edge_index, return_attention_weights=True)
    nsr.attach(conv)
    out, (edges_after, alpha_after) = conv(x, edge_index, return_attention_weights=True)
    assert same([plain, edges, alpha], [out, edges_after, alpha_after])


def test_explanations_reach_the_branch() -> None:
    """PyG swaps ``propagate`` on the instance for an explanation; the branch must not fall silent."""
    x, edge_index = graph()
    conv = attached(pyg.SAGEConv(WIDTH, 6))
    with nsr.disabled(conv):
        plain = conv(x, edge_index)
    conv.explain, conv._edge_mask, conv._apply_sigmoid = True, torch.ones(30), False
    explained = conv(x, edge_index)
    assert not torch.equal(explained, plain)
    nsr.detach(conv)
    assert torch.equal(conv(x, edge_index), plain)
    conv._edge_mask = torch.zeros(30)
    assert not torch.equal(conv(x, edge_index), plain), "the detached conv still explains"
    conv.explain = False
    assert torch.equal(conv(x, edge_index), plain)


def test_resetting_resets_the_branch_too() -> None:
    x, edge_index = graph()
    model = attached(GCN(WIDTH, 6, 2))
    model.reset_parameters()
    with nsr.disabled(model):
        plain = model(x, edge_index)
    assert torch.equal(model(x, edge_index), plain)


def test_selection_by_name() -> None:
    model = GCN(WIDTH, 6, 3)
    assert [site.name for site in nsr.attach(model, include="convs.[02]")] == ["convs.0", "convs.2"]
    assert list(find(model)) == ["convs.0.null_space", "convs.2.null_space"]
    nsr.detach(model)
    assert len(nsr.attach(model, include=["convs.1"])) == 1
    nsr.detach(model)
    with pytest.raises(ValueError, match=r"matches nothing.*convs\.0"):
        nsr.attach(model, include=["convs.1", "layers.*"])


def test_the_table_says_where_and_what() -> None:
    model = nn.ModuleDict({"near": pyg.SAGEConv(WIDTH, 6), "far": pyg.SAGEConv(6, 3, aggr="max")})
    dry = nsr.sites(model)
    assert not any(isinstance(module, nsr.Branch) for module in model.modules())
    text = str(nsr.attach(model))
    assert str(dry) == text
    for word in ("near", "SAGEConv", "edges, mean", "not far: SAGEConv has no null-space residual: its MaxAggregation"):
        assert word in text
    assert [site.name for site in nsr.sites(model)] == ["near"]


def test_widths_follow_the_layer() -> None:
    """The output's width, at least the input's up to 64, and a share for every head."""
    cases = {(1433, 16): 64, (1433, 256): 256, (64, 7): 64, (7, 32): 32, (128, 128): 128}
    for (inward, outward), width in cases.items():
        assert nsr.sites(pyg.GCNConv(inward, outward))[0].width == width
    averaged = nsr.sites(pyg.GATConv(7, 7, heads=3, concat=False))[0]
    assert (averaged.width, averaged.outputs, averaged.heads) == (9, 7, 3)
    conv = pyg.GCNConv(8, 8)
    assert nsr.attach(conv, width=20)[0].width == 20


def test_what_cannot_be_attached_is_said() -> None:
    with pytest.raises(ValueError, match="has no message-passing layer"):
        nsr.attach(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="MaxAggregation selects"):
        nsr.attach(GraphSAGE(WIDTH, 6, 2, aggr="max"))
    mixed = nn.ModuleDict({"near": pyg.SAGEConv(WIDTH, 6), "far": pyg.SAGEConv(6, 3, aggr="max")})
    with pytest.raises(ValueError, match="far: SAGEConv has no null-space residual"):
        nsr.attach(mixed, include="*")
    with pytest.raises(ValueError, match=r"lazy or does not say.*example="):
        nsr.attach(pyg.GraphConv(-1, 6))
    with pytest.raises(ValueError, match=r"did not reach \['unused'\]"):
        nsr.attach(Unused(), example=graph())
    with pytest.raises(ValueError, match="no branch to detach"):
        nsr.detach(GCN(WIDTH, 6, 2))


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = pyg.GCNConv(WIDTH, 6), pyg.GCNConv(WIDTH, 6)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.used(x, edge_index)


def test_a_checkpoint_of_another_width_is_refused(tmp_path) -> None:
    nsr.save(attached(GCN(WIDTH, 6, 2)), tmp_path / "six.safetensors")
    with pytest.raises(ValueError, match=r"another branch at 'convs\.0\.null_space'"):
        nsr.load(attached(GCN(WIDTH, 10, 2)), tmp_path / "six.safetensors")


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_wrong_graphs(backbone: str) -> None:
    x, edge_index = graph()
    model = attached(GraphModel(backbone, nn.Linear(WIDTH, 6), 6, 3, layers=2).eval())
    with pytest.raises((IndexError, RuntimeError), match=r"out of|larger than"):
        model(x, edge_index + 5)
    with pytest.raises((ValueError, RuntimeError, IndexError), match="int"):
        model(x, edge_index.float())
    empty = torch.zeros(2, 0, dtype=torch.long)
    alone = model(x, empty)
    assert alone.isfinite().all()
    torch.testing.assert_close(alone[:1], model(x[:1], empty), rtol=1e-5, atol=1e-5)
    assert model(x[:0], empty).shape == (0, 3)


def test_a_leading_batch_axis_is_refused() -> None:
    x, edge_index = graph()
    conv = attached(pyg.GCNConv(WIDTH, 6))
    with pytest.raises(ValueError, match=r"a branch takes \[N, F\]"):
        conv(x.expand(2, -1, -1), edge_index)


def test_the_example_leaves_the_model_alone() -> None:
    x, edge_index = graph()
    lazy = GCN(-1, 6, 2, cached=True)
    state = torch.get_rng_state()
    sites = nsr.sites(lazy, example={"x": x, "edge_index": edge_index})
    assert torch.equal(torch.get_rng_state(), state)
    assert sites[0].inputs == (WIDTH, WIDTH)
    assert isinstance(lazy.convs[0].lin.weight, nn.UninitializedParameter)
    assert lazy.convs[0]._cached_edge_index is None


def test_a_model_at_rest_gets_branches_at_rest() -> None:
    x, edge_index = graph()
    model = GCN(WIDTH, 6, 2).eval()
    nsr.attach(model, init="paper", dropout=0.5)
    assert torch.equal(model(x, edge_index), model(x, edge_index))


def test_threads_may_share_a_model() -> None:
    model = attached(GCN(WIDTH, 16, 2).eval())
    generator = torch.Generator().manual_seed(7)
    inputs = [
        (torch.randn(n, WIDTH, generator=generator), torch.randint(0, n, (2, 4 * n), generator=generator))
        for n in range(100, 160)
    ]
    with torch.inference_mode():
        expected = [model(*one) for one in inputs]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda one: model(*one), inputs))
    for ours, alone in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, alone)


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    x, edge_index = graph()
    model = attached(pyg.ResGatedGraphConv(WIDTH, WIDTH))
    expected = model(x, edge_index)
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, :3], edge_index)
    with nsr.disabled(model):
        model(x, edge_index)
        model(x, edge_index)
    assert torch.equal(copy.deepcopy(model)(x, edge_index), expected)


@pytest.mark.parametrize(
    "conv", [pyg.SAGEConv(WIDTH, 6), pyg.GINConv(nn.Linear(WIDTH, 6)), pyg.GATConv(WIDTH, 6, add_self_loops=False)]
)
def test_a_layer_may_take_its_first_nodes_as_targets(conv: MessagePassing) -> None:
    class Sampled(nn.Module):
        message_passing = "conv"

        def __init__(self) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Tensor, edge_index: Tensor, targets: int) -> Tensor:
            return self.conv((x, x[:targets]), edge_index)

    x, edge_index = graph()
    inputs = (x, edge_index.clamp(max=3), 4)
    layer = Sampled()
    plain = layer(*inputs)
    nsr.attach(layer, example=inputs)
    assert torch.equal(layer(*inputs), plain)
    train_branches(layer)
    assert layer(*inputs).shape == plain.shape
    assert not torch.equal(layer(*inputs), plain)


def test_a_site_that_cannot_be_read_is_named_and_the_rest_attached() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.twice = pyg.GCNConv(WIDTH, 6), pyg.GatedGraphConv(WIDTH, num_layers=2)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv(self.twice(x, edge_index), edge_index)

    inputs = graph()
    model = Mixed()
    plain = model(*inputs)
    sites = nsr.attach(model, example=inputs)
    assert [site.name for site in sites] == ["conv"]
    assert [(r.name, "more than once" in r.reason) for r in sites.refused] == [("twice", True)]
    assert torch.equal(model(*inputs), plain)
    nsr.detach(model)
    assert torch.equal(model(*inputs), plain)


def test_what_reads_no_table_of_features_is_refused() -> None:
    with pytest.raises(ValueError, match="edge_lin: the first argument of its forward is no table of node features"):
        nsr.attach(LINKX(NODES, WIDTH, 6, 3, 2))


def test_a_branch_made_by_hand_is_no_obstacle() -> None:
    class WithReadout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.readout = pyg.GCNConv(WIDTH, 6), nsr.NullSpaceResidual(6)

    model = WithReadout()
    assert [site.name for site in nsr.attach(model)] == ["conv"]
    nsr.detach(model)
    assert isinstance(model.readout, nsr.NullSpaceResidual)


def test_a_child_of_the_branchs_name_is_not_overwritten() -> None:
    conv = pyg.GCNConv(WIDTH, 6)
    conv.null_space = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="it has a child named 'null_space' already"):
        nsr.attach(conv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_source_in_half_precision(dtype: torch.dtype) -> None:
    x, edge_index = graph()
    for source in ("residual", "raw", "aggregate"):
        model = GCN(WIDTH, 6, 2).to(dtype)
        nsr.attach(model, source=source, init="paper")
        assert model(x.to(dtype), edge_index).dtype == dtype


def test_a_second_derivative_says_why_not() -> None:
    x, edge_index = graph()
    model = attached(pyg.GraphConv(WIDTH, 6))
    (slope,) = torch.autograd.grad(model(x.requires_grad_(), edge_index).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        slope.square().sum().backward()


@pytest.mark.parametrize("where", ["forward", "message"])
def test_a_graph_break_within_the_host_loses_nothing(where: str) -> None:
    class Broken(pyg.SAGEConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if where == "forward":
                torch._dynamo.graph_break()
            return super().forward(x, edge_index)

        def message(self, x_j: Tensor) -> Tensor:
            if where == "message":
                torch._dynamo.graph_break()
            return x_j

    inputs = graph()
    conv = Broken(WIDTH, 6)
    nsr.attach(conv, init="paper")
    torch._dynamo.reset()
    with torch.no_grad():  # else torch warns of its own look at a gradient between two graphs
        torch.testing.assert_close(torch.compile(conv, backend="eager")(*inputs), conv(*inputs))
