"""LayerNorm and BatchNorm with what follows them, activation and hashed dropout, over the rows of several replicas.

::

    LayerNorm   n = (x - mean) / std of its row                        ┐
    BatchNorm   n = (x - mean) / std over rows, row i counted w_i times ┴─ y = dropout(activation(γ n + β))

Everything between ``x`` and ``y`` happens on chip, and again in the backward pass, which reads ``x`` and the gradient
of ``y`` alone. Programs are (share of the rows, replica). What sums over all rows is left as one part a program.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tiles import gelu_parts
from nsr.training.noise_kernel import kept, key_of

EPS = tl.constexpr(1e-5)
GELU, RELU = tl.constexpr(1), tl.constexpr(2)
SIZES = ["rows", "tiles_each", "site", "least", "share"]


@triton.jit
def tile_of(tile, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of a tile's numbers within a replica, ``[BLOCK, COLUMNS]``, and which of them exist."""
    row, d = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    return row[:, None] * WIDTH + d[None, :], (row < rows)[:, None] & (d < WIDTH)[None, :]


@triton.jit
def row_vector(ptr, replica, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """A replica's vector, as a row."""
    d = tl.arange(0, COLUMNS)
    return tl.load(ptr + replica * WIDTH + d, mask=d < WIDTH, other=0.0)[None, :]


@triton.jit
def normal_row(x, inside, WIDTH: tl.constexpr):
    """Each row of a tile at mean 0 and variance 1, and what it was multiplied with."""
    mean = tl.sum(x, 1)[:, None] / WIDTH
    apart = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, 1)[:, None] / WIDTH + EPS)
    return apart * scale, scale


@triton.jit
def mask_key(seed_ptr, step_ptr, replica, site, DROPS: tl.constexpr):
    """The key of a replica's dropout mask; 0 where nothing is dropped."""
    key = 0
    if DROPS:
        key = key_of(tl.load(seed_ptr + replica), site, tl.load(step_ptr + replica))
    return key


@triton.jit
def finish(y, place, key, least, share, ACTIVATION: tl.constexpr, DROPS: tl.constexpr):
    """``dropout(activation(y))``."""
    if ACTIVATION == GELU:
        cdf, _ = gelu_parts(y)
        y *= cdf
    if ACTIVATION == RELU:
        y = tl.maximum(y, 0.0)
    if DROPS:
        y = tl.where(kept(place, key, least), y / share, 0.0)
    return y


@triton.jit
def unfinish(grad, y, place, key, least, share, ACTIVATION: tl.constexpr, DROPS: tl.constexpr):
    """The gradient of ``y`` from that of :func:`finish`."""
    if DROPS:
        grad = tl.where(kept(place, key, least), grad / share, 0.0)
    if ACTIVATION == GELU:
        cdf, pdf = gelu_parts(y)
        grad *= cdf + y * pdf
    if ACTIVATION == RELU:
        grad = tl.where(y > 0, grad, 0.0)
    return grad


@triton.jit(do_not_specialize=SIZES)
def layer_forward(
    x_ptr, gamma_ptr, beta_ptr, seed_ptr, step_ptr, y_ptr, rows, site, least, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """LayerNorm: ``y``."""
    replica = tl.program_id(1).to(tl.int64)
    place, inside = tile_of(tl.program_id(0), rows, WIDTH, BLOCK, COLUMNS)
    first = replica * rows * WIDTH
    n, _ = normal_row(tl.load(x_ptr + first + place, mask=inside, other=0.0), inside, WIDTH)
    y = n * row_vector(gamma_ptr, replica, WIDTH, COLUMNS) + row_vector(beta_ptr, replica, WIDTH, COLUMNS)
    key = mask_key(seed_ptr, step_ptr, replica, site, DROPS)
    y = finish(y, place, key, least, share, ACTIVATION, DROPS)
    tl.store(y_ptr + first + place, y, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def layer_backward(
    grad_ptr, x_ptr, gamma_ptr, beta_ptr, seed_ptr, step_ptr, dx_ptr, part_ptr, rows, tiles_each, site, least, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """LayerNorm: ``dx``, and of each program a part of the gradients of ``γ`` and ``β``, ``[2, WIDTH]``."""
    replica = tl.program_id(1).to(tl.int64)
    first = replica * rows * WIDTH
    key = mask_key(seed_ptr, step_ptr, replica, site, DROPS)
    gamma, beta = row_vector(gamma_ptr, replica, WIDTH, COLUMNS), row_vector(beta_ptr, replica, WIDTH, COLUMNS)
    of_gamma = tl.zeros([COLUMNS], tl.float32)
    of_beta = tl.zeros([COLUMNS], tl.float32)
    begin = tl.program_id(0) * tiles_each
    for tile in range(begin, begin + tiles_each):
        place, inside = tile_of(tile, rows, WIDTH, BLOCK, COLUMNS)
        n, scale = normal_row(tl.load(x_ptr + first + place, mask=inside, other=0.0), inside, WIDTH)
        grad = tl.load(grad_ptr + first + place, mask=inside, other=0.0)
        grad = unfinish(grad, n * gamma + beta, place, key, least, share, ACTIVATION, DROPS)
        of_gamma += tl.sum(grad * n, 0)
        of_beta += tl.sum(grad, 0)
        dn = grad * gamma
        dx = scale * (dn - tl.sum(dn, 1)[:, None] / WIDTH - n * (tl.sum(dn * n, 1)[:, None] / WIDTH))
        tl.store(dx_ptr + first + place, dx, mask=inside)
    store_part(part_ptr, replica, of_gamma, of_beta, WIDTH, COLUMNS)


@triton.jit
def store_part(part_ptr, replica, of_gamma, of_beta, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's share of two sums, ``[2, WIDTH]``."""
    d = tl.arange(0, COLUMNS)
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * 2 * WIDTH
    tl.store(part_ptr + d, of_gamma, mask=d < WIDTH)
    tl.store(part_ptr + WIDTH + d, of_beta, mask=d < WIDTH)


@triton.jit(do_not_specialize=SIZES)
def batch_moments(
    x_ptr, weight_ptr, part_ptr, rows, tiles_each, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """BatchNorm: of each program the weight, mean and squared deviations of its rows, ``[3, WIDTH]``."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, COLUMNS)
    number = tl.zeros([COLUMNS], tl.float32)
    mean = tl.zeros([COLUMNS], tl.float32)
    square = tl.zeros([COLUMNS], tl.float32)
    begin = tl.program_id(0) * tiles_each
    for tile in range(begin, begin + tiles_each):
        place, inside = tile_of(tile, rows, WIDTH, BLOCK, COLUMNS)
        row = tile * BLOCK + tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(x_ptr + replica * rows * WIDTH + place, mask=inside, other=0.0)
        # join the tile's moments to those before
        here = tl.sum(weight, 0) + tl.zeros([COLUMNS], tl.float32)
        own = tl.sum(weight * x, 0) / tl.maximum(here, 1e-20)
        apart = x - own[None, :]
        total = number + here
        part = here / tl.maximum(total, 1e-20)
        square += tl.sum(weight * apart * apart, 0) + (own - mean) * (own - mean) * number * part
        mean += (own - mean) * part
        number = total
    part_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * 3 * WIDTH + d
    tl.store(part_ptr, number, mask=d < WIDTH)
    tl.store(part_ptr + WIDTH, mean, mask=d < WIDTH)
    tl.store(part_ptr + 2 * WIDTH, square, mask=d < WIDTH)


@triton.jit(do_not_specialize=["programs"])
def join_moments(
    part_ptr, mean_ptr, variance_ptr, programs, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """BatchNorm: mean and variance of all rows from the parts; programs are (block of columns, replica)."""
    replica = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, PARTS)[:, None]
    inside = (p < programs) & (d < WIDTH)[None, :]
    at = part_ptr + (replica * programs + p) * 3 * WIDTH + d[None, :]
    number = tl.load(at, mask=inside, other=0.0)
    mean = tl.load(at + WIDTH, mask=inside, other=0.0)
    square = tl.load(at + 2 * WIDTH, mask=inside, other=0.0)
    total = tl.maximum(tl.sum(number, 0), 1e-20)
    middle = tl.sum(number * mean, 0) / total
    apart = mean - middle[None, :]
    tl.store(mean_ptr + replica * WIDTH + d, middle, mask=d < WIDTH)
    variance = tl.sum(square + number * apart * apart, 0) / total
    tl.store(variance_ptr + replica * WIDTH + d, variance, mask=d < WIDTH)


@triton.jit(do_not_specialize=SIZES)
def batch_forward(
    x_ptr, mean_ptr, variance_ptr, gamma_ptr, beta_ptr, seed_ptr, step_ptr, y_ptr, rows, site, least, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """BatchNorm: ``y``."""
    replica = tl.program_id(1).to(tl.int64)
    place, inside = tile_of(tl.program_id(0), rows, WIDTH, BLOCK, COLUMNS)
    first = replica * rows * WIDTH
    x = tl.load(x_ptr + first + place, mask=inside, other=0.0)
    scale = tl.rsqrt(row_vector(variance_ptr, replica, WIDTH, COLUMNS) + EPS)
    n = (x - row_vector(mean_ptr, replica, WIDTH, COLUMNS)) * scale
    y = n * row_vector(gamma_ptr, replica, WIDTH, COLUMNS) + row_vector(beta_ptr, replica, WIDTH, COLUMNS)
    key = mask_key(seed_ptr, step_ptr, replica, site, DROPS)
    y = finish(y, place, key, least, share, ACTIVATION, DROPS)
    tl.store(y_ptr + first + place, y, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def batch_sums(
    grad_ptr, x_ptr, mean_ptr, variance_ptr, gamma_ptr, beta_ptr, seed_ptr, step_ptr, part_ptr,
    rows, tiles_each, site, least, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """BatchNorm: of each program a part of the gradients of ``γ`` and ``β``, ``[2, WIDTH]``."""
    replica = tl.program_id(1).to(tl.int64)
    first = replica * rows * WIDTH
    key = mask_key(seed_ptr, step_ptr, replica, site, DROPS)
    gamma, beta = row_vector(gamma_ptr, replica, WIDTH, COLUMNS), row_vector(beta_ptr, replica, WIDTH, COLUMNS)
    mean = row_vector(mean_ptr, replica, WIDTH, COLUMNS)
    scale = tl.rsqrt(row_vector(variance_ptr, replica, WIDTH, COLUMNS) + EPS)
    of_gamma = tl.zeros([COLUMNS], tl.float32)
    of_beta = tl.zeros([COLUMNS], tl.float32)
    begin = tl.program_id(0) * tiles_each
    for tile in range(begin, begin + tiles_each):
        place, inside = tile_of(tile, rows, WIDTH, BLOCK, COLUMNS)
        n = (tl.load(x_ptr + first + place, mask=inside, other=0.0) - mean) * scale
        grad = tl.load(grad_ptr + first + place, mask=inside, other=0.0)
        grad = unfinish(grad, n * gamma + beta, place, key, least, share, ACTIVATION, DROPS)
        of_gamma += tl.sum(grad * n, 0)
        of_beta += tl.sum(grad, 0)
    store_part(part_ptr, replica, of_gamma, of_beta, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=SIZES)
def batch_backward(
    grad_ptr, x_ptr, weight_ptr, total_ptr, mean_ptr, variance_ptr, gamma_ptr, beta_ptr, sums_ptr, seed_ptr, step_ptr,
    dx_ptr, rows, site, least, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """BatchNorm: ``dx`` from the whole sums of :func:`batch_sums`, ``[2, WIDTH]`` a replica."""
    replica = tl.program_id(1).to(tl.int64)
    place, inside = tile_of(tl.program_id(0), rows, WIDTH, BLOCK, COLUMNS)
    first = replica * rows * WIDTH
    gamma, beta = row_vector(gamma_ptr, replica, WIDTH, COLUMNS), row_vector(beta_ptr, replica, WIDTH, COLUMNS)
    scale = tl.rsqrt(row_vector(variance_ptr, replica, WIDTH, COLUMNS) + EPS)
    of_gamma = row_vector(sums_ptr, 2 * replica, WIDTH, COLUMNS)
    of_beta = row_vector(sums_ptr, 2 * replica + 1, WIDTH, COLUMNS)
    x = tl.load(x_ptr + first + place, mask=inside, other=0.0)
    n = (x - row_vector(mean_ptr, replica, WIDTH, COLUMNS)) * scale
    grad = tl.load(grad_ptr + first + place, mask=inside, other=0.0)
    key = mask_key(seed_ptr, step_ptr, replica, site, DROPS)
    grad = unfinish(grad, n * gamma + beta, place, key, least, share, ACTIVATION, DROPS)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(weight_ptr + row, mask=row < rows, other=0.0)[:, None] / tl.load(total_ptr)
    tl.store(dx_ptr + first + place, gamma * scale * (grad - counts * (of_beta + n * of_gamma)), mask=inside)
