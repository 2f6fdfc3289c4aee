"""The fused kernels of the gated residual sum for widths whose whole row fits on chip, over members sorted by row.

Names follow ``gated_sum.py``: ``m``, ``a`` are source tables, ``b``, ``u``, ``c`` target tables, ``t`` coefficients,
``z`` the residual, ``g`` the gate; ``x`` is the gate's hidden layer before GELU.

Each program walks over a run of tiles with ``W2`` kept on chip. What it waits for is memory, so the indices of a tile
are read while the tile before is worked on, and all its rows are read at once. Tables are gathered as
``[member, channel]``, where a row is contiguous; products are made as ``[channel, member]``, where a thread holds many
members of a channel and sums a row's members nearly by itself. The backward pass is two kernels, because the weights'
gradient takes too many registers: :func:`tables_backward` for everything that belongs to a node,
:func:`weight_backward` for ``W2``. What passes between them is the logits' gradient of a chunk of members,
``[chunk, D]``, in bf16 terms.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.row_runs import add_rows, close_row, row_sum, run_borders
from nsr.kernels.tiles import gelu_parts, load_rows, multiply, sigmoid, terms_of


@triton.jit
def load_tile(row_ptr, other_ptr, rank_ptr, tile, members, BLOCK_E: tl.constexpr, LONG: tl.constexpr):
    """Row, other end and rank (-1 where there is no member) of a tile's members, and the rank of the last one.

    ``LONG``: a table has more elements than 32 bits count.
    """
    at = tl.arange(0, BLOCK_E) + tile * BLOCK_E
    inside = at < members
    row = tl.load(row_ptr + at, mask=inside, other=0)
    other = tl.load(other_ptr + at, mask=inside, other=0)
    rank = tl.load(rank_ptr + at, mask=inside, other=-1)
    newest = tl.load(rank_ptr + tl.minimum((tile + 1) * BLOCK_E, members) - 1)
    if LONG:
        row, other = row.to(tl.int64), other.to(tl.int64)
    return row, other, rank, newest


@triton.jit
def weight_terms(w_ptr, out_ptr, numel, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    """``W2`` as bf16 terms, ``[TERMS, R, D, D]``.

    Made once: a factor that is converted inside a kernel stays in its registers, one that is loaded as it is does not.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = terms_of(tl.load(w_ptr + at, mask=at < numel, other=0.0), TERMS)
    for i in tl.static_range(TERMS):
        tl.store(out_ptr + i * numel + at, w[i], mask=at < numel)


@triton.jit
def load_weight(w_ptr, replica, k, WIDTH: tl.constexpr, TERMS: tl.constexpr):
    """The terms of one replica's ``W2``, each ``[out, in]``."""
    numel = tl.num_programs(1) * WIDTH * WIDTH
    at = w_ptr + replica * WIDTH * WIDTH + k[:, None] * WIDTH + k[None, :]
    within = (k < WIDTH)[:, None] & (k < WIDTH)[None, :]
    w = (tl.load(at, mask=within, other=0.0),)
    for i in tl.static_range(1, TERMS):
        w = w + (tl.load(at + i * numel, mask=within, other=0.0),)  # noqa: RUF005  no starred tuples
    return w


@triton.jit
def load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, tile, members, k, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """``x = a_s + b_v - sum_h t_h c_vh``, ``[member, channel]``."""
    x = load_rows(a_ptr, source, k, WIDTH) + load_rows(b_ptr, target, k, WIDTH)
    for h in tl.static_range(HEADS):
        t = load_coefficient(t_ptr, h, tile, members, HEADS, source.shape[0])
        x -= t[:, None] * load_rows(c_ptr, target * HEADS + h, k, WIDTH)
    return x


@triton.jit
def load_coefficient(t_ptr, h, tile, members, HEADS: tl.constexpr, BLOCK_E: tl.constexpr):
    """The coefficient of a head, ``[member]``."""
    at = (tl.arange(0, BLOCK_E) + tile * BLOCK_E).to(tl.int64)
    return tl.load(t_ptr + at * HEADS + h, mask=at < members, other=0.0)


@triton.jit
def coefficient_by_channel(t_ptr, tile, members, k, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr):
    """The coefficient of each channel's head, ``[member, channel]``; ``[member, 1]`` with one head."""
    if HEADS == 1:
        t = load_coefficient(t_ptr, 0, tile, members, 1, BLOCK_E)[:, None]
    else:
        at = (tl.arange(0, BLOCK_E) + tile * BLOCK_E).to(tl.int64)
        head = tl.minimum(k, WIDTH - 1) // (WIDTH // HEADS)
        t = tl.load(t_ptr + (at * HEADS)[:, None] + head[None, :], mask=(at < members)[:, None], other=0.0)
    return t


@triton.jit
def sum_forward(
    m_ptr,
    a_ptr,
    b_ptr,
    u_ptr,
    c_ptr,
    w_ptr,
    bias_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    rank_ptr,
    ranked_ptr,
    scale_ptr,
    out_ptr,
    carry_ptr,
    sources,
    targets,
    members,
    tiles,
    tiles_per_run,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TERMS: tl.constexpr,
    LONG: tl.constexpr,
):
    """Rows ``K^{-1/2} sum g z``; programs are (run of tiles, replica)."""
    program, replica = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m_ptr += replica * sources * WIDTH
    a_ptr += replica * sources * WIDTH
    b_ptr += replica * targets * WIDTH
    u_ptr += replica * targets * WIDTH
    c_ptr += replica * targets * HEADS * WIDTH
    out_ptr += replica * targets * WIDTH
    carry_ptr += (replica * tl.num_programs(0) + program) * 2 * WIDTH
    k = tl.arange(0, BLOCK_W)
    w = load_weight(w_ptr, replica, k, WIDTH, TERMS)
    bias = tl.load(bias_ptr + replica * WIDTH + k, mask=k < WIDTH, other=0.0)
    begin = program * tiles_per_run
    end = tl.minimum(begin + tiles_per_run, tiles)
    first, last, began, goes_on = run_borders(rank_ptr, begin * BLOCK_E, tl.minimum(end * BLOCK_E, members), members)

    opened = first
    total = tl.zeros([BLOCK_W], tl.float32)
    target, source, rank, newest = load_tile(row_ptr, other_ptr, rank_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, end):
        x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, tile, members, k, WIDTH, HEADS)
        t = coefficient_by_channel(t_ptr, tile, members, k, WIDTH, HEADS, BLOCK_E)
        z = load_rows(m_ptr, source, k, WIDTH) - t * load_rows(u_ptr, target, k, WIDTH)
        next_target, next_source, next_rank, next_newest = load_tile(
            row_ptr, other_ptr, rank_ptr, tile + 1, members, BLOCK_E, LONG
        )
        cdf, _ = gelu_parts(x)
        q = terms_of(x * cdf, TERMS)
        logit = multiply(w, q, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), False, True, TERMS)  # shape: [out, member]
        value = sigmoid(logit + bias[:, None]) * tl.trans(z)
        total = add_rows(
            total, value, rank, opened, newest, began, goes_on, ranked_ptr, scale_ptr, out_ptr, carry_ptr, WIDTH, k,
            WIDTH, 1, True,
        )  # fmt: skip
        opened = newest
        target, source, rank, newest = next_target, next_source, next_rank, next_newest
    close_row(total, last, began, goes_on, ranked_ptr, scale_ptr, out_ptr, carry_ptr, WIDTH, k, WIDTH, True)


@triton.jit
def tables_backward(
    grad_ptr,
    m_ptr,
    a_ptr,
    b_ptr,
    u_ptr,
    c_ptr,
    w_ptr,
    bias_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    rank_ptr,
    ranked_ptr,
    d_m_ptr,
    d_a_ptr,
    d_t_ptr,
    d_bias_ptr,
    d_logit_ptr,
    sum_z_ptr,
    sum_x_ptr,
    sum_c_ptr,
    carry_z_ptr,
    carry_x_ptr,
    carry_c_ptr,
    sources,
    targets,
    rows,
    members,
    tiles,
    first_run,
    runs,
    tiles_per_run,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TERMS: tl.constexpr,
    LONG: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """Gradients of all tables and of ``t``; programs are (run of tiles, replica), beginning with ``first_run``.

    Over members sorted by target the rows of ``u`` (``sum_z``), ``b`` (``sum_x``) and ``c`` are summed and, with
    ``SCATTER``, those of ``m`` and ``a`` added to atomically. Over members sorted by source (``BY_SOURCE``) the rows of
    ``m`` (``sum_z``) and ``a`` (``sum_x``) are summed in a fixed order, and nothing else is done.
    """
    run, replica = first_run + tl.program_id(0), tl.program_id(1).to(tl.int64)
    grad_ptr += replica * targets * WIDTH
    m_ptr += replica * sources * WIDTH
    a_ptr += replica * sources * WIDTH
    b_ptr += replica * targets * WIDTH
    u_ptr += replica * targets * WIDTH
    c_ptr += replica * targets * HEADS * WIDTH
    d_m_ptr += replica * sources * WIDTH
    d_a_ptr += replica * sources * WIDTH
    d_t_ptr += replica * members * HEADS
    sum_z_ptr += replica * rows * WIDTH
    sum_x_ptr += replica * rows * WIDTH
    sum_c_ptr += replica * rows * HEADS * WIDTH
    carry = (replica * runs + run) * 2
    carry_z_ptr += carry * WIDTH
    carry_x_ptr += carry * WIDTH
    carry_c_ptr += carry * HEADS * WIDTH
    # The chunk holds the members of all programs of this launch.
    d_logit_ptr += (replica * tl.num_programs(0) + tl.program_id(0)) * tiles_per_run * BLOCK_E * TERMS * WIDTH
    k = tl.arange(0, BLOCK_W)
    within = k < WIDTH
    w = load_weight(w_ptr, replica, k, WIDTH, TERMS)
    bias = tl.load(bias_ptr + replica * WIDTH + k, mask=within, other=0.0)
    begin = run * tiles_per_run
    end = tl.minimum(begin + tiles_per_run, tiles)
    first, last, began, goes_on = run_borders(rank_ptr, begin * BLOCK_E, tl.minimum(end * BLOCK_E, members), members)

    opened = first
    total_z = tl.zeros([BLOCK_W], tl.float32)
    total_x = tl.zeros([BLOCK_W], tl.float32)
    total_c = tl.zeros([BLOCK_W, BLOCK_H], tl.float32)
    d_bias = tl.zeros([BLOCK_W], tl.float32)
    row, other, rank, newest = load_tile(row_ptr, other_ptr, rank_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, end):
        if BY_SOURCE:
            source, target = row, other
        else:
            source, target = other, row
        x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, tile, members, k, WIDTH, HEADS)
        t = coefficient_by_channel(t_ptr, tile, members, k, WIDTH, HEADS, BLOCK_E)
        u = load_rows(u_ptr, target, k, WIDTH)
        z = load_rows(m_ptr, source, k, WIDTH) - t * u
        # A member that does not exist has no gradient.
        from_sum = tl.where((rank >= 0)[:, None], load_rows(grad_ptr, target, k, WIDTH), 0.0)
        next_row, next_other, next_rank, next_newest = load_tile(
            row_ptr, other_ptr, rank_ptr, tile + 1, members, BLOCK_E, LONG
        )
        cdf, pdf = gelu_parts(x)
        q = terms_of(x * cdf, TERMS)
        logit = multiply(w, q, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), False, True, TERMS)  # shape: [out, member]
        g = sigmoid(logit + bias[:, None])
        d_z = tl.trans(from_sum) * g
        d_logit = d_z * tl.trans(z) * (1.0 - g)
        y = terms_of(d_logit, TERMS)
        d_hidden = multiply(w, y, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), True, False, TERMS)  # shape: [in, member]
        d_x = d_hidden * tl.trans(cdf + x * pdf)

        if not BY_SOURCE:
            d_bias += tl.sum(d_logit, 1)
            in_chunk = ((tile - begin) * BLOCK_E + tl.arange(0, BLOCK_E))[None, :] * (TERMS * WIDTH) + k[:, None]
            for i in tl.static_range(TERMS):
                tl.store(d_logit_ptr + in_chunk + i * WIDTH, y[i], mask=within[:, None])
        if SCATTER:
            in_table = source[None, :] * WIDTH + k[:, None]
            exists = (rank >= 0)[None, :] & within[:, None]
            tl.atomic_add(d_m_ptr + in_table, d_z, mask=exists, sem="relaxed")
            tl.atomic_add(d_a_ptr + in_table, d_x, mask=exists, sem="relaxed")
        if BY_SOURCE:
            value = d_z
        else:
            value = -tl.trans(t) * d_z
        for r in range(opened, newest):  # rows that end here
            total_z += row_sum(value, rank, r, 1)
            total_x += row_sum(d_x, rank, r, 1)
            close_row(total_z, r, began, goes_on, ranked_ptr, t_ptr, sum_z_ptr, carry_z_ptr, WIDTH, k, WIDTH, False)
            close_row(total_x, r, began, goes_on, ranked_ptr, t_ptr, sum_x_ptr, carry_x_ptr, WIDTH, k, WIDTH, False)
            total_z = tl.zeros([BLOCK_W], tl.float32)
            total_x = tl.zeros([BLOCK_W], tl.float32)
            if not BY_SOURCE:
                total_c -= row_sums_by_head(d_x, rank, r, t_ptr, tile, members, HEADS, BLOCK_H)
                close_row_by_head(
                    total_c, r, began, goes_on, ranked_ptr, t_ptr, sum_c_ptr, carry_c_ptr, k, WIDTH, HEADS
                )
                total_c = tl.zeros([BLOCK_W, BLOCK_H], tl.float32)
        total_z += row_sum(value, rank, newest, 1)
        total_x += row_sum(d_x, rank, newest, 1)
        if not BY_SOURCE:
            total_c -= row_sums_by_head(d_x, rank, newest, t_ptr, tile, members, HEADS, BLOCK_H)
        if NEEDS_T:
            along = d_z * tl.trans(u)
            for h in tl.static_range(HEADS):
                c = tl.trans(load_rows(c_ptr, target * HEADS + h, k, WIDTH))
                d_t = tl.sum(tl.where((k // (WIDTH // HEADS) == h)[:, None], along, 0.0) + d_x * c, 0)
                at = (tl.arange(0, BLOCK_E) + tile * BLOCK_E).to(tl.int64)
                tl.store(d_t_ptr + at * HEADS + h, -d_t, mask=rank >= 0)
        opened = newest
        row, other, rank, newest = next_row, next_other, next_rank, next_newest
    close_row(total_z, last, began, goes_on, ranked_ptr, t_ptr, sum_z_ptr, carry_z_ptr, WIDTH, k, WIDTH, False)
    close_row(total_x, last, began, goes_on, ranked_ptr, t_ptr, sum_x_ptr, carry_x_ptr, WIDTH, k, WIDTH, False)
    if not BY_SOURCE:
        close_row_by_head(total_c, last, began, goes_on, ranked_ptr, t_ptr, sum_c_ptr, carry_c_ptr, k, WIDTH, HEADS)
        tl.store(d_bias_ptr + (replica * runs + run) * WIDTH + k, d_bias, mask=within)


@triton.jit
def row_sums_by_head(value, rank, r, t_ptr, tile, members, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """``sum_i t_ih value_i`` over the members of rank ``r``, ``[channel, head]``."""
    head = tl.arange(0, BLOCK_H)
    mine = tl.where((rank == r)[None, :], value, 0.0)
    sums = tl.zeros([value.shape[0], BLOCK_H], tl.float32)
    for h in tl.static_range(HEADS):
        t = load_coefficient(t_ptr, h, tile, members, HEADS, value.shape[1])
        sums += tl.where((head == h)[None, :], tl.sum(mine * t[None, :], 1)[:, None], 0.0)
    return sums


@triton.jit
def close_row_by_head(
    total, r, began, goes_on, ranked_ptr, scale_ptr, out_ptr, carry_ptr, k, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    """:func:`close_row` for ``[channel, head]``."""
    head = tl.arange(0, total.shape[1])
    for h in tl.static_range(HEADS):
        total_h = tl.sum(tl.where((head == h)[None, :], total, 0.0), 1)
        close_row(
            total_h, r, began, goes_on, ranked_ptr, scale_ptr, out_ptr + h * WIDTH, carry_ptr + h * WIDTH,
            HEADS * WIDTH, k, WIDTH, False,
        )  # fmt: skip


@triton.jit
def weight_backward(
    a_ptr,
    b_ptr,
    c_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    rank_ptr,
    d_w_ptr,
    d_logit_ptr,
    sources,
    targets,
    members,
    first_tile,
    end_tile,
    chunk_tiles,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TERMS: tl.constexpr,
    LONG: tl.constexpr,
):
    """``d_W2 += d_logit^T GELU(x)`` over a chunk; a partial sum a program, kept from chunk to chunk."""
    program, replica = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a_ptr += replica * sources * WIDTH
    b_ptr += replica * targets * WIDTH
    c_ptr += replica * targets * HEADS * WIDTH
    d_logit_ptr += replica * chunk_tiles * BLOCK_E * TERMS * WIDTH
    k = tl.arange(0, BLOCK_W)
    within = k < WIDTH
    d_w = tl.zeros([BLOCK_W, BLOCK_W], tl.float32)
    begin = first_tile + program * tiles_per_program
    target, source, _rank, _newest = load_tile(row_ptr, other_ptr, rank_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, tl.minimum(begin + tiles_per_program, end_tile)):
        x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, tile, members, k, WIDTH, HEADS)
        place = (tl.arange(0, BLOCK_E) + (tile - first_tile) * BLOCK_E).to(tl.int64)
        y = (load_rows(d_logit_ptr, place * TERMS, k, WIDTH),)
        for i in tl.static_range(1, TERMS):
            y = y + (load_rows(d_logit_ptr, place * TERMS + i, k, WIDTH),)  # noqa: RUF005  no starred tuples
        target, source, _rank, _newest = load_tile(row_ptr, other_ptr, rank_ptr, tile + 1, members, BLOCK_E, LONG)
        cdf, _pdf = gelu_parts(x)
        q = terms_of(x * cdf, TERMS)
        d_w = multiply(y, q, d_w, True, False, TERMS)  # shape: [out, in]
    at = (replica * tl.num_programs(0) + program) * WIDTH * WIDTH + k[:, None] * WIDTH + k[None, :]
    inside = within[:, None] & within[None, :]
    if first_tile > 0:
        d_w += tl.load(d_w_ptr + at, mask=inside, other=0.0)
    tl.store(d_w_ptr + at, d_w, mask=inside)
