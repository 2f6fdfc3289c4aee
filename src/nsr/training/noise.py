"""Randomness without a state: every draw is a hash of (seed, what for, when, where).

A generator's numbers depend on all that was drawn before, so ten replicas trained together would see other noise than
the same ten trained one by one. A hash depends on its arguments alone: each replica draws what it would draw on its
own, on any device, in any company, and a run that is resumed at step ``n`` goes on as if it had never stopped.
"""

import math
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nsr.training import noise_native

M = TypeVar("M", bound=nn.Module)

# Multipliers of two published integer mixers (murmur3's finaliser and Weyl's golden ratio), as signed 32-bit numbers.
_MIX_A, _MIX_B, _GOLDEN = -2048144789, -1028477387, -1640531527


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which each input bit moves about half of the output bits."""
    x = (x ^ _shift(x, 16)) * _MIX_A
    x = (x ^ _shift(x, 13)) * _MIX_B
    return x ^ _shift(x, 16)


def key_of(seed: Tensor, *salts: int | Tensor) -> Tensor:
    """One int32 key from a seed and any number of salts; all may be tensors that broadcast."""
    key = mix(seed.to(torch.int32))
    for salt in salts:
        key = mix(key * _GOLDEN + salt)
    return key


def uniform_bits(positions: Tensor, key: Tensor) -> Tensor:
    """Random int32 for each position; ``positions`` come from :func:`mixed_positions`, ``key`` broadcasts."""
    x = (positions ^ key) * _MIX_A
    return (x ^ (x >> 15)) * _MIX_B


def mixed_positions(shape: tuple[int, ...] | torch.Size, device: torch.device) -> Tensor:
    """The part of the hash that depends on the position alone, so it is shared by all replicas."""
    return mix(torch.arange(math.prod(shape), device=device, dtype=torch.int32)).view(shape)


def permutation(length: int, key: Tensor) -> Tensor:
    """A random order of ``0 .. length - 1`` for each key: ``[...] -> [..., length]``.

    Two of a few thousand positions may hash alike; the stable sort then keeps their order, which biases nothing that
    matters to a training run.
    """
    positions = mixed_positions((length,), key.device)
    return uniform_bits(positions, key.unsqueeze(-1)).argsort(dim=-1, stable=True)


class SeededDropout(nn.Module):
    """Dropout whose mask is a hash of the replica's seed, the site, the step and the position.

    Args:
        p: Probability of zeroing.
        seed: Seed of the replica.
        site: Number of this dropout in its model, so that no two draw the same mask.

    Attributes:
        step: Scalar int32 buffer; every training forward advances it.
    """

    seed: Tensor
    step: Tensor

    def __init__(self, p: float, seed: int, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.register_buffer("seed", torch.tensor(seed, dtype=torch.int32))
        self.register_buffer("step", torch.tensor(0, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        """Zero with probability ``p`` and scale the rest by ``1 / (1 - p)``; the identity in evaluation."""
        if not self.training or self.p == 0:
            return x
        self.step.add_(1)
        key = key_of(self.seed, self.site, self.step)
        return _dropout(x.reshape(1, -1), key.view(1), self.p).view(x.shape)


def masked(x: Tensor, key: Tensor, p: float) -> Tensor:
    """Dropout of rows ``[R, n]``, each with a mask from its own key ``[R]``."""
    bits = uniform_bits(mixed_positions(x.shape[1:], x.device), key.unsqueeze(1))
    return torch.where(bits >= round(p * 2**32) - 2**31, x / (1 - p), 0.0)


@torch.library.custom_op("nsr::seeded_dropout", mutates_args=())
def _dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    # the dozen operations of the hash as one
    if x.is_cuda and find_spec("triton") is not None:
        from nsr.training import noise_kernel

        return noise_kernel.masked(x, key, p)
    fast = noise_native.masked(x, key, p) if x.device.type == "cpu" and x.dtype == torch.float32 else None
    return masked(x, key, p) if fast is None else fast


@_dropout.register_fake
def _(x: Tensor, key: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.p = inputs[2]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (key,) = ctx.saved_tensors
    return _dropout(grad.contiguous(), key, ctx.p), None, None  # the mask is its own derivative, and drawn again


_dropout.register_autograd(_differentiate, setup_context=_save)


@_dropout.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], x: Tensor, key: Tensor, p: float) -> tuple[Tensor, int]:
    def rows(value: Tensor, dim: int | None) -> Tensor:  # replicas are rows: [B, 1, ...] -> [B, ...]
        moved = value.unsqueeze(0).expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        return moved.flatten(0, 1).contiguous()

    return _dropout(rows(x, in_dims[0]), rows(key, in_dims[1]), p).unflatten(0, (info.batch_size, -1)), 0


def seed_dropout(model: M, seed: int) -> M:
    """Put a :class:`SeededDropout` in the place of every ``nn.Dropout`` of ``model``, in place; return the model."""
    sites = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    for number, (name, module) in enumerate(sites):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, SeededDropout(module.p, seed, number))
    return model


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32, which torch's arithmetic shift is not."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
