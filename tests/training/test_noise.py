"""Hashed noise is uniform, repeatable, and different wherever it should be."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from nsr.kernels import native
from nsr.training import noise_native
from nsr.training.noise import (
    SeededDropout,
    key_of,
    masked,
    mix,
    mixed_positions,
    permutation,
    seed_dropout,
    uniform_bits,
)


def bits(seed: int, site: int = 0, step: int = 0, count: int = 100_000) -> torch.Tensor:
    return uniform_bits(mixed_positions((count,), torch.device("cpu")), key_of(torch.tensor(seed), site, step))


def test_mix_is_a_bijection_that_spreads_bits() -> None:
    x = torch.arange(-50_000, 50_000, dtype=torch.int32)
    assert mix(x).unique().numel() == x.numel()
    flipped = mix(x) ^ mix(x ^ 1)
    ones = sum(((flipped >> bit) & 1).float().mean().item() for bit in range(32))
    assert ones == pytest.approx(16, abs=0.5)


def test_bits_are_uniform_and_uncorrelated() -> None:
    u = bits(7).double() / 2**32 + 0.5
    histogram = torch.histc(u, bins=100, min=0, max=1)
    assert ((histogram - 1000).square() / 1000).sum() < 150  # chi square with 99 degrees of freedom
    for other in (bits(8), bits(7, site=1), bits(7, step=1), bits(7).roll(1), bits(7).roll(128)):
        v = other.double() / 2**32 + 0.5
        assert torch.corrcoef(torch.stack([u, v]))[0, 1].abs() < 0.015


def test_permutations_differ_by_key_and_hold_everything() -> None:
    keys = key_of(torch.arange(3))
    orders = permutation(1000, keys)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(1000).expand(3, -1))
    assert (orders[0] != orders[1]).float().mean() > 0.99
    assert torch.equal(permutation(1000, keys[1]), orders[1])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_and_the_mean(p: float) -> None:
    dropout = SeededDropout(p, seed=3, site=0)
    y = dropout(torch.ones(400, 500))
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(dropout(torch.ones(400, 500)), y)  # the next step, another mask
    dropout.eval()
    assert torch.equal(dropout(y), y)


def test_sites_and_seeds_have_masks_of_their_own() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    one = seed_dropout(copy.deepcopy(model), seed=1)
    two = seed_dropout(copy.deepcopy(model), seed=2)
    x = torch.ones(50, 50)
    masks = [one[0](x), one[1][1](x), two[0](x)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_gradient_is_the_same_mask() -> None:
    dropout = SeededDropout(0.4, seed=3, site=0)
    x = torch.randn(30, 20, requires_grad=True)
    y = dropout(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient * x, y)


def test_replicas_draw_what_each_would_draw_alone() -> None:
    seeds = [3, 4, 5]
    x = torch.randn(3, 30, 20, requires_grad=True)
    together = [SeededDropout(0.4, seed, site=1) for seed in seeds]

    def one(seed: torch.Tensor, step: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(together[0], {"seed": seed, "step": step}, x)

    y = torch.vmap(one)(torch.tensor(seeds).int(), torch.zeros(3).int(), x)
    alone = torch.stack([dropout(row) for dropout, row in zip(together, x, strict=True)])
    assert torch.equal(y, alone)
    (ours,), (theirs,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, alone))
    torch.testing.assert_close(ours, theirs)


def test_the_kernel_makes_the_plain_mask() -> None:
    program = (
        "import torch\n"
        "from nsr.training import noise, noise_kernel\n"
        "x, key = torch.randn(3, 5000), torch.tensor([5, -7, 2**31 - 1], dtype=torch.int32)\n"
        "for p in (0.1, 0.3, 0.5, 0.9):\n"
        "    assert torch.equal(noise_kernel.masked(x, key, p), noise.masked(x, key, p)), p\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.skipif(native.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(3, 1001), (1, 1), (2, 0), (1, 70_000)])
def test_dropout_in_cpp_is_the_plain_one_to_the_bit(shape: tuple[int, int], p: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    key = key_of(torch.arange(shape[0]), 5)
    found = noise_native.masked(x, key, p)
    assert found is not None
    assert torch.equal(found, masked(x, key, p))
