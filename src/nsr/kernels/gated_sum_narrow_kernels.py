"""The fused kernels of the gated residual sum for one head and widths whose whole row fits on chip.

Names follow ``gated_sum.py``: ``m``, ``a`` are source tables, ``b``, ``u``, ``c`` target tables, ``t`` coefficients,
``z`` the residual, ``g`` the gate; ``x`` is the gate's hidden layer before GELU.

Each program walks over a run of tiles of members sorted by row, with ``W2`` kept on chip. What it waits for is memory,
so the indices of a tile are read while the tile before is worked on, and all its rows are read at once. Tables are
gathered as ``[member, channel]``, where a row is contiguous; products are made as ``[channel, member]``, where a thread
holds many members of a channel and sums a row's members nearly by itself. The backward pass is two kernels, because one
needs more registers than there are: from the sum to the gate's logits, and from the logits to the hidden layer and
``W2``. What passes between them is the logits' gradient of a chunk of members, ``[chunk, D]``, in bf16 terms;
everything else is computed anew.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.launch_sizes import SIZES
from nsr.kernels.row_runs import close_row, run_borders
from nsr.kernels.tiles import gelu_and_slope, gelu_for, load_rows, multiply, sigmoid, terms_of


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
def weight_terms(w_ptr, out_ptr, transposed_ptr, numel, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TERMS: tl.constexpr):
    """``W2`` and its transpose as bf16 terms, each ``[TERMS, R, D, D]``.

    Made once: a factor that is converted inside a kernel stays in its registers, one that is loaded as it is does not.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // WIDTH, at % WIDTH
    mirrored = (row // WIDTH) * WIDTH * WIDTH + column * WIDTH + row % WIDTH
    w = terms_of(tl.load(w_ptr + at, mask=at < numel, other=0.0), TERMS)
    for i in tl.static_range(TERMS):
        tl.store(out_ptr + i * numel + at, w[i], mask=at < numel)
        tl.store(transposed_ptr + i * numel + mirrored, w[i], mask=at < numel)


@triton.jit
def row_sum(value, rank, r, share):
    """Sum ``share * value``, ``[channel, member]``, over the members of rank ``r``."""
    return tl.sum(value * tl.where(rank == r, share, 0.0)[None, :], 1)


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
def load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH: tl.constexpr):
    """``x = a_s + b_v - t c_v``, ``[member, channel]``."""
    x = load_rows(a_ptr, source, k, WIDTH) + load_rows(b_ptr, target, k, WIDTH)
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


@triton.jit(do_not_specialize=SIZES)
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
    c_ptr += replica * targets * WIDTH
    out_ptr += replica * targets * WIDTH
    carry_ptr += (replica * tl.num_programs(0) + program) * 2 * WIDTH
    k = tl.arange(0, BLOCK_W)
    w = load_weight(w_ptr, replica, k, WIDTH, TERMS)
    bias = tl.load(bias_ptr + replica * WIDTH + k, mask=k < WIDTH, other=0.0)
    begin = program * tiles_per_run
    end = tl.minimum(begin + tiles_per_run, tiles)
    first, last, began, goes_on = run_borders(rank_ptr, begin * BLOCK_E, tl.minimum(end * BLOCK_E, members), members)

    opened, open_row = first, tl.load(ranked_ptr + first)
    scale = tl.load(scale_ptr + open_row)
    total = tl.zeros([BLOCK_W], tl.float32)
    target, source, t, rank, newest = load_tile(row_ptr, other_ptr, rank_ptr, t_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, end):
        x = load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH)
        z = load_rows(m_ptr, source, k, WIDTH) - t[:, None] * load_rows(u_ptr, target, k, WIDTH)
        next_target, next_source, next_t, next_rank, next_newest = load_tile(
            row_ptr, other_ptr, rank_ptr, t_ptr, tile + 1, members, BLOCK_E, LONG
        )
        q = terms_of(gelu_for(x, TERMS), TERMS)
        logit = multiply(w, q, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), False, True, TERMS)  # shape: [out, member]
        value = sigmoid(logit, bias[:, None]) * tl.trans(z)
        for r in range(opened, newest):  # rows that end here
            total += row_sum(value, rank, r, 1.0)
            close_row(total * scale, open_row, r, began, goes_on, out_ptr, carry_ptr, WIDTH, k, WIDTH)
            open_row = tl.load(ranked_ptr + r + 1)
            scale = tl.load(scale_ptr + open_row)
            total = tl.zeros([BLOCK_W], tl.float32)
        total += row_sum(value, rank, newest, 1.0)
        opened = newest
        target, source, t, rank, newest = next_target, next_source, next_t, next_rank, next_newest
    close_row(total * scale, open_row, last, began, goes_on, out_ptr, carry_ptr, WIDTH, k, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def logit_backward(
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
    d_t_ptr,
    d_bias_ptr,
    d_logit_ptr,
    sum_ptr,
    carry_ptr,
    sources,
    targets,
    rows,
    members,
    tiles,
    first_run,
    runs,
    tiles_per_run,
    chunk,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TERMS: tl.constexpr,
    LONG: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """From the sum to the logits: their gradient, those of ``m``, ``u``, ``b2``, and the residual's share of ``t``.

    Programs are (run of tiles, replica), beginning with ``first_run``; a launch leaves the logits' gradients of its
    members in the chunk. Over members sorted by target it sums the rows of ``u`` and, with ``SCATTER``, adds to ``m``
    atomically; over members sorted by source (``BY_SOURCE``) it sums the rows of ``m`` in a fixed order.
    """
    run, replica = first_run + tl.program_id(0), tl.program_id(1).to(tl.int64)
    grad_ptr += replica * targets * WIDTH
    m_ptr += replica * sources * WIDTH
    a_ptr += replica * sources * WIDTH
    b_ptr += replica * targets * WIDTH
    u_ptr += replica * targets * WIDTH
    c_ptr += replica * targets * WIDTH
    d_m_ptr += replica * sources * WIDTH
    d_t_ptr += replica * members
    sum_ptr += replica * rows * WIDTH
    carry_ptr += (replica * runs + run) * 2 * WIDTH
    # The chunk holds the members of all programs of this launch.
    d_logit_ptr += replica * chunk * TERMS * WIDTH
    first_tile = first_run * tiles_per_run
    k = tl.arange(0, BLOCK_W)
    within = k < WIDTH
    w = load_weight(w_ptr, replica, k, WIDTH, TERMS)
    bias = tl.load(bias_ptr + replica * WIDTH + k, mask=within, other=0.0)
    begin = run * tiles_per_run
    end = tl.minimum(begin + tiles_per_run, tiles)
    first, last, began, goes_on = run_borders(rank_ptr, begin * BLOCK_E, tl.minimum(end * BLOCK_E, members), members)

    opened, open_row = first, tl.load(ranked_ptr + first)
    total = tl.zeros([BLOCK_W], tl.float32)
    d_bias = tl.zeros([BLOCK_W], tl.float32)
    row, other, t, rank, newest = load_tile(row_ptr, other_ptr, rank_ptr, t_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, end):
        if BY_SOURCE:
            source, target = row, other
        else:
            source, target = other, row
        x = load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH)
        u = load_rows(u_ptr, target, k, WIDTH)
        z = load_rows(m_ptr, source, k, WIDTH) - t[:, None] * u
        from_sum = load_rows(grad_ptr, target, k, WIDTH)
        next_row, next_other, next_t, next_rank, next_newest = load_tile(
            row_ptr, other_ptr, rank_ptr, t_ptr, tile + 1, members, BLOCK_E, LONG
        )
        q = terms_of(gelu_for(x, TERMS), TERMS)
        logit = multiply(w, q, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), False, True, TERMS)  # shape: [out, member]
        g = sigmoid(logit, bias[:, None])
        d_z = tl.trans(from_sum) * g
        d_logit = d_z * tl.trans(z)
        d_logit -= d_logit * g
        y = terms_of(d_logit, TERMS)
        at = ((tile - first_tile) * BLOCK_E + tl.arange(0, BLOCK_E))[None, :] * (TERMS * WIDTH) + k[:, None]
        for i in tl.static_range(TERMS):
            tl.store(d_logit_ptr + at + i * WIDTH, y[i], mask=within[:, None] & (rank >= 0)[None, :])
        if SCATTER:
            scatter(d_m_ptr, source, rank, k, d_z, WIDTH)
        if NEEDS_T:
            d_t = -tl.sum(d_z * tl.trans(u), 0)
            tl.store(d_t_ptr + tl.arange(0, BLOCK_E) + tile * BLOCK_E, d_t, mask=rank >= 0)
        if BY_SOURCE:
            share = tl.full([BLOCK_E], 1.0, tl.float32)
        else:
            share = -t
            d_bias += tl.sum(d_logit * (rank >= 0).to(tl.float32)[None, :], 1)
        for r in range(opened, newest):  # rows that end here
            total += row_sum(d_z, rank, r, share)
            close_row(total, open_row, r, began, goes_on, sum_ptr, carry_ptr, WIDTH, k, WIDTH)
            open_row = tl.load(ranked_ptr + r + 1)
            total = tl.zeros([BLOCK_W], tl.float32)
        total += row_sum(d_z, rank, newest, share)
        opened = newest
        row, other, t, rank, newest = next_row, next_other, next_t, next_rank, next_newest
    close_row(total, open_row, last, began, goes_on, sum_ptr, carry_ptr, WIDTH, k, WIDTH)
    if not BY_SOURCE:
        tl.store(d_bias_ptr + (replica * runs + run) * WIDTH + k, d_bias, mask=within)


@triton.jit(do_not_specialize=SIZES)
def hidden_backward(
    a_ptr,
    b_ptr,
    c_ptr,
    w_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    rank_ptr,
    ranked_ptr,
    d_a_ptr,
    d_t_ptr,
    d_w_ptr,
    d_logit_ptr,
    sum_ptr,
    sum_c_ptr,
    carry_ptr,
    carry_c_ptr,
    sources,
    targets,
    rows,
    members,
    tiles,
    first_run,
    runs,
    tiles_per_run,
    chunk,
    WIDTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TERMS: tl.constexpr,
    LONG: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """From the logits to the hidden layer: the gradients of ``a``, ``b``, ``c``, ``W2`` and the gate's share of ``t``.

    Launched as :func:`logit_backward`, with the transpose of ``W2``. Over members sorted by target it sums the rows of
    ``b`` and ``c``, leaves a partial sum of ``W2``'s gradient a program and, with ``SCATTER``, adds to ``a``
    atomically; over members sorted by source (``BY_SOURCE``) it sums the rows of ``a`` in a fixed order.
    """
    run, replica = first_run + tl.program_id(0), tl.program_id(1).to(tl.int64)
    a_ptr += replica * sources * WIDTH
    b_ptr += replica * targets * WIDTH
    c_ptr += replica * targets * WIDTH
    d_a_ptr += replica * sources * WIDTH
    d_t_ptr += replica * members
    sum_ptr += replica * rows * WIDTH
    sum_c_ptr += replica * rows * WIDTH
    carry_ptr += (replica * runs + run) * 2 * WIDTH
    carry_c_ptr += (replica * runs + run) * 2 * WIDTH
    d_logit_ptr += replica * chunk * TERMS * WIDTH
    first_tile = first_run * tiles_per_run
    k = tl.arange(0, BLOCK_W)
    within = k < WIDTH
    w = load_weight(w_ptr, replica, k, WIDTH, TERMS)
    begin = run * tiles_per_run
    end = tl.minimum(begin + tiles_per_run, tiles)
    first, last, began, goes_on = run_borders(rank_ptr, begin * BLOCK_E, tl.minimum(end * BLOCK_E, members), members)

    opened, open_row = first, tl.load(ranked_ptr + first)
    total = tl.zeros([BLOCK_W], tl.float32)
    total_c = tl.zeros([BLOCK_W], tl.float32)
    d_w = tl.zeros([BLOCK_W, BLOCK_W], tl.float32)
    row, other, t, rank, newest = load_tile(row_ptr, other_ptr, rank_ptr, t_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, end):
        if BY_SOURCE:
            source, target = row, other
        else:
            source, target = other, row
        y = load_logit_gradient(d_logit_ptr, first_tile, tile, members, k, WIDTH, BLOCK_E, TERMS)
        x = load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH)
        next_row, next_other, next_t, next_rank, next_newest = load_tile(
            row_ptr, other_ptr, rank_ptr, t_ptr, tile + 1, members, BLOCK_E, LONG
        )
        d_q = multiply(w, y, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), False, True, TERMS)  # shape: [in, member]
        q, slope = gelu_and_slope(x, TERMS)
        if not BY_SOURCE:
            d_w = multiply(y, terms_of(q, TERMS), d_w, True, False, TERMS)  # shape: [out, in]
        d_x = d_q * tl.trans(slope)
        if SCATTER:
            scatter(d_a_ptr, source, rank, k, d_x, WIDTH)
        if NEEDS_T:
            c = tl.trans(load_rows(c_ptr, target, k, WIDTH))
            d_t_at = d_t_ptr + tl.arange(0, BLOCK_E) + tile * BLOCK_E
            d_t = tl.load(d_t_at, mask=rank >= 0, other=0.0) - tl.sum(d_x * c, 0)
            tl.store(d_t_at, d_t, mask=rank >= 0)
        for r in range(opened, newest):  # rows that end here
            total += row_sum(d_x, rank, r, 1.0)
            close_row(total, open_row, r, began, goes_on, sum_ptr, carry_ptr, WIDTH, k, WIDTH)
            total = tl.zeros([BLOCK_W], tl.float32)
            if not BY_SOURCE:
                total_c += row_sum(d_x, rank, r, -t)
                close_row(total_c, open_row, r, began, goes_on, sum_c_ptr, carry_c_ptr, WIDTH, k, WIDTH)
                total_c = tl.zeros([BLOCK_W], tl.float32)
            open_row = tl.load(ranked_ptr + r + 1)
        total += row_sum(d_x, rank, newest, 1.0)
        if not BY_SOURCE:
            total_c += row_sum(d_x, rank, newest, -t)
        opened = newest
        row, other, t, rank, newest = next_row, next_other, next_t, next_rank, next_newest
    close_row(total, open_row, last, began, goes_on, sum_ptr, carry_ptr, WIDTH, k, WIDTH)
    if not BY_SOURCE:
        close_row(total_c, open_row, last, began, goes_on, sum_c_ptr, carry_c_ptr, WIDTH, k, WIDTH)
        # The same programs come with every chunk: each goes on with its own partial sum.
        at_once = tl.cdiv(chunk, tiles_per_run * BLOCK_E)  # the last chunk may have fewer
        at = (replica * at_once + tl.program_id(0)) * WIDTH * WIDTH + k[:, None] * WIDTH + k[None, :]
        inside = within[:, None] & within[None, :]
        if first_run > 0:
            d_w += tl.load(d_w_ptr + at, mask=inside, other=0.0)
        tl.store(d_w_ptr + at, d_w, mask=inside)
