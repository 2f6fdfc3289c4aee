"""The paper's backbones by hand, and what a branch adds to them."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nsr
import nsr.graph.models
from nsr.graph import GraphModel, matched_width
from nsr.graph.models import graph_layer, mean_pool

NODES, WIDTH = 9, 6


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, 25))


def adjacency(edge_index: Tensor) -> Tensor:
    """How often each node sends to each, ``[target, source]``."""
    matrix = torch.zeros(NODES, NODES)
    return matrix.index_put((edge_index[1], edge_index[0]), torch.ones(edge_index.shape[1]), accumulate=True)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_gcn_layer_by_hand() -> None:
    h, edge_index = graph()
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    layer = graph_layer("gcn", WIDTH)
    a = adjacency(edge_index) + torch.eye(NODES)
    scale = a.sum(1).rsqrt()
    conv = (scale[:, None] * a * scale) @ layer.conv.lin(h) + layer.conv.bias
    torch.testing.assert_close(layer(h, edge_index), h + F.gelu(layer.update[0](conv)), rtol=1e-5, atol=1e-5)


def test_sage_layer_by_hand() -> None:
    h, edge_index = graph()
    layer = graph_layer("sage", WIDTH)
    a = adjacency(edge_index)
    mean = a / a.sum(1, keepdim=True).clamp(min=1) @ h
    conv = layer.conv.lin_l(mean) + layer.conv.lin_r(h)
    torch.testing.assert_close(layer(h, edge_index), h + F.gelu(layer.update[0](conv)), rtol=1e-5, atol=1e-5)


def test_gin_layer_by_hand() -> None:
    h, edge_index = graph()
    layer = graph_layer("gin", WIDTH)
    assert not any(name.endswith("eps") for name, _ in layer.named_parameters()), "eps = 0 is fixed"
    value = adjacency(edge_index) @ h + h
    for start in (0, 3):
        value = layer.conv.nn[start](value)
        value = (value - value.mean(0)) / (value.var(0, correction=0) + 1e-5).sqrt()
        value = value.relu()
    torch.testing.assert_close(layer(h, edge_index), h + value, rtol=1e-4, atol=1e-5)


def test_readouts() -> None:
    x, edge_index = graph()
    models = {
        readout: GraphModel("gcn", nn.Linear(WIDTH, 8), 8, 3, layers=2, readout=readout)
        for readout in ("node", "root", "graph")
    }
    for model in models.values():
        model.load_state_dict(models["node"].state_dict())
    scores = models["node"](x, edge_index)
    root, batch = torch.tensor([2, 5]), torch.tensor([0] * 4 + [2] * 5)
    torch.testing.assert_close(models["root"](x, edge_index, root=root), scores[root])
    pooled = models["graph"](x, edge_index, batch=batch, num_graphs=3)
    torch.testing.assert_close(pooled[0], scores[:4].mean(0))  # the head is affine, so it commutes with the mean
    torch.testing.assert_close(pooled[1], models["graph"].head.bias)  # a graph without nodes
    torch.testing.assert_close(pooled[2], scores[4:].mean(0))
    with pytest.raises(ValueError, match="needs root"):
        models["root"](x, edge_index)
    with pytest.raises(ValueError, match="needs batch"):
        models["graph"](x, edge_index)


def test_atom_types_are_embedded() -> None:
    model = GraphModel("gin", nn.Embedding(28, 8), 8, 1, layers=1, readout="graph")
    batch = torch.zeros(NODES, dtype=torch.long)
    _, edge_index = graph()
    assert model(torch.randint(0, 28, (NODES,)), edge_index, batch=batch, num_graphs=1).shape == (1, 1)


def test_pooling_an_empty_batch() -> None:
    assert mean_pool(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), 2).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize(("backbone", "layer"), [("gcn", (1, 3)), ("sage", (2, 3)), ("gin", (2, 6))])
def test_parameters_follow_the_formula(backbone: str, layer: tuple[int, int]) -> None:
    """A layer has ``a d² + b d`` weights, its branch ``7 d² + 6 d``, and nothing else is added."""
    d, features, outputs, layers = 16, 10, 4, 3
    model = GraphModel(backbone, nn.Linear(features, d), d, outputs, layers)
    around = (features + 1) * d + (d + 1) * outputs
    assert count(model) == around + layers * (layer[0] * d**2 + layer[1] * d)
    before = count(model)
    sites = nsr.attach(model, init="paper")
    assert [site.name for site in sites] == [f"layers.{i}" for i in range(layers)]
    assert count(model) - before == sites.parameters == layers * (7 * d**2 + 6 * d)


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_the_update_is_added_to_the_whole_layer(backbone: str) -> None:
    """Behind the norm, the skip and all: ``h_next = layer(h) + Δ``, with the members of the conv inside."""
    h, edge_index = graph()
    layer = graph_layer(backbone, WIDTH).eval()
    plain = layer(h, edge_index)
    members = nsr.graph.coefficients(layer.conv, h, edge_index)
    nsr.attach(layer, init="paper")
    torch.testing.assert_close(layer(h, edge_index), plain + layer.null_space(members, h, h), rtol=1e-5, atol=1e-5)


def test_the_backbones_know_nothing_of_branches() -> None:
    source = inspect.getsource(nsr.graph.models)
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not any("nsr" in line for line in imports)


def test_matched_width() -> None:
    def build(width: int) -> nn.Module:
        return GraphModel("gcn", nn.Linear(7, width), width, 2, layers=4)

    model = build(128)
    nsr.attach(model)
    width = matched_width(build, count(model))
    sizes = {w: count(build(w)) for w in (width - 1, width, width + 1)}
    assert min(sizes, key=lambda w: abs(sizes[w] - count(model))) == width
    assert matched_width(build, count(build(64)), multiple=16) == 64
    assert matched_width(build, 1) == 1


def test_wrong_names_are_said() -> None:
    with pytest.raises(ValueError, match="backbone is 'mlp'"):
        GraphModel("mlp", nn.Linear(3, 3), 3, 2, layers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="readout is 'sum'"):
        GraphModel("gcn", nn.Linear(3, 3), 3, 2, layers=1, readout="sum")  # type: ignore[arg-type]
