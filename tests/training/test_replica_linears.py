"""A bias inside the product: the same results and gradients as by the plain layer, and only where it pays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from nsr.training import replica_linears
from nsr.training.replica_linears import BiasInProducts, bias_in_products

R, N, C, D = 3, 20, 5, 4


class Called(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def outcome(mode: Any, x: Tensor, shared: bool, model: nn.Module) -> tuple[list[Tensor], list[str]]:
    """The result and the gradients of the parameters and of ``x``, and which operators were called."""
    generator = torch.Generator().manual_seed(1)
    parameters = {
        name: torch.randn(R, *p.shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for name, p in model.named_parameters()
    }
    x = x.clone().requires_grad_()

    def one(own: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, own, (x,))

    with Called() as called, mode:
        y = vmap(one, in_dims=(0, None if shared else 0))(parameters, x)
    return [y, *torch.autograd.grad(y.sin().sum(), [*parameters.values(), x])], called.names


@pytest.mark.parametrize("shared", [True, False])
def test_equal_to_plain(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    monkeypatch.setattr(replica_linears, "_MANY", N)
    model = nn.Sequential(nn.Linear(C, D), nn.GELU(), nn.Linear(D, D), nn.Linear(D, D, bias=False))
    x = torch.randn(*(() if shared else (R,)), N, C, dtype=torch.float64)
    plain, _ = outcome(bias_in_products(torch.device("cpu")), x, shared, model)
    mine, names = outcome(BiasInProducts(), x, shared, model)
    assert names.count("nsr.replica_linear.default") == 2
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b)


def test_few_rows_stay_together() -> None:
    _, names = outcome(BiasInProducts(), torch.randn(R, N, C, dtype=torch.float64), False, nn.Linear(C, D))
    assert "nsr.replica_linear.default" not in names


def test_of_no_effect_on_a_cpu() -> None:
    with bias_in_products(torch.device("cpu")) as mode:
        assert mode is None
