"""The branch against the paper's own words: the literal form, member by member, is the reference."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv, GINConv, SAGEConv
from torch_geometric.utils import to_undirected

from nsr.graph import GraphResidual, Members, coefficients

NODES, TARGETS, WIDTH = 11, 7, 12


def literal(branch: GraphResidual, members: Members, source: Tensor, target: Tensor) -> Tensor:
    """Equation by equation: concatenate, gate every member, sum. Only ``residual`` and ``raw``."""
    message = branch.message(source)
    z = members.residual(message) if branch.source == "residual" else message[members.source]
    context = torch.cat([source[members.source], target[members.target], z], dim=1)
    hidden = torch.nn.functional.gelu(branch.gate_hidden(context))
    gate = torch.sigmoid(branch.gate_output(hidden))
    count = torch.bincount(members.target, minlength=members.num_targets).clamp(min=1)
    total = torch.zeros(members.num_targets, z.shape[1], dtype=z.dtype).index_add(0, members.target, gate * z)
    return branch.output(branch.dropout(branch.norm(total / count.sqrt().unsqueeze(1))))


def random_members(heads: int, dtype: torch.dtype = torch.float32) -> Members:
    """Node 0 has one member, node 1 none, node 2 only coefficients that are 0; the others have either sign."""
    target = torch.cat([torch.tensor([0, 2, 2, 2]), torch.randint(3, TARGETS, (26,))])
    coefficient = torch.randn(30, heads, dtype=dtype)
    coefficient[1:4] = 0
    return Members(torch.randint(0, NODES, (30,)), target, coefficient, TARGETS)


def tables(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(NODES, 9, dtype=dtype), torch.randn(TARGETS, 5, dtype=dtype)


@pytest.mark.parametrize("source", ["residual", "raw"])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_split_gate_is_the_literal_gate(source: str, heads: int) -> None:
    branch = GraphResidual(9, 5, WIDTH, 4, heads=heads, source=source, init="paper")
    members, (h_source, h_target) = random_members(heads), tables()
    leaves = [h_source.requires_grad_(), h_target.requires_grad_(), members.coefficient.requires_grad_()]
    leaves += branch.parameters()
    weight = torch.randn(TARGETS, 4)

    outputs, gradients = [], []
    for form in (branch(members, h_source, h_target), literal(branch, members, h_source, h_target)):
        outputs.append(form)
        gradients.append(torch.autograd.grad((form * weight).sum(), leaves, allow_unused=True))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for split, whole in zip(*gradients, strict=True):
        if whole is None:  # the raw control does not depend on the coefficients
            assert split is None or not split.any()
        else:
            torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-5)


def test_gradients_in_double_precision() -> None:
    branch = GraphResidual(3, 2, 4, 2, heads=2, init="paper").double()
    members = Members(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 0, 0, 1, 1]), torch.rand(5, 2).double() + 0.5, 3)

    def update(coefficient: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return branch(Members(members.source, members.target, coefficient, 3), source, target)

    inputs = (members.coefficient, torch.randn(3, 3).double(), torch.randn(3, 2).double())
    assert torch.autograd.gradcheck(update, tuple(value.requires_grad_() for value in inputs))


def test_the_special_nodes() -> None:
    branch = GraphResidual(9, 5, WIDTH, 4, init="paper")
    members, (h_source, h_target) = random_members(heads=1), tables()
    residual = members.residual(branch.message(h_source))
    assert not residual[members.target == 0].any(), "the only member of a node has no residual, exactly"
    zero = members.target == 2
    torch.testing.assert_close(residual[zero], branch.message(h_source)[members.source[zero]])

    update = branch(members, h_source, h_target)
    constant = branch.output(branch.norm(torch.zeros(WIDTH)))
    for node in (0, 1):  # one member, none
        torch.testing.assert_close(update[node], constant, rtol=0, atol=1e-6)
    update.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in branch.parameters())


def test_an_empty_graph() -> None:
    branch = GraphResidual(9, 5, WIDTH, 4, init="paper")
    none = torch.zeros(0, dtype=torch.long)
    h_source, h_target = tables()
    update = branch(Members(none, none, torch.zeros(0, 1), TARGETS), h_source, h_target)
    torch.testing.assert_close(update, branch.output(branch.norm(torch.zeros(TARGETS, WIDTH))))
    assert branch(Members(none, none, torch.zeros(0, 1), 0), h_source[:0], h_target[:0]).shape == (0, 4)


def test_only_the_direction_of_the_coefficients_counts() -> None:
    branch = GraphResidual(9, 5, WIDTH, 4, init="paper")
    members, (h_source, h_target) = random_members(heads=1), tables()
    scale = torch.logspace(-6, 6, TARGETS)[members.target].unsqueeze(1)
    scaled = Members(members.source, members.target, members.coefficient * -scale, TARGETS)
    torch.testing.assert_close(
        branch(scaled, h_source, h_target), branch(members, h_source, h_target), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("width", [8, 32, 128])
@pytest.mark.parametrize("source", ["residual", "raw", "aggregate"])
def test_parameters_follow_the_formula(width: int, source: str) -> None:
    branch = GraphResidual(width, width, width, width, source=source)
    assert sum(parameter.numel() for parameter in branch.parameters()) == 7 * width**2 + 6 * width


def test_initialisation() -> None:
    identity, paper = GraphResidual(9, 5, WIDTH, 4), GraphResidual(9, 5, WIDTH, 4, init="paper")
    members, (h_source, h_target) = random_members(heads=1), tables()
    for branch in (identity, paper):
        assert (branch.gate_output.bias == -2).all()
    assert not identity(members, h_source, h_target).any()
    assert paper(members, h_source, h_target).abs().mean() > 0.01
    with torch.no_grad():
        for parameter in identity.parameters():
            parameter.fill_(1.0)
    identity.reset_parameters()
    assert (identity.gate_output.bias == -2).all()
    assert not identity(members, h_source, h_target).any()


def test_the_aggregate_control_sees_nothing_but_the_aggregate() -> None:
    """Members may change as they like while their weighted sum stays; the residual branch sees the change."""
    members, (h_source, h_target) = random_members(heads=1, dtype=torch.float64), tables(torch.float64)
    matrix = torch.zeros(TARGETS, NODES, dtype=torch.float64)
    matrix.index_put_((members.target, members.source), members.coefficient[:, 0], accumulate=True)
    invisible = torch.linalg.svd(matrix).Vh[-1]  # a change of the nodes that no aggregate shows
    torch.testing.assert_close(matrix @ invisible, torch.zeros(TARGETS, dtype=torch.float64))
    changed = h_source + torch.outer(invisible, torch.randn(9, dtype=torch.float64))
    change = {}
    for source in ("residual", "raw", "aggregate"):
        branch = GraphResidual(9, 5, WIDTH, 4, source=source, init="paper").double()
        change[source] = (branch(members, changed, h_target) - branch(members, h_source, h_target)).abs().max().item()
    assert change["aggregate"] < 1e-10
    assert min(change["residual"], change["raw"]) > 1e-3


def test_the_aggregate_control_by_hand() -> None:
    branch = GraphResidual(9, 5, WIDTH, 4, heads=3, source="aggregate", init="paper")
    members, (h_source, _) = random_members(heads=3), tables()
    shared = Members(members.source, members.target, members.coefficient.mean(1, keepdim=True), TARGETS)
    y, s = shared.aggregate(h_source), members.aggregate(branch.message(h_source))
    hidden = torch.nn.functional.gelu(branch.gate_hidden(torch.cat([y.relu(), (-y).relu(), s], dim=1)))
    by_hand = branch.output(branch.norm(torch.sigmoid(branch.gate_output(hidden)) * s))
    torch.testing.assert_close(branch(members, h_source, None), by_hand, rtol=1e-5, atol=1e-5)


def test_swapped_siblings() -> None:
    """Section 4.2.2: two leaves swap their values; the parent's aggregate stays, the residual changes."""
    key, value = torch.nn.Linear(4, WIDTH), torch.nn.Linear(4, WIDTH, bias=False)
    keys = torch.eye(4)

    def nodes(values: list[int]) -> Tensor:
        return key(keys) + value(torch.eye(4)[values])  # an encoded key, an encoded value, a shared bias

    before, after = nodes([1, 2, 0, 3]), nodes([1, 0, 2, 3])  # nodes 1 and 2, children of node 0, swap theirs
    edge_index = torch.tensor([[1, 2, 0], [0, 0, 0]])  # children and a self-loop
    conv = SAGEConv(WIDTH, WIDTH)
    members = coefficients(conv, before, edge_index)
    torch.testing.assert_close(members.aggregate(before), members.aggregate(after))
    difference = members.residual(before) - members.residual(after)
    assert difference.norm() > 0.1
    branch = GraphResidual(WIDTH, WIDTH, WIDTH, WIDTH, init="paper")
    assert (branch(members, before, before) - branch(members, after, after))[0].abs().max() > 1e-3


def test_autocast_keeps_the_residual_wide() -> None:
    """Only products of weights may be bf16: the error stays far below that of an all-bf16 branch."""
    branch = GraphResidual(WIDTH, WIDTH, WIDTH, WIDTH, init="paper")
    members = Members(torch.randint(0, NODES, (200,)), torch.randint(0, TARGETS, (200,)), torch.rand(200, 1), TARGETS)
    h_source, h_target = torch.randn(NODES, WIDTH), torch.randn(TARGETS, WIDTH)
    exact = branch(members, h_source, h_target)
    seen: list[torch.dtype] = []
    handle = branch.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = branch(members, h_source, h_target)
    handle.remove()
    assert seen == [torch.float32]
    assert (mixed - exact).norm() / exact.norm() < 0.02
    low = branch.bfloat16()(members, h_source.bfloat16(), h_target.bfloat16())
    assert low.dtype == torch.bfloat16
    assert low.isfinite().all()


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of heads 5"):
        GraphResidual(9, 5, WIDTH, 4, heads=5)
    with pytest.raises(ValueError, match="in_source=0"):
        GraphResidual(0, 5, WIDTH, 4)
    with pytest.raises(ValueError, match="source is 'messages'"):
        GraphResidual(9, 5, WIDTH, 4, source="messages")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init is 'zero'"):
        GraphResidual(9, 5, WIDTH, 4, init="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 heads, the branch was made for 1"):
        GraphResidual(9, 5, WIDTH, 4)(random_members(heads=3), *tables())


def violation(members: Members, x: Tensor) -> float:
    """``|t^T Z|_inf`` relative to the size of what the sum is made of, ``sum |t| |z|``."""
    z, t = members.residual(x), members.coefficient
    rows = torch.zeros(members.num_targets, x.shape[1]).index_add(0, members.target, t * z)
    size = torch.zeros(members.num_targets, x.shape[1]).index_add(0, members.target, t.abs() * z.abs())
    return float(rows.abs().max() / size.max())


CONVS = {
    "gcn": lambda d: GCNConv(d, d),
    "sage": lambda d: SAGEConv(d, d),
    "gin": lambda d: GINConv(torch.nn.Identity()),
}


@pytest.mark.parametrize("backbone", CONVS)
def test_residuals_are_invisible_on_random_graphs(backbone: str) -> None:
    x, edge_index = torch.randn(500, 16), torch.randint(0, 500, (2, 4000))
    assert violation(coefficients(CONVS[backbone](16), x, edge_index), x) <= 2e-6


@pytest.mark.data
@pytest.mark.parametrize("name", ["minesweeper", "tolokers"])
@pytest.mark.parametrize("backbone", CONVS)
def test_residuals_are_invisible_on_real_graphs(name: str, backbone: str, data_dir: Path) -> None:
    with np.load(data_dir / "heterophilous" / f"{name}.npz") as file:
        edges, nodes = torch.from_numpy(file["edges"]).long(), len(file["node_labels"])
    x, edge_index = torch.randn(nodes, 8), to_undirected(edges.t())
    assert violation(coefficients(CONVS[backbone](8), x, edge_index), x) <= 2e-6
