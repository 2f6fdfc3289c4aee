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

from nsr.kernels.gated_sum_narrow_tiles import (
    add_tile,
    load_hidden,
    load_logit_gradient,
    load_tile,
    load_weight,
    scatter,
)
from nsr.kernels.launch_sizes import SIZES
from nsr.kernels.row_runs import close_row, run_borders
from nsr.kernels.tiles import gelu_and_slope, gelu_for, load_rows, multiply, sigmoid, terms_of


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
    SHORT_ROWS: tl.constexpr,
    M_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
):
    """Rows ``K^{-1/2} sum g z``; programs are (run of tiles, replica)."""
    program, replica = tl.program_id(0), tl.program_id(1).to(tl.int64)
    m_ptr += replica * sources * M_STRIDE
    a_ptr += replica * sources * A_STRIDE
    b_ptr += replica * targets * B_STRIDE
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
    total = tl.zeros([BLOCK_W], tl.float32)
    target, source, t, rank, newest = load_tile(row_ptr, other_ptr, rank_ptr, t_ptr, begin, members, BLOCK_E, LONG)
    for tile in range(begin, end):
        x = load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH, A_STRIDE, B_STRIDE)
        z = load_rows(m_ptr, source, k, WIDTH, M_STRIDE) - t[:, None] * load_rows(u_ptr, target, k, WIDTH)
        scale = tl.load(scale_ptr + target)
        next_target, next_source, next_t, next_rank, next_newest = load_tile(
            row_ptr, other_ptr, rank_ptr, t_ptr, tile + 1, members, BLOCK_E, LONG
        )
        q = terms_of(gelu_for(x, TERMS), TERMS)
        logit = multiply(w, q, tl.zeros([BLOCK_W, BLOCK_E], tl.float32), False, True, TERMS)  # shape: [out, member]
        value = sigmoid(logit, bias[:, None]) * tl.trans(z)
        total, open_row = add_tile(
            total, open_row, value, scale, rank, opened, newest, began, goes_on, ranked_ptr, out_ptr, carry_ptr, k,
            WIDTH, SHORT_ROWS,
        )  # fmt: skip
        opened = newest
        target, source, t, rank, newest = next_target, next_source, next_t, next_rank, next_newest
    close_row(total, open_row, last, began, goes_on, out_ptr, carry_ptr, WIDTH, k, WIDTH)


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
    scale_ptr,
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
    SHORT_ROWS: tl.constexpr,
    M_STRIDE: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
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
    m_ptr += replica * sources * M_STRIDE
    a_ptr += replica * sources * A_STRIDE
    b_ptr += replica * targets * B_STRIDE
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
        x = load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH, A_STRIDE, B_STRIDE)
        u = load_rows(u_ptr, target, k, WIDTH)
        z = load_rows(m_ptr, source, k, WIDTH, M_STRIDE) - t[:, None] * u
        from_sum = load_rows(grad_ptr, target, k, WIDTH) * tl.load(scale_ptr + target)[:, None]
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
        total, open_row = add_tile(
            total, open_row, d_z, share, rank, opened, newest, began, goes_on, ranked_ptr, sum_ptr, carry_ptr, k, WIDTH,
            SHORT_ROWS,
        )  # fmt: skip
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
    SHORT_ROWS: tl.constexpr,
    A_STRIDE: tl.constexpr,
    B_STRIDE: tl.constexpr,
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
    a_ptr += replica * sources * A_STRIDE
    b_ptr += replica * targets * B_STRIDE
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
        x = load_hidden(a_ptr, b_ptr, c_ptr, source, target, t, k, WIDTH, A_STRIDE, B_STRIDE)
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
        if not BY_SOURCE:
            total_c, _ = add_tile(
                total_c, open_row, d_x, -t, rank, opened, newest, began, goes_on, ranked_ptr, sum_c_ptr,
                carry_c_ptr, k, WIDTH, SHORT_ROWS,
            )  # fmt: skip
        ones = tl.full([BLOCK_E], 1.0, tl.float32)
        total, open_row = add_tile(
            total, open_row, d_x, ones, rank, opened, newest, began, goes_on, ranked_ptr, sum_ptr, carry_ptr, k, WIDTH,
            SHORT_ROWS,
        )  # fmt: skip
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
