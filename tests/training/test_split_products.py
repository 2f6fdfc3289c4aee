"""Long batched products in parts: the same gradients, to rounding, and parts that are not too short."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from nsr.training.split_products import SplitLongProducts, parts_of, split_long_products


def test_gradients_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2048, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    def gradient() -> Tensor:
        return torch.autograd.grad(vmap(lambda x, w: F.linear(x, w).square().sum())(x, weight).sum(), weight)[0]

    plain = gradient()
    with SplitLongProducts():
        split = gradient()
    torch.testing.assert_close(split, plain)
    assert not torch.equal(split, plain)  # else nothing was split


PARTS = [(10_000, 40), (7_600, 25), (2_048, 8), (22_662, 18), (48_921, 69), (11_758, 2), (10_007, 1), (100, 1)]


@pytest.mark.parametrize(("length", "parts"), PARTS)
def test_parts(length: int, parts: int) -> None:
    assert parts_of(length) == parts


@pytest.mark.parametrize(("width", "copies"), [(3, True), (8, False)])
def test_what_replicas_share_is_copied_only_where_it_is_narrow(width: int, copies: bool) -> None:
    shared = torch.randn(1, 2048, width, dtype=torch.float64).expand(3, -1, -1).transpose(1, 2)
    grad = torch.randn(3, 2048, 5, dtype=torch.float64)
    with SplitLongProducts():
        split = torch.bmm(shared, grad)
    plain = torch.bmm(shared, grad)
    torch.testing.assert_close(split, plain)
    assert torch.equal(split, plain) is not copies


def test_of_no_effect_on_a_cpu() -> None:
    with split_long_products(torch.device("cpu")) as mode:
        assert mode is None
