"""The backward pass of the gated residual sum for widths that no single block holds, in two halves.

The first half goes from the sum to the gate's logits, the second from the logits to the hidden layer. Between them
stand the logits' gradients of a chunk of members, ``[chunk, D]``; the second half adds the hidden layer, and their
product over the chunk is the weight's gradient. So memory stays bounded by the chunk.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from nsr.kernels.gated_sum_kernels import load_coefficient, load_hidden, load_weight
from nsr.kernels.tiles import gelu_parts, product, split, store_rows, tile_members, tile_rows


@triton.jit
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
    member_ptr,
    scale_ptr,
    d_m_ptr,
    d_u_ptr,
    d_t_ptr,
    carry_m_ptr,
    carry_u_ptr,
    d_logit_ptr,
    first_tile,
    sources,
    targets,
    members,
    tiles,
    chunk,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER_SOURCE: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """One tile: ``d_logit`` of its members; the gradients of ``m``, ``u`` and the residual's share of ``t``."""
    replica = tl.program_id(1).to(tl.int64)

    tile = first_tile + tl.program_id(0)
    row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
    if BY_SOURCE:
        source, target = row, other
        rows = tile_rows(row_ptr, tile, members, replica, sources, tiles, BLOCK_E)
    else:
        source, target = other, row
        rows = tile_rows(row_ptr, tile, members, replica, targets, tiles, BLOCK_E)
    scale = tl.load(scale_ptr + target, mask=inside, other=0.0)
    d_t_at = d_t_ptr + (replica * members + member) * HEADS
    source += replica * sources
    target += replica * targets
    in_chunk = replica * chunk + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    for n0 in range(0, WIDTH, BLOCK_D):
        n = n0 + tl.arange(0, BLOCK_D)
        n_inside = n < WIDTH
        mask = inside[:, None] & n_inside[None, :]
        from_source = source[:, None] * WIDTH + n[None, :]
        from_target = target[:, None] * WIDTH + n[None, :]
        logit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        logit += tl.load(bias_ptr + replica * WIDTH + n, mask=n_inside, other=0.0)[None, :]
        for k0 in range(0, WIDTH, BLOCK_D):
            k = k0 + tl.arange(0, BLOCK_D)
            x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, inside, k, WIDTH, HEADS)
            cdf, _ = gelu_parts(x)
            q1, q2, q3 = split(x * cdf)
            w1, w2, w3 = load_weight(w_ptr + replica * WIDTH * WIDTH, n, k, WIDTH)
            logit = product(q1, q2, q3, tl.trans(w1), tl.trans(w2), tl.trans(w3), logit, TERMS)
        g = tl.sigmoid(logit)
        t = load_coefficient(t_ptr, member, inside, n, WIDTH, HEADS)
        u = tl.load(u_ptr + from_target, mask=mask, other=0.0)
        z = tl.load(m_ptr + from_source, mask=mask, other=0.0) - t * u
        d_z = tl.load(grad_ptr + from_target, mask=mask, other=0.0) * scale[:, None] * g
        tl.store(d_logit_ptr + in_chunk[:, None] * WIDTH + n[None, :], d_z * z * (1.0 - g), mask=n_inside[None, :])
        if BY_SOURCE:
            store_rows(rows, d_z, d_m_ptr, carry_m_ptr, WIDTH, n, n_inside)
        else:
            store_rows(rows, -t * d_z, d_u_ptr, carry_u_ptr, WIDTH, n, n_inside)
        if SCATTER_SOURCE:
            tl.atomic_add(d_m_ptr + from_source, d_z, mask=mask, sem="relaxed")
        if NEEDS_T:
            for h in tl.static_range(HEADS):
                share = tl.sum(tl.where((n // (WIDTH // HEADS) == h)[None, :], d_z * u, 0.0), 1)
                tl.atomic_add(d_t_at + h, -share, mask=inside, sem="relaxed")


@triton.jit
def hidden_backward(
    a_ptr,
    b_ptr,
    c_ptr,
    w_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    member_ptr,
    d_a_ptr,
    d_b_ptr,
    d_c_ptr,
    d_t_ptr,
    carry_a_ptr,
    carry_b_ptr,
    carry_c_ptr,
    d_logit_ptr,
    hidden_ptr,
    first_tile,
    sources,
    targets,
    members,
    tiles,
    chunk,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TERMS: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER_SOURCE: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """One tile: the hidden layer of its members; the gradients of ``a``, ``b``, ``c`` and the gate's share of ``t``."""
    replica = tl.program_id(1).to(tl.int64)

    tile = first_tile + tl.program_id(0)
    row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
    if BY_SOURCE:
        source, target = row, other
        rows = tile_rows(row_ptr, tile, members, replica, sources, tiles, BLOCK_E)
    else:
        source, target = other, row
        rows = tile_rows(row_ptr, tile, members, replica, targets, tiles, BLOCK_E)
    d_t_at = d_t_ptr + (replica * members + member) * HEADS
    source += replica * sources
    target += replica * targets
    in_chunk = (replica * chunk + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E))[:, None] * WIDTH
    for k0 in range(0, WIDTH, BLOCK_D):
        k = k0 + tl.arange(0, BLOCK_D)
        k_inside = k < WIDTH
        d_x = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        for n0 in range(0, WIDTH, BLOCK_D):
            n = n0 + tl.arange(0, BLOCK_D)
            d_logit = tl.load(d_logit_ptr + in_chunk + n[None, :], mask=(n < WIDTH)[None, :], other=0.0)
            l1, l2, l3 = split(d_logit)
            w1, w2, w3 = load_weight(w_ptr + replica * WIDTH * WIDTH, n, k, WIDTH)
            d_x = product(l1, l2, l3, w1, w2, w3, d_x, TERMS)
        x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, inside, k, WIDTH, HEADS)
        cdf, pdf = gelu_parts(x)
        d_x *= cdf + x * pdf
        if BY_SOURCE:
            store_rows(rows, d_x, d_a_ptr, carry_a_ptr, WIDTH, k, k_inside)
        else:
            tl.store(hidden_ptr + in_chunk + k[None, :], x * cdf, mask=k_inside[None, :])
            store_rows(rows, d_x, d_b_ptr, carry_b_ptr, WIDTH, k, k_inside)
            mask = inside[:, None] & k_inside[None, :]
            for h in tl.static_range(HEADS):
                t_h = tl.load(t_ptr + member * HEADS + h, mask=inside, other=0.0)
                d_c = -t_h[:, None] * d_x
                store_rows(rows, d_c, d_c_ptr + h * WIDTH, carry_c_ptr + h * WIDTH, HEADS * WIDTH, k, k_inside)
                if NEEDS_T:
                    c = tl.load(c_ptr + (target * HEADS + h)[:, None] * WIDTH + k[None, :], mask=mask, other=0.0)
                    share = tl.sum(d_x * c, 1)
                    tl.atomic_add(d_t_at + h, -share, mask=inside, sem="relaxed")
        if SCATTER_SOURCE:
            at = source[:, None] * WIDTH + k[None, :]
            tl.atomic_add(d_a_ptr + at, d_x, mask=inside[:, None] & k_inside[None, :], sem="relaxed")
