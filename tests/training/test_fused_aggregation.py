"""The fused convs give PyG's own results, alone, with a branch and as replicas."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GATConv

import nsr
from nsr.graph.models import Backbone, GraphModel
from nsr.training.fused_aggregation import fuse_aggregation
from nsr.training.replicas import Replicas


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_equal_to_pyg(backbone: Backbone, attached: bool) -> None:
    x, edge_index = torch.randn(30, 6).double(), torch.randint(25, (2, 90))  # nodes 25 to 29 have no neighbours
    plain = [GraphModel(backbone, nn.Linear(6, 16), 16, 3, layers=2).double() for _ in range(3)]
    fused = [fuse_aggregation(copy.deepcopy(model)) for model in plain]
    if attached:
        for one, two in zip(plain, fused, strict=True):
            nsr.attach(one, init="paper")
            nsr.attach(two, init="paper")
            two.load_state_dict(one.state_dict())
    expected = torch.stack([model(x, edge_index) for model in plain])
    torch.testing.assert_close(torch.stack([copy.deepcopy(m)(x, edge_index) for m in fused]), expected)
    parameters = [p for model in plain for p in model.parameters()]
    gradients = torch.autograd.grad(expected.square().sum(), parameters)
    single = [model.float() for model in fused]
    replicas = Replicas(single)
    out = replicas.call(lambda model, x, e: model(x, e), x.float(), edge_index, in_dims=(None, None), training=True)
    torch.testing.assert_close(out, expected.float(), atol=1e-4, rtol=1e-4)
    replicas.backward(out.square().sum((1, 2)))
    count = len(gradients) // 3
    for number, ours in enumerate(replicas._gradients.values()):
        theirs = torch.stack([gradients[r * count + number] for r in range(3)]).float()
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_stays_fused_under_a_branch(backbone: Backbone) -> None:
    """PyG generates a ``propagate`` when a layer is made or copied and writes it into the layer's class."""

    class Sums(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.nsr.segment_sum.default
            return func(*args, **(kwargs or {}))

    layers = 2
    model = fuse_aggregation(GraphModel(backbone, nn.Linear(6, 16), 16, 3, layers=layers))
    nsr.attach(model, init="paper")
    with Sums() as sums:
        copy.deepcopy(model)(torch.randn(30, 6), torch.randint(30, (2, 90)))
    assert sums.count == 2 * layers, "the layer's own sum and the branch's"


def test_other_convs_are_refused() -> None:
    with pytest.raises(ValueError, match="GATConv has no fused form"):
        fuse_aggregation(nn.Sequential(GATConv(4, 4)))
