"""A stage of GIN's conv, Linear, weighted BatchNorm and ReLU, over many rows of several replicas.

::

    x ── Linear ── h ── (h - mean) / std = n ── γ n + β ── ReLU ── y      mean, std: over rows, row i counted c_i times

A kernel that needs something of all rows follows one in which each program has written what it knows of its own
rows: their count, mean and sum of squared deviations, or sums of gradients. Each program of the second kernel puts
these together for itself.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.training.tree_product import product

EPS = tl.constexpr(1e-5)
MOMENTUM = tl.constexpr(0.1)


@triton.jit(do_not_specialize=["rows", "tiles_each"])
def linear_moments(
    x_ptr, weight_ptr, bias_ptr, count_ptr, h_ptr, part_ptr, rows, tiles_each,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``h``, and of each program the count, mean and squared deviations of its rows: ``[3, D]``."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    weight = tl.load(weight_ptr + replica * D * D + d[:, None] * D + d[None, :])
    bias = tl.load(bias_ptr + replica * D + d)[None, :]
    number = tl.zeros([D], tl.float32)
    mean = tl.zeros([D], tl.float32)
    square = tl.zeros([D], tl.float32)
    first = tl.program_id(0) * tiles_each
    for tile in range(first, first + tiles_each):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        inside = row < rows
        at = (replica * rows + row)[:, None] * D + d[None, :]
        x = tl.load(x_ptr + at, mask=inside[:, None], other=0.0)
        h = product(x, tl.trans(weight)) + bias
        tl.store(h_ptr + at, h, mask=inside[:, None])
        count = tl.load(count_ptr + replica * rows + row, mask=inside, other=0.0)[:, None]
        # join the tile's moments to those before
        here = tl.sum(count, 0) + tl.zeros([D], tl.float32)
        own = tl.sum(count * h, 0) / tl.maximum(here, 1e-20)
        apart = h - own[None, :]
        total = number + here
        share = here / tl.maximum(total, 1e-20)
        square += tl.sum(count * apart * apart, 0) + (own - mean) * (own - mean) * number * share
        mean += (own - mean) * share
        number = total
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * 3 * D
    tl.store(part_ptr + d, number)
    tl.store(part_ptr + D + d, mean)
    tl.store(part_ptr + 2 * D + d, square)


@triton.jit
def joined(part_ptr, replica, programs, D: tl.constexpr, PARTS: tl.constexpr):
    """Count, mean and variance of all rows from those of the programs."""
    d = tl.arange(0, D)[None, :]
    p = tl.arange(0, PARTS)[:, None]
    at = part_ptr + (replica * programs + p) * 3 * D + d
    number = tl.load(at, mask=p < programs, other=0.0)
    mean = tl.load(at + D, mask=p < programs, other=0.0)
    square = tl.load(at + 2 * D, mask=p < programs, other=0.0)
    total = tl.sum(number, 0)
    middle = tl.sum(number * mean, 0) / total
    apart = mean - middle[None, :]
    return total, middle, tl.sum(square + number * apart * apart, 0) / total


@triton.jit(do_not_specialize=["rows", "programs"])
def norm_relu(
    h_ptr, part_ptr, gamma_ptr, beta_ptr, moments_ptr, running_mean_ptr, running_var_ptr, y_ptr, rows, programs,
    D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``y``; the first program of a replica keeps count, mean and variance, ``[3, D]``, and moves the running ones."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    total, mean, variance = joined(part_ptr, replica, programs, D, PARTS)
    if tl.program_id(0) == 0:
        tl.store(moments_ptr + replica * 3 * D + d, total)
        tl.store(moments_ptr + (replica * 3 + 1) * D + d, mean)
        tl.store(moments_ptr + (replica * 3 + 2) * D + d, variance)
        at = replica * D + d
        before = tl.load(running_mean_ptr + at)
        tl.store(running_mean_ptr + at, before + MOMENTUM * (mean - before))
        before = tl.load(running_var_ptr + at)
        tl.store(running_var_ptr + at, before + MOMENTUM * (variance * total / (total - 1) - before))
    gamma = tl.load(gamma_ptr + replica * D + d)
    beta = tl.load(beta_ptr + replica * D + d)
    scale = gamma * tl.rsqrt(variance + EPS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = (replica * rows + row)[:, None] * D + d[None, :]
    h = tl.load(h_ptr + at, mask=(row < rows)[:, None], other=0.0)
    y = (h - mean[None, :]) * scale[None, :] + beta[None, :]
    tl.store(y_ptr + at, tl.maximum(y, 0.0), mask=(row < rows)[:, None])


@triton.jit
def load_moments(moments_ptr, replica, D: tl.constexpr):
    """Count, mean and variance of all rows, as :func:`norm_relu` has kept them."""
    at = moments_ptr + replica * 3 * D + tl.arange(0, D)
    return tl.load(at), tl.load(at + D), tl.load(at + 2 * D)


@triton.jit
def through_relu(grad, h, mean, variance, gamma, beta):
    """The gradient of ``γ n + β``, and ``n``."""
    n = (h - mean[None, :]) * tl.rsqrt(variance + EPS)[None, :]
    return tl.where(n * gamma[None, :] + beta[None, :] > 0, grad, 0.0), n


@triton.jit(do_not_specialize=["rows", "tiles_each"])
def norm_sums(
    grad_ptr, h_ptr, moments_ptr, gamma_ptr, beta_ptr, part_ptr, rows, tiles_each,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each program the sums of the gradients of ``γ n + β``, times ``n`` (that of ``γ``) and alone (``β``)."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D)
    _, mean, variance = load_moments(moments_ptr, replica, D)
    gamma, beta = tl.load(gamma_ptr + replica * D + d), tl.load(beta_ptr + replica * D + d)
    of_gamma = tl.zeros([D], tl.float32)
    of_beta = tl.zeros([D], tl.float32)
    first = tl.program_id(0) * tiles_each
    for tile in range(first, first + tiles_each):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        at = (replica * rows + row)[:, None] * D + d[None, :]
        h = tl.load(h_ptr + at, mask=(row < rows)[:, None], other=0.0)
        grad = tl.load(grad_ptr + at, mask=(row < rows)[:, None], other=0.0)
        grad, n = through_relu(grad, h, mean, variance, gamma, beta)
        of_gamma += tl.sum(grad * n, 0)
        of_beta += tl.sum(grad, 0)
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * 2 * D
    tl.store(part_ptr + d, of_gamma)
    tl.store(part_ptr + D + d, of_beta)


@triton.jit(do_not_specialize=["rows", "tiles_each"])
def stage_gradient(
    grad_ptr, x_ptr, h_ptr, count_ptr, moments_ptr, weight_ptr, gamma_ptr, beta_ptr, norm_part_ptr, dx_ptr,
    part_ptr, rows, tiles_each, D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``dx``, and a part of the gradients of weight, bias, ``γ`` and ``β``: ``[D + 3, D]`` of each program."""
    replica = tl.program_id(1).to(tl.int64)
    programs = tl.num_programs(0)
    d = tl.arange(0, D)
    total, mean, variance = load_moments(moments_ptr, replica, D)
    gamma, beta = tl.load(gamma_ptr + replica * D + d), tl.load(beta_ptr + replica * D + d)
    weight = tl.load(weight_ptr + replica * D * D + d[:, None] * D + d[None, :])
    p = tl.arange(0, PARTS)[:, None]
    at_part = norm_part_ptr + (replica * programs + p) * 2 * D + d[None, :]
    sum_gamma = tl.sum(tl.load(at_part, mask=p < programs, other=0.0), 0)
    sum_beta = tl.sum(tl.load(at_part + D, mask=p < programs, other=0.0), 0)

    of_weight = tl.zeros([D, D], tl.float32)
    of_bias = tl.zeros([D], tl.float32)
    first = tl.program_id(0) * tiles_each
    for tile in range(first, first + tiles_each):
        row = tile * BLOCK + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None]
        at = (replica * rows + row)[:, None] * D + d[None, :]
        h = tl.load(h_ptr + at, mask=inside, other=0.0)
        x = tl.load(x_ptr + at, mask=inside, other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
        grad, n = through_relu(grad, h, mean, variance, gamma, beta)
        share = tl.load(count_ptr + replica * rows + row, mask=row < rows, other=0.0)[:, None] / total[None, :]
        dh = grad - share * (sum_beta[None, :] + n * sum_gamma[None, :])
        dh = tl.where(inside, dh * (gamma * tl.rsqrt(variance + EPS))[None, :], 0.0)
        of_weight += product(tl.trans(dh), x)
        of_bias += tl.sum(dh, 0)
        tl.store(dx_ptr + at, product(dh, weight), mask=inside)
    part_ptr += (replica * programs + tl.program_id(0)) * (D + 3) * D
    tl.store(part_ptr + d[:, None] * D + d[None, :], of_weight)
    tl.store(part_ptr + D * D + d, of_bias)
    alone = tl.program_id(0) == 0  # the sums of all programs are one program's part
    tl.store(part_ptr + (D + 1) * D + d, tl.where(alone, sum_gamma, 0.0))
    tl.store(part_ptr + (D + 2) * D + d, tl.where(alone, sum_beta, 0.0))
