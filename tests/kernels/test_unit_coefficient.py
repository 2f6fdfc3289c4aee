"""Coefficients of unit length: what the projection needs of them."""

import pytest
import torch
from torch.func import vmap

from nsr.kernels import unit_coefficient

ROWS = 6


@pytest.fixture
def target() -> torch.Tensor:
    return torch.tensor([0, 3, 3, 5, 0, 3, 1, 5, 0])


def test_unit_length(target: torch.Tensor) -> None:
    t = torch.randn(9, 2)
    unit = unit_coefficient(t, target, target, ROWS)
    energy = torch.zeros(ROWS, 2).index_add(0, target, unit.square())
    torch.testing.assert_close(energy[[0, 1, 3, 5]], torch.ones(4, 2))
    torch.testing.assert_close(unit * t.abs() / unit.abs(), t)


@pytest.mark.parametrize("value", [0.1, -3e-3, 7.7e8])
def test_a_lone_member_is_exactly_one(value: float) -> None:
    t, row = torch.tensor([[value]]), torch.tensor([0])
    assert unit_coefficient(t, row, row, 1).abs().item() == 1.0


def test_all_zero_stays_zero_with_a_gradient(target: torch.Tensor) -> None:
    t = torch.ones(9, 1)
    t[target == 3] = 0
    t.requires_grad_()
    unit = unit_coefficient(t, target, target, ROWS)
    assert not unit[target == 3].any()
    unit.sum().backward()
    assert t.grad.isfinite().all()


@pytest.mark.parametrize("shared_graph", [True, False])
def test_vmap(target: torch.Tensor, shared_graph: bool) -> None:
    many = torch.randn(3, 9, 2, requires_grad=True)
    targets = target if shared_graph else torch.stack([target, target.flip(0), (target + 1) % ROWS])
    together = vmap(lambda t, v: unit_coefficient(t, v, v, ROWS), in_dims=(0, None if shared_graph else 0))(
        many, targets
    )
    alone = [unit_coefficient(t, v, v, ROWS) for t, v in zip(many, targets.expand(3, 9), strict=True)]
    torch.testing.assert_close(together, torch.stack(alone))
    weights = torch.randn_like(together)
    mine = torch.autograd.grad((together * weights).sum(), many)[0]
    theirs = torch.autograd.grad((torch.stack(alone) * weights).sum(), many)[0]
    torch.testing.assert_close(mine, theirs)


def test_mistakes_are_named(target: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \[E, H\] and \[E\]"):
        unit_coefficient(torch.ones(9), target, target, ROWS)
    with pytest.raises(ValueError, match="fused=True, but a tensor on cpu"):
        unit_coefficient(torch.ones(9, 1), target, target, ROWS, fused=True)
