"""Launching the kernels of ``norm_kernels.py``: tiles, shares of the rows, room for the parts."""

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.training.noise_kernel import constants
from nsr.training.norm_kernels import (
    batch_backward,
    batch_forward,
    batch_moments,
    batch_sums,
    join_moments,
    layer_backward,
    layer_forward,
)

_TILE = 4096  # numbers in a tile
_PARTS = 128  # programs of a replica at most, where each leaves a part of a sum
_PROGRAMS = 1056  # of all replicas, about: eight for each multiprocessor of an H100
_COLUMNS = 32  # of a program that joins moments


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, step: Tensor, site: int, p: float, activation: int
) -> Tensor:
    """``dropout(activation(layer_norm(x)))`` of rows ``[R, N, D]``, with ``weight`` and ``bias`` ``[R, D]``."""
    y = torch.empty_like(x)
    sizes = _sizes(x)
    options = {"ACTIVATION": activation, "DROPS": p > 0}
    layer_forward[_tiles(x)](x, weight, bias, seed, step, y, x.shape[1], site, *constants(p), **sizes, **options)
    return y


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
    step: Tensor,
    site: int,
    p: float,
    activation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x``, ``weight`` and ``bias``."""
    programs, each = _shares(x)
    dx, parts = torch.empty_like(x), x.new_empty(x.shape[0], programs, 2, x.shape[2])
    layer_backward[(programs, x.shape[0])](
        grad, x, weight, bias, seed, step, dx, parts, x.shape[1], each, site, *constants(p),
        **_sizes(x), ACTIVATION=activation, DROPS=p > 0,
    )  # fmt: skip
    of_weight, of_bias = parts.sum(1).unbind(1)
    return dx, of_weight, of_bias


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
    step: Tensor,
    count: Tensor,
    site: int,
    p: float,
    activation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dropout(activation(batch_norm(x)))``, mean and variance; row ``i`` counts ``count[i]`` times, ``[N]``."""
    replicas, rows, width = x.shape
    programs, each = _shares(x)
    parts = x.new_empty(replicas, programs, 3, width)
    batch_moments[(programs, replicas)](x, count, parts, rows, each, **_sizes(x))
    y, mean, variance = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    join_moments[(cdiv(width, _COLUMNS), replicas)](
        parts, mean, variance, programs, WIDTH=width, BLOCK=_COLUMNS, PARTS=_PARTS
    )
    batch_forward[_tiles(x)](
        x, mean, variance, weight, bias, seed, step, y, rows, site, *constants(p),
        **_sizes(x), ACTIVATION=activation, DROPS=p > 0,
    )  # fmt: skip
    return y, mean, variance


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
    step: Tensor,
    count: Tensor,
    total: Tensor,
    mean: Tensor,
    variance: Tensor,
    site: int,
    p: float,
    activation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x``, ``weight`` and ``bias``; ``total`` is the sum of ``count``."""
    replicas, rows, width = x.shape
    programs, each = _shares(x)
    parts, dx = x.new_empty(replicas, programs, 2, width), torch.empty_like(x)
    options = {**_sizes(x), "ACTIVATION": activation, "DROPS": p > 0}
    batch_sums[(programs, replicas)](
        grad, x, mean, variance, weight, bias, seed, step, parts, rows, each, site, *constants(p), **options
    )
    sums = parts.sum(1)  # shape: [R, 2, D]
    batch_backward[_tiles(x)](
        grad, x, count, total, mean, variance, weight, bias, sums, seed, step, dx, rows, site, *constants(p), **options
    )
    return dx, sums[:, 0], sums[:, 1]


def _sizes(x: Tensor) -> dict[str, int]:
    columns = next_power_of_2(x.shape[2])
    return {"WIDTH": x.shape[2], "BLOCK": max(1, _TILE // columns), "COLUMNS": columns}


def _tiles(x: Tensor) -> tuple[int, int]:
    """Programs for every tile of every replica."""
    return cdiv(x.shape[1], _sizes(x)["BLOCK"]), x.shape[0]


def _shares(x: Tensor) -> tuple[int, int]:
    """Programs of a replica where each leaves a part, and the tiles of each."""
    tiles, replicas = _tiles(x)
    each = cdiv(tiles, min(_PARTS, cdiv(_PROGRAMS, replicas)))
    return cdiv(tiles, each), each
