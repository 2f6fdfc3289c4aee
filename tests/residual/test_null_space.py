import pytest
import torch
from torch import nn

import nsr

OPERATORS = {
    "segment": (nsr.Segment(torch.tensor([0, 0, 1, 0, 2]), torch.tensor([0.2, 0.3, 1.0, 0.5, 1.0]), 3, "copy"), (5, 8)),
    "adjoint": (nsr.Segment(torch.tensor([0, 0, 1, 0, 2]), torch.tensor([0.7, -1.3, 0.9, 0.5, 3.3]), 3), (5, 8)),
    "dense": (nsr.Dense(torch.randn(3, 6, generator=torch.Generator().manual_seed(0))), (2, 6, 8)),
    "function": (nsr.Function(nn.AvgPool2d(3, stride=2), (5, 7)), (2, 8, 5, 7)),
}


@pytest.fixture(params=OPERATORS)
def case(request: pytest.FixtureRequest) -> tuple[nsr.LinearOperator, torch.Tensor]:
    op, shape = OPERATORS[request.param]
    return op, torch.randn(*shape)


def trained(dim: int) -> nsr.NullSpaceResidual:
    branch = nsr.NullSpaceResidual(dim, code=16)
    nn.init.normal_(branch.decoder.weight)
    return branch


def test_an_untrained_branch_changes_nothing(case: tuple) -> None:
    op, x = case
    assert torch.equal(op.apply(x) + nsr.NullSpaceResidual(8)(op, x), op.apply(x))


def test_a_trained_branch_sees_what_the_operator_cannot(case: tuple) -> None:
    op, x = case
    other = x + op.residual(torch.randn_like(x))  # differs inside the null space alone
    branch = trained(8)
    torch.testing.assert_close(op.apply(x), op.apply(other), rtol=0, atol=1e-5)
    assert (branch(op, x) - branch(op, other)).abs().max() > 1e-2


def test_a_linear_shared_code_vanishes_when_reaggregated(case: tuple) -> None:
    op, x = case
    shared = torch.randn(8, 4)
    codes = (op.residual(x).movedim(op.feature_axis, -1) @ shared).movedim(-1, op.feature_axis)
    assert op.apply(codes).abs().max() < 1e-4


def test_the_gate_keeps_it_from_vanishing(case: tuple) -> None:
    op, x = case
    assert trained(8)(op, x).abs().max() > 1e-2


def test_a_lonely_member_has_code_zero() -> None:
    op, _ = OPERATORS["adjoint"]
    delta = trained(8)(op, torch.randn(5, 8))
    assert torch.equal(delta[1:], torch.zeros(2, 8))  # groups 1 and 2 have one member each
    assert delta[0].abs().max() > 0


def test_gradients_are_finite_where_residuals_are_zero() -> None:
    op, _ = OPERATORS["segment"]
    x = torch.ones(5, 8, requires_grad=True)
    trained(8)(op, x).square().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_disabled_is_a_zero_update(case: tuple) -> None:
    op, x = case
    branch = trained(8)
    with nsr.disabled(branch):
        assert torch.equal(branch(op, x), torch.zeros_like(op.apply(x)))
    assert branch(op, x).abs().max() > 0


def test_widths_that_do_not_fit_are_refused() -> None:
    op, _ = OPERATORS["segment"]
    with pytest.raises(ValueError, match="expected 4 features on axis -1"):
        nsr.NullSpaceResidual(4)(op, torch.randn(5, 8))
    with pytest.raises(ValueError, match="at least 1"):
        nsr.NullSpaceResidual(0)


def test_compiled_equals_eager() -> None:
    op, shape = OPERATORS["segment"]
    branch, x = trained(8), torch.randn(*shape)
    compiled = torch.compile(lambda v: op.apply(v) + branch(op, v), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), op.apply(x) + branch(op, x))


def test_it_learns_a_difference_inside_a_group() -> None:
    """Two members with a fixed sum: only their difference tells the class, and the sum hides it."""
    op = nsr.Segment(torch.arange(64).repeat_interleave(2), torch.full((128,), 0.5), 64, "copy")
    difference = torch.randn(64, 1)
    members = torch.stack([difference, -difference], dim=1).reshape(128, 1)
    x = torch.cat([members, members.sign() * torch.ones(128, 3)], dim=1)
    target = difference.abs()
    branch, head = nsr.NullSpaceResidual(4, code=16), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*branch.parameters(), *head.parameters()], lr=1e-2)
    assert op.apply(x).abs().max() == 0
    for _ in range(300):
        loss = (head(op.apply(x) + branch(op, x)) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1 * target.var()  # the operator's own output is 0 everywhere and can explain nothing


def test_long_rows_in_fp16_have_codes() -> None:
    """The square of a row's length is beyond fp16 from 256 on."""
    branch = trained(1024)
    op, x = nsr.Segment(torch.tensor([0, 0, 1]), torch.tensor([0.5, 0.5, 1.0]), 2), 12 * torch.randn(3, 1024)
    expected = branch(op, x)
    torch.testing.assert_close(branch.half()(op, x.half()).float(), expected, rtol=0.02, atol=0.02)
