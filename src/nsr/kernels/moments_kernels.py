"""The fused kernels of the weighted sum over members: the sum with its energy, and the coefficients' gradient."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from nsr.kernels.gated_sum_kernels import load_coefficient
from nsr.kernels.tiles import load_rows


@triton.jit
def weighted_sum(
    x_ptr,
    t_ptr,
    other_ptr,
    member_ptr,
    rank_ptr,
    ranked_ptr,
    out_ptr,
    carry_ptr,
    rows,
    others,
    members,
    members_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ENERGY: tl.constexpr,
):
    """Rows ``sum_i t_i x_i`` on a block of channels, or ``sum_i t_i^2``; programs are (run of members, block, replica).

    One warp a program, so that a thread has all members of its channels and sums them on its own. The row that is open
    at the end of a block of members stays in registers; what crosses the border of a run goes to the carry.
    """
    program, replica = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = program * members_per_program
    end = tl.minimum(begin + members_per_program, members)
    first = tl.load(rank_ptr + begin)
    last = tl.load(rank_ptr + end - 1)
    shared = first - 1  # the rank that continues a row of the run before, if any
    if tl.load(rank_ptr + begin - 1, mask=begin > 0, other=-1) == first:
        shared = first
    out_ptr += replica * rows * WIDTH
    carry_ptr += (replica * tl.num_programs(0) + program) * 2 * WIDTH

    opened = first
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_E):
        at = start + tl.arange(0, BLOCK_E)
        inside = at < end
        rank = tl.load(rank_ptr + at, mask=inside, other=-1)
        member = tl.load(member_ptr + at, mask=inside, other=0).to(tl.int64)
        t = load_coefficient(t_ptr, member, n, WIDTH, HEADS)
        if ENERGY:
            value = tl.broadcast_to(t * t, [BLOCK_E, BLOCK_D])
        else:
            other = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int64) + replica * others
            value = t * load_rows(x_ptr, other, n, WIDTH)
        newest = tl.load(rank_ptr + tl.minimum(start + BLOCK_E, end) - 1)
        for r in range(opened, newest):  # rows that end here
            total += tl.sum(tl.where((rank == r)[:, None], value, 0.0), 0)
            at_row = out_ptr + tl.load(ranked_ptr + r).to(tl.int64) * WIDTH
            if r == shared:
                at_row = carry_ptr
            tl.store(at_row + n, total, mask=n < WIDTH)
            total = tl.zeros([BLOCK_D], tl.float32)
        total += tl.sum(tl.where((rank == newest)[:, None], value, 0.0), 0)
        opened = newest
    at_row = out_ptr + tl.load(ranked_ptr + last).to(tl.int64) * WIDTH
    if tl.load(rank_ptr + end, mask=end < members, other=-1) == last:
        at_row = carry_ptr + WIDTH
    if last == shared:
        at_row = carry_ptr
    tl.store(at_row + n, total, mask=n < WIDTH)


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
