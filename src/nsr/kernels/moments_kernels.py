"""The fused kernels of the weighted sum over members: the sum with its energy, and the coefficients' gradient."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from nsr.kernels.gated_sum_kernels import load_coefficient
from nsr.kernels.tiles import load_rows, rank_places, store_rows, tile_members, tile_rows


@triton.jit
def weighted_sum(
    x_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    member_ptr,
    out_ptr,
    carry_ptr,
    energy_ptr,
    energy_carry_ptr,
    rows,
    others,
    members,
    tiles,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ENERGY: tl.constexpr,
):
    """Rows ``sum_i t_i x_i`` on a block of channels and ``sum_i t_i^2``; programs are (tiles, block, replica)."""
    replica = tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.program_id(0) * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, tiles)):
        sums = tile_rows(row_ptr, tile, members, replica, rows, tiles, BLOCK_E)
        _, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        other += replica * others
        value = load_coefficient(t_ptr, member, n, WIDTH, HEADS) * load_rows(x_ptr, other, n, WIDTH)
        value = tl.where(inside[:, None], value, 0.0)
        store_rows(sums, value, out_ptr, carry_ptr, WIDTH, n, WIDTH)
        if ENERGY:  # every block of channels stores the same
            selects, out_row, carry_row, whole, crosses = rank_places(sums, 0, BLOCK_E)
            for h in tl.static_range(HEADS):
                t = tl.load(t_ptr + member * HEADS + h)
                energy = tl.sum(tl.where(selects, (t * t)[None, :], 0.0), 1)
                tl.store(energy_ptr + out_row * HEADS + h, energy, mask=whole)
                tl.store(energy_carry_ptr + carry_row * HEADS + h, energy, mask=crosses)


@triton.jit
def coefficient_backward(
    grad_ptr,
    grad_energy_ptr,
    m_ptr,
    t_ptr,
    source_ptr,
    target_ptr,
    d_t_ptr,
    replicas,
    sources,
    targets,
    members,
    HEADS: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``d t_ih = <grad_v, m_s>`` over head ``h`` and all replicas, plus ``2 t_ih`` times the energy's gradient."""
    at = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < members
    source = tl.load(source_ptr + at, mask=inside, other=0)
    target = tl.load(target_ptr + at, mask=inside, other=0)
    for h in tl.static_range(HEADS):
        t = tl.load(t_ptr + at.to(tl.int64) * HEADS + h, mask=inside, other=0.0)
        d_t = 2.0 * t * tl.load(grad_energy_ptr + target * HEADS + h, mask=inside, other=0.0)
        for replica in range(replicas):
            for d0 in tl.static_range(0, HEAD_WIDTH, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                mask = inside[:, None] & (d < HEAD_WIDTH)[None, :]
                column = (h * HEAD_WIDTH + d)[None, :]
                m_at = (source + replica * sources)[:, None] * (HEADS * HEAD_WIDTH) + column
                grad_at = (target + replica * targets)[:, None] * (HEADS * HEAD_WIDTH) + column
                m = tl.load(m_ptr + m_at, mask=mask, other=0.0)
                d_t += tl.sum(m * tl.load(grad_ptr + grad_at, mask=mask, other=0.0), 1)
        tl.store(d_t_ptr + at.to(tl.int64) * HEADS + h, d_t, mask=inside)
