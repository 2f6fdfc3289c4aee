"""Device functions for sums over rows: a program walks over a run of members and keeps the open row's sum on chip.

Members are sorted by row, rows with members are numbered by rank. A row that lies inside a run is stored at once. One
that crosses a border leaves a partial sum in the carry of each of its runs, ``[runs, 2, width]``: slot 1 of the run
where it begins, slot 0 of the others. :func:`add_carry` adds them up in the order of the runs. Rows without members are
set to 0 in the same launch, so that the table that is summed into may start from anything.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from nsr.kernels.launch_sizes import SIZES


@triton.jit
def run_borders(rank_ptr, begin, end, members):
    """Of a run: its first and its last rank, the rank that began before it and the one that goes on behind (or -1)."""
    first = tl.load(rank_ptr + begin)
    last = tl.load(rank_ptr + end - 1)
    began = tl.where(tl.load(rank_ptr + begin - 1, mask=begin > 0, other=-1) == first, first, -1)
    goes_on = tl.where(tl.load(rank_ptr + end, mask=end < members, other=-1) == last, last, -1)
    return first, last, began, goes_on


@triton.jit
def add_rows(
    total, row, value, rank, opened, newest, began, goes_on, ranked_ptr, out_ptr, carry_ptr, stride, column,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Add a tile's members to the sum of the open row; store the rows that end in the tile.

    Args:
        total: Sum so far of the row of rank ``opened``, ``[channel]``.
        row: That row; known before it is stored to, so that nothing waits for it there.
        value: What is summed, ``[member, channel]``.
        rank: Rank of each member, -1 where there is none.
        opened: Rank that was open before the tile.
        newest: Rank of the tile's last member.
        began, goes_on: See :func:`run_borders`.
        stride: Elements from row to row of ``out``.
        column: Channels of ``value``.

    Returns:
        The sum of the row that is open now, and that row.
    """
    for r in range(opened, newest):
        total += tl.sum(tl.where((rank == r)[:, None], value, 0.0), 0)
        close_row(total, row, r, began, goes_on, out_ptr, carry_ptr, stride, column, WIDTH)
        row = tl.load(ranked_ptr + r + 1)
        total = tl.zeros_like(total)
    return total + tl.sum(tl.where((rank == newest)[:, None], value, 0.0), 0), row


@triton.jit
def close_row(total, row, r, began, goes_on, out_ptr, carry_ptr, stride, column, WIDTH: tl.constexpr):
    """Store the sum of rank ``r`` in its row of ``out``, or in this run's carry where the row crosses a border."""
    at = out_ptr + row.to(tl.int64) * stride
    if r == goes_on:
        at = carry_ptr + stride
    if r == began:
        at = carry_ptr
    tl.store(at + column, total, mask=column < WIDTH)


@triton.jit
def add_carry(row_ptr, start_ptr, carry_ptr, out_ptr, run, runs, members_per_run, members, stride, column):
    """Finish the row that begins in a run and ends in a later one."""
    inside = column < stride
    row = tl.load(row_ptr + tl.minimum((run + 1) * members_per_run, members) - 1)  # the run's last one
    first = tl.load(start_ptr + row) // members_per_run
    last = (tl.load(start_ptr + row + 1) - 1) // members_per_run
    if (first == run) & (last > run):
        total = tl.load(carry_ptr + (run.to(tl.int64) * 2 + 1) * stride + column, mask=inside, other=0.0)
        lane = tl.arange(0, 16)
        for next_run in range(run + 1, last + 1, 16):
            at = (next_run + lane).to(tl.int64)[:, None] * 2 * stride + column[None, :]
            within = (next_run + lane <= last)[:, None] & inside[None, :]
            total += tl.sum(tl.load(carry_ptr + at, mask=within, other=0.0), 0)
        tl.store(out_ptr + row.to(tl.int64) * stride + column, total, mask=inside)


@triton.jit
def clear_empty_rows(start_ptr, out_ptr, first_row, rows, stride, column, BLOCK_R: tl.constexpr):
    """Write 0 to the rows of a block that have no members: nobody else stores to them."""
    row = first_row + tl.arange(0, BLOCK_R)
    begin = tl.load(start_ptr + row, mask=row < rows, other=0)
    empty = (row < rows) & (begin == tl.load(start_ptr + row + 1, mask=row < rows, other=-1))
    if tl.sum(empty.to(tl.int32), 0) > 0:
        for r in range(first_row, tl.minimum(first_row + BLOCK_R, rows)):
            if tl.load(start_ptr + r) == tl.load(start_ptr + r + 1):
                at = out_ptr + tl.cast(r, tl.int64) * stride + column
                tl.store(at, tl.zeros_like(column).to(tl.float32), mask=column < stride)


@triton.jit(do_not_specialize=[*SIZES, "runs_1", "runs_2", "members_per_run_1", "members_per_run_2", "most_runs"])
def finish_tables(
    row_ptr,
    start_ptr,
    carry_ptr,
    out_ptr,
    runs,
    members_per_run,
    carry_1_ptr,
    out_1_ptr,
    runs_1,
    members_per_run_1,
    carry_2_ptr,
    out_2_ptr,
    runs_2,
    members_per_run_2,
    most_runs,
    rows,
    members,
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Finish the rows that cross a border and those without members, of up to three tables of one order.

    Programs are (runs where such a row begins, behind them blocks of rows; table; replica): one that did both would
    wait for both. No table has more than ``most_runs`` runs.
    """
    program, table, replica = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if table == 1:
        carry_ptr, out_ptr, runs, members_per_run = carry_1_ptr, out_1_ptr, runs_1, members_per_run_1
    if table == 2:
        carry_ptr, out_ptr, runs, members_per_run = carry_2_ptr, out_2_ptr, runs_2, members_per_run_2
    carry_ptr += replica * runs * 2 * stride
    out_ptr += replica * rows * stride
    for first_column in range(0, stride, BLOCK_W):
        column = first_column + tl.arange(0, BLOCK_W)
        if program >= most_runs:
            clear_empty_rows(start_ptr, out_ptr, (program - most_runs) * BLOCK_R, rows, stride, column, BLOCK_R)
        elif program < runs - 1:  # behind the last run there is none
            add_carry(row_ptr, start_ptr, carry_ptr, out_ptr, program, runs, members_per_run, members, stride, column)
