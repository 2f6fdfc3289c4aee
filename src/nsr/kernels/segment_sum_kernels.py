"""The fused kernels of the weighted sum over members: the sum itself, and the coefficients' gradient."""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from nsr.kernels.launch_sizes import SIZES
from nsr.kernels.row_runs import add_rows, close_row, run_borders
from nsr.kernels.tiles import load_rows


@triton.jit(do_not_specialize=SIZES)
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
    members_per_run,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows ``sum_i t_i x_i`` on a block of channels; programs are (run of members, block, replica).

    One warp a program, so that a thread has all members of its channels and sums them on its own: four channels, also
    where bf16 would allow a load of eight.
    """
    program, replica = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n = tl.max_contiguous(tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D), 4)
    begin = program * members_per_run
    end = tl.minimum(begin + members_per_run, members)
    first, last, began, goes_on = run_borders(rank_ptr, begin, end, members)
    x_ptr += replica * others * STRIDE
    out_ptr += replica * rows * WIDTH
    carry_ptr += (replica * tl.num_programs(0) + program) * 2 * WIDTH

    opened, open_row = first, tl.load(ranked_ptr + first)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_E):
        at = start + tl.arange(0, BLOCK_E)
        inside = at < end
        rank = tl.load(rank_ptr + at, mask=inside, other=-1)
        member = tl.load(member_ptr + at, mask=inside, other=0).to(tl.int64)
        other = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int64)
        if HEADS == 1:
            t = tl.load(t_ptr + member)[:, None]
        else:
            head = tl.minimum(n, WIDTH - 1) // (WIDTH // HEADS)
            t = tl.load(t_ptr + (member * HEADS)[:, None] + head[None, :])
        value = t * load_rows(x_ptr, other, n, WIDTH, STRIDE)
        newest = tl.load(rank_ptr + tl.minimum(start + BLOCK_E, end) - 1)
        total, open_row = add_rows(
            total, open_row, value, rank, opened, newest, began, goes_on, ranked_ptr, out_ptr, carry_ptr, WIDTH, n,
            WIDTH,
        )  # fmt: skip
        opened = newest
    close_row(total, open_row, last, began, goes_on, out_ptr, carry_ptr, WIDTH, n, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def coefficient_backward(
    grad_ptr,
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
    """``d t_ih = <grad_v, m_s>`` over head ``h`` and all replicas."""
    at = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < members
    source = tl.load(source_ptr + at, mask=inside, other=0)
    target = tl.load(target_ptr + at, mask=inside, other=0)
    for h in tl.static_range(HEADS):
        d_t = tl.zeros([BLOCK_E], tl.float32)
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
