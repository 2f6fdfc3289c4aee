"""SOAP of replicas against the equations written out for one matrix, and what it is for."""

import pytest
import torch
from torch import Tensor, nn

from nsr.training.replicas import Replicas
from nsr.training.soap import RENEW_EVERY, Soap

DECAY, EPS = 0.95, 1e-8


def written_out(weight: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """One matrix, step by step; a basis is turned by one power iteration, its steepest direction first."""
    (height, width), weight = weight.shape, weight.clone()
    left, right = weight.new_zeros(height, height), weight.new_zeros(width, width)
    moment, size = torch.zeros_like(weight), torch.zeros_like(weight)
    bases: list[Tensor] = []
    for number, gradient in enumerate(gradients):
        left = DECAY * left + (1 - DECAY) * gradient @ gradient.T
        right = DECAY * right + (1 - DECAY) * gradient.T @ gradient
        moment = DECAY * moment + (1 - DECAY) * gradient
        if not bases:
            bases = [torch.linalg.eigh(covariance)[1].flip(1) for covariance in (left, right)]
        elif number % RENEW_EVERY == 0:
            for side, covariance in enumerate((left, right)):
                steepness = torch.stack([v @ covariance @ v for v in bases[side].T])
                order = steepness.argsort(descending=True)
                size = size[order] if side == 0 else size[:, order]
                bases[side] = torch.linalg.qr(covariance @ bases[side][:, order])[0]
        seen = 1 - DECAY ** (number + 1)
        size = DECAY * size + (1 - DECAY) * (bases[0].T @ gradient @ bases[1]).square()
        turned = bases[0].T @ (moment / seen) @ bases[1] / ((size / seen).sqrt() + EPS)
        weight = weight - rate * bases[0] @ turned @ bases[1].T
    return weight


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(12, 4), nn.Linear(4, 4)]), "head": nn.Linear(4, 6)}
    ).double()


def test_every_block_follows_the_equations_and_the_rest_follows_adam() -> None:
    seeds, rates, steps = [0, 1, 2], torch.tensor([1e-2, 3e-3, 0.0], dtype=torch.float64), 2 * RENEW_EVERY + 3
    replicas, plain = (Replicas([model(seed) for seed in seeds]) for _ in range(2))
    before = {name: values.detach().clone() for name, values in replicas.parameters.items()}
    soap = Soap(replicas, "layers.")
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(replicas.rows.shape, generator=generator, dtype=torch.float64) for _ in range(steps)]
    for number, gradient in enumerate(gradients):
        replicas.gradient.copy_(gradient)
        plain.gradient.copy_(gradient)
        soap.step(rates, number)
        plain.adam(rates)
    for name, values in replicas.parameters.items():
        if not (name.startswith("layers.") and name.endswith("weight")):
            assert torch.equal(values, plain.parameters[name]), name
            continue
        start, (height, width) = int(values.storage_offset()), values.shape[1:]
        for r in range(len(seeds)):
            own = [g[r, start : start + height * width].view(height, width) for g in gradients]
            for first in range(0, width, height):  # square blocks
                block = slice(first, first + height)
                expected = written_out(before[name][r, :, block], [g[:, block] for g in own], rates[r].item())
                torch.testing.assert_close(values[r, :, block], expected, rtol=0, atol=1e-7, msg=f"{name} {r} {first}")
    for name, values in replicas.parameters.items():
        assert torch.equal(values[2], before[name][2]), "a rate of 0"


def test_a_valley_across_all_weights_is_no_obstacle() -> None:
    """Adam hardly moves along directions in which the loss is a thousand times flatter and that mix all weights."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(8, 8))[0] @ torch.logspace(0, -1.5, 8).diag() for _ in range(2))
    target = torch.randn(8, 8)

    def loss_after(steps: int, with_soap: bool) -> float:
        torch.manual_seed(1)
        replicas = Replicas([nn.Linear(8, 8, bias=False)])
        soap = Soap(replicas, "weight")
        rate = torch.tensor([1e-2])
        for number in range(steps):
            losses = (left.T @ (replicas.parameters["weight"] - target) @ right).square().sum((1, 2))
            replicas.backward(losses)
            if with_soap:
                soap.step(rate, number)
            else:
                replicas.adam(rate)
        return losses.item()

    assert loss_after(400, with_soap=True) < 0.1 * loss_after(400, with_soap=False)


def test_a_name_that_nothing_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"begins with 'blocks\.'; got \['layers\.0\.weight'"):
        Soap(Replicas([model(0)]), "blocks.")
