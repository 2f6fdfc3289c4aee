"""Preset coefficients are PyG's own, and PyG reads them."""

import torch
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from nsr.training.normalisation import gcn_members, preset_normalisation


def test_equal_to_pyg() -> None:
    edge_index = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 1, 1]])
    members, coefficient = gcn_members(edge_index, 5)
    expected_members, expected = gcn_norm(edge_index, num_nodes=5)
    assert torch.equal(members, expected_members)
    torch.testing.assert_close(coefficient, expected)


def test_pyg_reads_what_is_preset_and_nothing_else() -> None:
    conv, x = GCNConv(3, 3), torch.randn(4, 3)
    nodes = torch.arange(4).expand(2, -1)
    preset_normalisation(conv, nodes, torch.full((4,), 2.0))
    torch.testing.assert_close(conv(x, torch.randint(4, (2, 9))), 2 * conv.lin(x) + conv.bias)
