"""Ten together equal ten one by one, and both equal plain torch."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.training.noise import seed_dropout
from nsr.training.replicas import Replicas

SEEDS = [0, 1, 2]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Dropout(0.5),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    )
    return seed_dropout(model, seed)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(40, 5, generator=generator), torch.randint(3, (len(SEEDS), 40), generator=generator)


def train_together(seeds: list[int], x: Tensor, y: Tensor, rates: Tensor, steps: int) -> tuple[Replicas, Tensor]:
    replicas = Replicas([build(seed) for seed in seeds])
    losses = []
    for _ in range(steps):
        loss = replicas.call(lambda model, x, y: F.cross_entropy(model(x), y), x, y, in_dims=(None, 0), training=True)
        replicas.backward(loss)
        replicas.adam(rates, weight_decay=1e-2, max_norm=0.5)
        losses.append(loss.detach())
    return replicas, torch.stack(losses)


def train_plainly(seed: int, x: Tensor, y: Tensor, rate: float, steps: int) -> tuple[nn.Module, Tensor]:
    model = build(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-2)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return model, torch.stack(losses)


def test_together_one_by_one_and_plainly_are_equal(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    rates = torch.tensor([1e-2, 3e-3, 1e-3])
    together, curves = train_together(SEEDS, x, y, rates, steps=30)
    for r, seed in enumerate(SEEDS):
        _, curve = train_together([seed], x, y[r : r + 1], rates[r : r + 1], steps=30)
        torch.testing.assert_close(curve[:, 0], curves[:, r], atol=1e-5, rtol=1e-5)
        plain, plain_curve = train_plainly(seed, x, y[r], rates[r].item(), steps=30)
        torch.testing.assert_close(plain_curve, curves[:, r], atol=1e-5, rtol=1e-5)
        ours = copy.deepcopy(together.module(r))
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
        out = together.call(lambda model, x: model(x), x, in_dims=(None,))[r]
        torch.testing.assert_close(out, plain.eval()(x), atol=1e-3, rtol=1e-3)


def test_a_rate_of_zero_leaves_a_replica_as_it_is(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    replicas, _ = train_together(SEEDS, x, y, torch.tensor([1e-2, 0.0, 1e-2]), steps=3)
    untouched = dict(build(1).named_parameters())
    for name, parameter in replicas.parameters.items():
        assert torch.equal(parameter[1], untouched[name])
        assert not torch.equal(parameter[0], dict(build(0).named_parameters())[name])


def test_state_round_trip_goes_on_alike(batch: tuple[Tensor, Tensor]) -> None:
    x, y = batch
    one, _ = train_together(SEEDS, x, y, torch.full((3,), 1e-2), steps=5)
    two = Replicas([build(seed) for seed in SEEDS])
    two.load({name: tensor.clone() for name, tensor in one.state().items()})
    for replicas in (one, two):
        loss = replicas.call(lambda model, x, y: F.cross_entropy(model(x), y), x, y, in_dims=(None, 0), training=True)
        replicas.backward(loss)
        replicas.adam(torch.full((3,), 1e-2))
    for name, tensor in one.state().items():
        assert torch.equal(tensor, two.state()[name]), name


def test_different_structures_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in structure"):
        Replicas([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    with pytest.raises(ValueError, match="at least one"):
        Replicas([])


def test_a_section_is_its_parameters_in_one_tensor() -> None:
    replicas = Replicas([build(seed) for seed in SEEDS])
    values, place = replicas.section("4.")
    weight = values[:, place["weight"] : place["weight"] + 64].unflatten(1, (8, 8))
    bias = values[:, place["bias"] : place["bias"] + 8]
    assert torch.equal(weight, replicas.parameters["4.weight"])
    assert torch.equal(bias, replicas.parameters["4.bias"])

    replicas.backward((weight.square().sum((1, 2)) + bias.sum(1)) + replicas.parameters["0.bias"].sum(1))
    expected = {"4.weight": 2 * weight.detach(), "4.bias": torch.ones(3, 8), "0.bias": torch.ones(3, 8)}
    for name, gradient in replicas._gradients.items():
        if name != "4.":
            torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), msg=name)
