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


@pytest.mark.parametrize(("length", "parts"), [(10_000, 40), (7_600, 25), (2_048, 8), (11_758, 1), (100, 1)])
def test_parts(length: int, parts: int) -> None:
    assert parts_of(length) == parts


def test_of_no_effect_on_a_cpu() -> None:
    with split_long_products(torch.device("cpu")) as mode:
        assert mode is None
