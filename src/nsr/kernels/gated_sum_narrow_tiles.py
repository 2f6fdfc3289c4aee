"""Device functions of the gated residual sum for one head and widths whose whole row fits on chip: tiles, their sums.

Names follow ``gated_sum_narrow_kernels.py``. Tables may be bf16, and columns of a wider table.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.launch_sizes import SIZES
from nsr.kernels.row_runs import close_row
from nsr.kernels.tiles import dot, load_rows, split, terms_of


@triton.jit
def load_tile(row_ptr, other_ptr, rank_ptr, t_ptr, tile, members, BLOCK_E: tl.constexpr, LONG: tl.constexpr):
    """Row, other end, coefficient and rank (-1 where there is no member) of a tile's members; the last one's rank.

    ``LONG``: a table has more elements than 32 bits count.
    """
    at = tl.arange(0, BLOCK_E) + tile * BLOCK_E
    inside = at < members
    row = tl.load(row_ptr + at, mask=inside, other=0)
    other = tl.load(other_ptr + at, mask=inside, other=0)
    t = tl.load(t_ptr + at, mask=inside, other=0.0)
    rank = tl.load(rank_ptr + at, mask=inside, other=-1)
    newest = tl.load(rank_ptr + tl.minimum((tile + 1) * BLOCK_E, members) - 1)
    if LONG:
        row, other = row.to(tl.int64), other.to(tl.int64)
    return row, other, t, rank, newest


@triton.jit(do_not_specialize=SIZES)
def prepare(
    w_ptr,
    out_ptr,
    transposed_ptr,
    t_ptr,
    member_ptr,
    sorted_ptr,
    clear_1_ptr,
    clear_2_ptr,
    numel,
    members,
    cleared,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ZERO: tl.constexpr,
    TERMS: tl.constexpr,
):
    """What the other kernels read: ``W2`` in terms, coefficients in the walk's order, tables set to 0 for atomic sums.

    ``W2`` and its transpose are bf16 terms, each ``[TERMS, R, D, D]``: a factor that is converted inside a kernel stays
    in its registers, one that is loaded as it is does not. Sorted coefficients are one gather less to wait for in every
    tile. Both tables have ``cleared`` rows.

    Programs are the blocks of the weights, then those of the members, then those of zeros: nobody waits for two things.
    """
    program = tl.program_id(0)
    first_of_members = tl.cdiv(numel, BLOCK)
    first_of_zeros = first_of_members + tl.cdiv(members, BLOCK)
    if program < first_of_members:
        at = program * BLOCK + tl.arange(0, BLOCK)
        row, column = at // WIDTH, at % WIDTH
        mirrored = (row // WIDTH) * WIDTH * WIDTH + column * WIDTH + row % WIDTH
        w = terms_of(tl.load(w_ptr + at, mask=at < numel, other=0.0), TERMS)
        for i in tl.static_range(TERMS):
            tl.store(out_ptr + i * numel + at, w[i], mask=at < numel)
            tl.store(transposed_ptr + i * numel + mirrored, w[i], mask=at < numel)
    elif program < first_of_zeros:
        at = (program - first_of_members) * BLOCK + tl.arange(0, BLOCK)
        member = tl.load(member_ptr + at, mask=at < members, other=0)
        tl.store(sorted_ptr + at, tl.load(t_ptr + member, mask=at < members), mask=at < members)
    else:
        place = (program - first_of_zeros).to(tl.int64) * BLOCK_ZERO + tl.arange(0, BLOCK_ZERO)
        # A number that 16 divides, as the compiler sees: it stores four of a thread's zeros at once.
        within = place < tl.cast(cleared, tl.int64) * WIDTH
        zero = tl.zeros([BLOCK_ZERO], tl.float32)
        tl.store(clear_1_ptr + place, zero, mask=within)
        tl.store(clear_2_ptr + place, zero, mask=within)


@triton.jit(do_not_specialize=["parts", "bias_parts"])
def add_parts(
    part_ptr,
    bias_part_ptr,
    out_ptr,
    bias_ptr,
    parts,
    bias_parts,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the programs' parts of the gradients of ``W2`` and ``b2``, in a fixed order.

    Programs are (block of numbers, replica); the blocks behind the last one of ``W2`` are those of ``b2``. Blocks are
    narrow and read many parts at once, because there is nothing to do but wait for them.
    """
    block, replica = tl.program_id(0), tl.program_id(1).to(tl.int64)
    numel = WIDTH * WIDTH
    blocks = tl.cdiv(WIDTH * WIDTH, BLOCK)
    if block >= blocks:
        part_ptr, out_ptr, parts = bias_part_ptr, bias_ptr, bias_parts
        numel = WIDTH
        block -= blocks
    part_ptr += replica * parts * numel
    out_ptr += replica * numel
    at, part = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_P, BLOCK], tl.float32)
    for first in range(0, parts, BLOCK_P):
        inside = (first + part < parts)[:, None] & (at < numel)[None, :]
        place = (first + part).to(tl.int64)[:, None] * numel + at[None, :]
        total += tl.load(part_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.sum(total, 0), mask=at < numel)


@triton.jit
def row_sum(value, rank, r, share):
    """Sum ``share * value``, ``[channel, member]``, over the members of rank ``r``."""
    return tl.sum(value * tl.where(rank == r, share, 0.0)[None, :], 1)


@triton.jit
def add_tile(
    total, open_row, value, share, rank, opened, newest, began, goes_on, ranked_ptr, out_ptr, carry_ptr, k,
    WIDTH: tl.constexpr, SHORT_ROWS: tl.constexpr,
):  # fmt: skip
    """Add a tile's members to the sum of the open row; store the rows that end in the tile.

    Rows are summed one after the other. ``SHORT_ROWS``, of which many end in a tile, sixteen at a time by one product
    with a 0-1 matrix (member x rank): exact, because every fp32 value is the sum of three bf16 terms.

    Args:
        total: Sum so far of the row of rank ``opened``, ``[channel]``.
        open_row: That row.
        value: What is summed, ``[channel, member]``, each member times its ``share``.
        rank: Rank of each member, -1 where there is none.
        opened: Rank that was open before the tile.
        newest: Rank of the tile's last member.
        began, goes_on: See :func:`run_borders`.

    Returns:
        The sum of the row that is open now, and that row.
    """
    if not SHORT_ROWS:
        for r in range(opened, newest):
            total += row_sum(value, rank, r, share)
            close_row(total, open_row, r, began, goes_on, out_ptr, carry_ptr, WIDTH, k, WIDTH)
            open_row = tl.load(ranked_ptr + r + 1)
            total = tl.zeros_like(total)
        total += row_sum(value, rank, newest, share)
    else:
        v1, v2, v3 = split(value * share[None, :])
        within = (k < WIDTH)[:, None]
        for first in range(opened, newest + 1, 16):
            r = first + tl.arange(0, 16)
            ends = r < newest
            row = tl.load(ranked_ptr + r, mask=ends, other=0).to(tl.int64)
            selects = (rank[:, None] == r[None, :]).to(tl.float32).to(tl.bfloat16)  # shape: [member, rank]
            sums = dot(v3, selects, tl.zeros([value.shape[0], 16], tl.float32))
            sums = dot(v2, selects, sums)
            sums = dot(v1, selects, sums)
            sums += tl.where((r == opened)[None, :], total[:, None], 0.0)
            whole = (ends & (r != began))[None, :] & within
            tl.store(out_ptr + row[None, :] * WIDTH + k[:, None], sums, mask=whole)
            if opened == began:
                border = (ends & (r == began))[None, :] & within
                tl.store(carry_ptr + 0 * row[None, :] + k[:, None], sums, mask=border)
            total = tl.sum(tl.where((r == newest)[None, :], sums, 0.0), 1)
        open_row = tl.load(ranked_ptr + newest)
    return total, open_row


@triton.jit
def load_weight(w_ptr, replica, k, WIDTH: tl.constexpr, TERMS: tl.constexpr):
    """The terms of one replica's ``W2`` (each ``[out, in]``), or of its transpose."""
    numel = tl.num_programs(1) * WIDTH * WIDTH
    at = w_ptr + replica * WIDTH * WIDTH + k[:, None] * WIDTH + k[None, :]
    within = (k < WIDTH)[:, None] & (k < WIDTH)[None, :]
    w = (tl.load(at, mask=within, other=0.0),)
    for i in tl.static_range(1, TERMS):
        w = w + (tl.load(at + i * numel, mask=within, other=0.0),)  # noqa: RUF005  no starred tuples
    return w


@triton.jit
def load_hidden(
    a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH: tl.constexpr, A_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr
):
    """``x = a_s + b_v - t c_v``, ``[member, channel]``."""
    x = load_rows(a_ptr, source, k, WIDTH, A_STRIDE) + load_rows(b_ptr, target, k, WIDTH, B_STRIDE)
    return x - t[:, None] * load_rows(c_ptr, target, k, WIDTH)


@triton.jit
def load_logit_gradient(
    d_logit_ptr, first_tile, tile, members, k, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, TERMS: tl.constexpr
):
    """The terms of a tile's logit gradients, each ``[member, out]``; 0 for a member that does not exist."""
    member = tl.arange(0, BLOCK_E)
    pointer = d_logit_ptr + ((tile - first_tile) * BLOCK_E + member)[:, None] * (TERMS * WIDTH) + k[None, :]
    inside = (member < members - tile * BLOCK_E)[:, None] & (k < WIDTH)[None, :]
    y = (tl.load(pointer, mask=inside, other=0.0),)
    for i in tl.static_range(1, TERMS):
        y = y + (tl.load(pointer + i * WIDTH, mask=inside, other=0.0),)  # noqa: RUF005  no starred tuples
    return y


@triton.jit
def scatter(table_ptr, source, rank, k, value, WIDTH: tl.constexpr):
    """Add ``[channel, member]`` to the sources' rows, for the members that exist."""
    at = table_ptr + source[None, :] * WIDTH + k[:, None]
    tl.atomic_add(at, value, mask=(rank >= 0)[None, :] & (k < WIDTH)[:, None], sem="relaxed")
