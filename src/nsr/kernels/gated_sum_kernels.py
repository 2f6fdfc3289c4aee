"""The fused kernels of the gated residual sum, forward and backward, over members sorted by row.

Each program walks over a run of consecutive tiles with ``W2`` kept on chip. Names follow ``gated_sum.py``: ``m``, ``a``
are source tables, ``b``, ``u``, ``c`` target tables, ``t`` coefficients, ``z`` residual, ``g`` gate.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from nsr.kernels.tiles import gelu_parts, product, split, store_rows, tile_members, tile_rows


@triton.jit
def load_weight(w_ptr, out_channel, in_channel, WIDTH: tl.constexpr):
    """A block of ``W2`` as bf16 terms, ``[out, in]``."""
    at = out_channel[:, None] * WIDTH + in_channel[None, :]
    inside = (out_channel < WIDTH)[:, None] & (in_channel < WIDTH)[None, :]
    return split(tl.load(w_ptr + at, mask=inside, other=0.0))


@triton.jit
def load_hidden(
    a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, inside, column, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    """``a_s + b_v - sum_h t_h c_vh`` on a block of channels, ``[member, column]``."""
    mask = inside[:, None] & (column < WIDTH)[None, :]
    x = tl.load(a_ptr + source[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    x += tl.load(b_ptr + target[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    for h in tl.static_range(HEADS):
        t = tl.load(t_ptr + member * HEADS + h, mask=inside, other=0.0)
        c = tl.load(c_ptr + (target * HEADS + h)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
        x -= t[:, None] * c
    return x


@triton.jit
def load_coefficient(t_ptr, member, inside, column, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """The coefficient of each channel's head, ``[member, column]``; ``[member, 1]`` with one head."""
    if HEADS == 1:
        t = tl.load(t_ptr + member, mask=inside, other=0.0)[:, None]
    else:
        mask = inside[:, None] & (column < WIDTH)[None, :]
        head = column // (WIDTH // HEADS)
        t = tl.load(t_ptr + (member * HEADS)[:, None] + head[None, :], mask=mask, other=0.0)
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
    member_ptr,
    scale_ptr,
    out_ptr,
    carry_ptr,
    sources,
    targets,
    members,
    tiles,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Rows ``K^{-1/2} sum g z`` on one block of ``BLOCK_D`` channels; programs are (run of tiles, block, replica)."""
    replica = tl.program_id(2).to(tl.int64)

    n = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    n_inside = n < WIDTH
    k = tl.arange(0, BLOCK_D)
    bias = tl.load(bias_ptr + replica * WIDTH + n, mask=n_inside, other=0.0)
    w1, w2, w3 = load_weight(w_ptr + replica * WIDTH * WIDTH, n, k, WIDTH)

    begin = tl.program_id(0) * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, tiles)):
        rows = tile_rows(row_ptr, tile, members, replica, targets, tiles, BLOCK_E)
        row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        source, target = other + replica * sources, row + replica * targets

        logit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32) + bias[None, :]
        for k0 in tl.static_range(0, WIDTH, BLOCK_D):
            x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, inside, k0 + k, WIDTH, HEADS)
            cdf, _ = gelu_parts(x)
            q1, q2, q3 = split(x * cdf)
            if WIDTH > BLOCK_D:
                w1, w2, w3 = load_weight(w_ptr + replica * WIDTH * WIDTH, n, k0 + k, WIDTH)
            logit = product(q1, q2, q3, tl.trans(w1), tl.trans(w2), tl.trans(w3), logit, TERMS)

        mask = inside[:, None] & n_inside[None, :]
        z = tl.load(m_ptr + source[:, None] * WIDTH + n[None, :], mask=mask, other=0.0)
        u = tl.load(u_ptr + target[:, None] * WIDTH + n[None, :], mask=mask, other=0.0)
        z -= load_coefficient(t_ptr, member, inside, n, WIDTH, HEADS) * u
        scale = tl.load(scale_ptr + row, mask=inside, other=0.0)
        value = tl.sigmoid(logit) * z * scale[:, None]
        store_rows(rows, value, out_ptr, carry_ptr, WIDTH, n, n_inside)


@triton.jit
def sum_backward(
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
    member_ptr,
    scale_ptr,
    d_m_ptr,
    d_a_ptr,
    d_b_ptr,
    d_u_ptr,
    d_c_ptr,
    d_w_ptr,
    d_bias_ptr,
    d_t_ptr,
    carry_m_ptr,
    carry_a_ptr,
    carry_b_ptr,
    carry_u_ptr,
    carry_c_ptr,
    sources,
    targets,
    members,
    tiles,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER_SOURCE: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """Gradients of everything, each per-member value computed anew; for widths that one block holds.

    Over members sorted by target (``BY_SOURCE`` off) it gives the gradients of the target tables, the weights (a
    partial sum a program) and the coefficients, and with ``SCATTER_SOURCE`` those of the source tables by atomic
    addition. Over members sorted by source it gives the latter alone, in a fixed order.
    """
    program, replica = tl.program_id(0), tl.program_id(1).to(tl.int64)

    n = tl.arange(0, BLOCK_D)
    n_inside = n < WIDTH
    bias = tl.load(bias_ptr + replica * WIDTH + n, mask=n_inside, other=0.0)
    w1, w2, w3 = load_weight(w_ptr + replica * WIDTH * WIDTH, n, n, WIDTH)
    d_bias = tl.zeros([BLOCK_D], tl.float32)
    d_w = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)

    begin = program * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, tiles)):
        row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        if BY_SOURCE:
            source, target = row, other
            rows = tile_rows(row_ptr, tile, members, replica, sources, tiles, BLOCK_E)
        else:
            source, target = other, row
            rows = tile_rows(row_ptr, tile, members, replica, targets, tiles, BLOCK_E)
        scale = tl.load(scale_ptr + target, mask=inside, other=0.0)
        source += replica * sources
        target += replica * targets
        mask = inside[:, None] & n_inside[None, :]
        from_source = source[:, None] * WIDTH + n[None, :]
        from_target = target[:, None] * WIDTH + n[None, :]

        # Forward again, up to the gate.
        x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, inside, n, WIDTH, HEADS)
        cdf, pdf = gelu_parts(x)
        q1, q2, q3 = split(x * cdf)
        logit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32) + bias[None, :]
        logit = product(q1, q2, q3, tl.trans(w1), tl.trans(w2), tl.trans(w3), logit, TERMS)
        g = tl.sigmoid(logit)

        # From the sum to the residual and to the gate's logit.
        t = load_coefficient(t_ptr, member, inside, n, WIDTH, HEADS)
        grad = tl.load(grad_ptr + from_target, mask=mask, other=0.0) * scale[:, None]
        u = tl.load(u_ptr + from_target, mask=mask, other=0.0)
        z = tl.load(m_ptr + from_source, mask=mask, other=0.0) - t * u
        d_z = grad * g
        d_logit = d_z * z * (1.0 - g)
        if BY_SOURCE:
            store_rows(rows, d_z, d_m_ptr, carry_m_ptr, WIDTH, n, n_inside)
        else:
            store_rows(rows, -t * d_z, d_u_ptr, carry_u_ptr, WIDTH, n, n_inside)
        if SCATTER_SOURCE:
            tl.atomic_add(d_m_ptr + from_source, d_z, mask=mask, sem="relaxed")

        # Through the product to the hidden layer, and to the weights.
        l1, l2, l3 = split(d_logit)
        d_x = product(l1, l2, l3, w1, w2, w3, tl.zeros([BLOCK_E, BLOCK_D], tl.float32), TERMS)
        d_x *= cdf + x * pdf
        if not BY_SOURCE:
            d_w = product(tl.trans(l1), tl.trans(l2), tl.trans(l3), q1, q2, q3, d_w, TERMS)
            d_bias += tl.sum(d_logit, 0)

        if BY_SOURCE:
            store_rows(rows, d_x, d_a_ptr, carry_a_ptr, WIDTH, n, n_inside)
        else:
            store_rows(rows, d_x, d_b_ptr, carry_b_ptr, WIDTH, n, n_inside)
            for h in tl.static_range(HEADS):
                t_h = tl.load(t_ptr + member * HEADS + h, mask=inside, other=0.0)
                d_c = -t_h[:, None] * d_x
                store_rows(rows, d_c, d_c_ptr + h * WIDTH, carry_c_ptr + h * WIDTH, HEADS * WIDTH, n, n_inside)
                if NEEDS_T:
                    at_head = (target * HEADS + h)[:, None] * WIDTH + n[None, :]
                    d_t = tl.sum(d_x * tl.load(c_ptr + at_head, mask=mask, other=0.0), 1)
                    d_t += tl.sum(tl.where((n // (WIDTH // HEADS) == h)[None, :], d_z * u, 0.0), 1)
                    tl.store(d_t_ptr + (replica * members + member) * HEADS + h, -d_t, mask=inside)
        if SCATTER_SOURCE:
            tl.atomic_add(d_a_ptr + from_source, d_x, mask=mask, sem="relaxed")

    if not BY_SOURCE:
        partial = replica * tl.num_programs(0) + program
        inside_w = n_inside[:, None] & n_inside[None, :]
        tl.store(d_w_ptr + partial * WIDTH * WIDTH + n[:, None] * WIDTH + n[None, :], d_w, mask=inside_w)
        tl.store(d_bias_ptr + partial * WIDTH + n, d_bias, mask=n_inside)
