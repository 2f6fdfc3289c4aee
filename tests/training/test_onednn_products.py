"""Products by oneDNN against torch's own, in results and gradients, in the layouts that training makes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.training import onednn_products
from nsr.training.onednn_products import OneDNNProducts

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

ROWS, INNER, COLUMNS = 2100, 64, 48  # more than 2**22 multiplications
assert ROWS * INNER * COLUMNS > onednn_products._MANY

PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda x, w, bias: x @ w.t(),
    "linear layer": F.linear,
    "transposed input": lambda x, w, bias: x.t().contiguous().t() @ w.t(),
    "columns of a wider table": lambda x, w, bias: torch.cat([x, x], 1)[:, INNER:] @ w.t(),
    "weight with gaps": lambda x, w, bias: x @ torch.cat([w, w], 1)[:, :INNER].t(),
    "batched": lambda x, w, bias: torch.stack([x, -x]) @ torch.stack([w.t(), w.t()]),
    "bias a row": lambda x, w, bias: torch.addmm(x[:, :1].expand(-1, COLUMNS), x, w.t()),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The left sides of the products that went to oneDNN."""
    seen, product = [], onednn_products._product

    def noticed(left: Tensor, *rest: Tensor) -> Tensor:
        seen.append(left)
        return product(left, *rest)

    monkeypatch.setattr(onednn_products, "_product", noticed)
    return seen


def inputs(rows: int = ROWS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((rows, INNER), (COLUMNS, INNER), (COLUMNS,))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def with_gradients(product: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    out = product(*given)
    slope = torch.linspace(0, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * slope).sum(), given, materialize_grads=True)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_equal_to_plain_products(name: str, counted: list[Tensor]) -> None:
    exact = with_gradients(PRODUCTS[name], inputs(dtype=torch.float64))
    given = [x.detach().float().requires_grad_() for x in inputs(dtype=torch.float64)]
    with OneDNNProducts():
        ours = with_gradients(PRODUCTS[name], given)
    assert counted, "no product went to oneDNN"
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("given", [inputs(rows=3), inputs(rows=0), inputs(dtype=torch.float64)])
def test_small_or_wide_products_stay_where_they_were(given: list[Tensor], counted: list[Tensor]) -> None:
    plain = with_gradients(F.linear, given)
    with OneDNNProducts():
        ours = with_gradients(F.linear, given)
    assert not counted
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("half", [True, False])
def test_of_effect_only_where_mkl_takes_half(
    half: bool, counted: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_products, "_mkl_takes_half", lambda: half)
    with onednn_products.onednn_products(torch.device("cpu")):
        F.linear(*inputs())
    assert bool(counted) == half
