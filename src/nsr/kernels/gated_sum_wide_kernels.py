"""The fused kernels of the gated residual sum for widths beyond 128, over members sorted by row.

Names follow ``gated_sum.py``: ``m``, ``a`` are source tables, ``b``, ``u``, ``c`` target tables, ``t`` coefficients,
``z`` the residual, ``g`` the gate; ``x`` is the gate's hidden layer before GELU.

Each program walks over a run of consecutive tiles, with ``W2`` kept on chip where the width allows. The backward pass
is three kernels, because one would need more registers than there are: from the sum to the gate's logits, from the
logits to the hidden layer, and the weights. What passes between them is the logits' gradient of a chunk of members,
``[chunk, D]``; everything else is computed anew.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.launch_sizes import SIZES
from nsr.kernels.tiles import gelu_parts, load_rows, product, sigmoid, split, store_rows, tile_members, tile_rows


@triton.jit
def load_weight(w_ptr, out_channel, in_channel, WIDTH: tl.constexpr):
    """A block of ``W2`` as bf16 terms, ``[out, in]``."""
    at = out_channel[:, None] * WIDTH + in_channel[None, :]
    inside = (out_channel < WIDTH)[:, None] & (in_channel < WIDTH)[None, :]
    return split(tl.load(w_ptr + at, mask=inside, other=0.0))


@triton.jit
def load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, column, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """``x = a_s + b_v - sum_h t_h c_vh`` on a block of channels, ``[member, column]``."""
    x = load_rows(a_ptr, source, column, WIDTH) + load_rows(b_ptr, target, column, WIDTH)
    for h in tl.static_range(HEADS):
        t = tl.load(t_ptr + member * HEADS + h)
        x -= t[:, None] * load_rows(c_ptr, target * HEADS + h, column, WIDTH)
    return x


@triton.jit
def load_gelu(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, column, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """``GELU(x)``."""
    x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, column, WIDTH, HEADS)
    cdf, _ = gelu_parts(x)
    return x * cdf


@triton.jit
def load_coefficient(t_ptr, member, column, WIDTH: tl.constexpr, HEADS: tl.constexpr):
    """The coefficient of each channel's head, ``[member, column]``; ``[member, 1]`` with one head."""
    if HEADS == 1:
        t = tl.load(t_ptr + member)[:, None]
    else:
        head = tl.minimum(column, WIDTH - 1) // (WIDTH // HEADS)
        t = tl.load(t_ptr + (member * HEADS)[:, None] + head[None, :])
    return t


@triton.jit
def load_gate(
    a_ptr, b_ptr, c_ptr, w_ptr, bias_ptr, t_ptr, source, target, member, kept, n,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """``g = sigmoid(W2 GELU(x) + b2)`` on the channels ``n``; ``kept`` is ``W2`` where it stays on chip."""
    logit = tl.zeros([member.shape[0], n.shape[0]], tl.float32)
    logit += tl.load(bias_ptr + n, mask=n < WIDTH, other=0.0)[None, :]
    if n.shape[0] >= WIDTH:
        for i in tl.static_range(0, (WIDTH + BLOCK_K - 1) // BLOCK_K):
            k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            q1, q2, q3 = split(load_gelu(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, k, WIDTH, HEADS))
            w1, w2, w3 = kept[i]
            logit = product(q1, q2, q3, tl.trans(w1), tl.trans(w2), tl.trans(w3), logit, TERMS)
    else:
        for k0 in range(0, WIDTH, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            q1, q2, q3 = split(load_gelu(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, k, WIDTH, HEADS))
            w1, w2, w3 = load_weight(w_ptr, n, k, WIDTH)
            logit = product(q1, q2, q3, tl.trans(w1), tl.trans(w2), tl.trans(w3), logit, TERMS)
    return sigmoid(logit, 0.0)


@triton.jit
def keep_weight(w_ptr, n, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, BY_INPUT: tl.constexpr):
    """``W2`` in blocks of ``BLOCK_K`` input (or output) channels, loaded once; nothing where it is too wide to keep."""
    kept = ()
    if n.shape[0] >= WIDTH:
        for i in tl.static_range(0, (WIDTH + BLOCK_K - 1) // BLOCK_K):
            k = i * BLOCK_K + tl.arange(0, BLOCK_K)
            if BY_INPUT:
                kept = kept + (load_weight(w_ptr, n, k, WIDTH),)  # noqa: RUF005  Triton has no starred tuples
            else:
                kept = kept + (load_weight(w_ptr, k, n, WIDTH),)  # noqa: RUF005
    return kept


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
    member_ptr,
    rank_ptr,
    ranked_ptr,
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
    BLOCK_K: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Rows ``K^{-1/2} sum g z`` on one block of channels; programs are (run of tiles, block, replica)."""
    replica = tl.program_id(2).to(tl.int64)
    w_ptr += replica * WIDTH * WIDTH
    bias_ptr += replica * WIDTH
    n = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    kept = keep_weight(w_ptr, n, WIDTH, BLOCK_K, True)
    begin = tl.program_id(0) * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, tiles)):
        rows = tile_rows(rank_ptr, tile, members, replica, targets, tiles, BLOCK_E)
        row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        source, target = other + replica * sources, row + replica * targets
        g = load_gate(
            a_ptr, b_ptr, c_ptr, w_ptr, bias_ptr, t_ptr, source, target, member, kept, n, WIDTH, HEADS, BLOCK_K, TERMS
        )
        t = load_coefficient(t_ptr, member, n, WIDTH, HEADS)
        z = load_rows(m_ptr, source, n, WIDTH) - t * load_rows(u_ptr, target, n, WIDTH)
        value = tl.where(inside[:, None], g * z * tl.load(scale_ptr + row)[:, None], 0.0)
        store_rows(rows, ranked_ptr, value, out_ptr, carry_ptr, WIDTH, n, WIDTH)


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
    member_ptr,
    rank_ptr,
    ranked_ptr,
    scale_ptr,
    d_m_ptr,
    d_u_ptr,
    d_t_ptr,
    carry_m_ptr,
    carry_u_ptr,
    d_logit_ptr,
    sources,
    targets,
    members,
    tiles,
    first_tile,
    end_tile,
    chunk,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TERMS: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER_SOURCE: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """From the sum to the logits: their gradient, those of ``m`` and ``u``, and the residual's share of that of ``t``.

    Over members sorted by target it sums the rows of ``u`` and, with ``SCATTER_SOURCE``, adds to ``m`` atomically; over
    members sorted by source (``BY_SOURCE``) it sums the rows of ``m`` in a fixed order.
    """
    replica = tl.program_id(1).to(tl.int64)
    w_ptr += replica * WIDTH * WIDTH
    bias_ptr += replica * WIDTH
    kept = keep_weight(w_ptr, tl.arange(0, BLOCK_D), WIDTH, BLOCK_K, True)
    begin = first_tile + tl.program_id(0) * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, end_tile)):
        row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        if BY_SOURCE:
            source, target = row, other
            rows = tile_rows(rank_ptr, tile, members, replica, sources, tiles, BLOCK_E)
        else:
            source, target = other, row
            rows = tile_rows(rank_ptr, tile, members, replica, targets, tiles, BLOCK_E)
        scale = tl.load(scale_ptr + target)
        source += replica * sources
        target += replica * targets
        in_chunk = replica * chunk + (tile - first_tile) * BLOCK_E + tl.arange(0, BLOCK_E)
        for n0 in range(0, WIDTH, BLOCK_D):
            n = n0 + tl.arange(0, BLOCK_D)
            mask = inside[:, None] & (n < WIDTH)[None, :]
            g = load_gate(
                a_ptr, b_ptr, c_ptr, w_ptr, bias_ptr, t_ptr, source, target, member, kept, n,
                WIDTH, HEADS, BLOCK_K, TERMS,
            )  # fmt: skip
            t = load_coefficient(t_ptr, member, n, WIDTH, HEADS)
            u = load_rows(u_ptr, target, n, WIDTH)
            z = load_rows(m_ptr, source, n, WIDTH) - t * u
            d_z = tl.where(inside[:, None], load_rows(grad_ptr, target, n, WIDTH) * scale[:, None] * g, 0.0)
            d_logit = tl.where(inside[:, None], d_z * z * (1.0 - g), 0.0)
            tl.store(d_logit_ptr + in_chunk[:, None] * WIDTH + n[None, :], d_logit, mask=(n < WIDTH)[None, :])
            if SCATTER_SOURCE:
                tl.atomic_add(d_m_ptr + source[:, None] * WIDTH + n[None, :], d_z, mask=mask, sem="relaxed")
            if NEEDS_T:
                for h in tl.static_range(HEADS):
                    share = tl.sum(tl.where((n // (WIDTH // HEADS) == h)[None, :], d_z * u, 0.0), 1)
                    d_t_at = d_t_ptr + (replica * members + member) * HEADS + h
                    tl.atomic_add(d_t_at, -share, mask=inside, sem="relaxed")
            if BY_SOURCE:
                store_rows(rows, ranked_ptr, d_z, d_m_ptr, carry_m_ptr, WIDTH, n, WIDTH)
            else:
                store_rows(rows, ranked_ptr, -t * d_z, d_u_ptr, carry_u_ptr, WIDTH, n, WIDTH)


@triton.jit(do_not_specialize=SIZES)
def hidden_backward(
    a_ptr,
    b_ptr,
    c_ptr,
    w_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    member_ptr,
    rank_ptr,
    ranked_ptr,
    d_a_ptr,
    d_b_ptr,
    d_c_ptr,
    d_t_ptr,
    carry_a_ptr,
    carry_b_ptr,
    carry_c_ptr,
    d_logit_ptr,
    sources,
    targets,
    members,
    tiles,
    first_tile,
    end_tile,
    chunk,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TERMS: tl.constexpr,
    BY_SOURCE: tl.constexpr,
    SCATTER_SOURCE: tl.constexpr,
    NEEDS_T: tl.constexpr,
):
    """From the logits to the hidden layer: the gradients of ``a``, ``b``, ``c`` and the gate's share of ``t``."""
    replica = tl.program_id(1).to(tl.int64)
    w_ptr += replica * WIDTH * WIDTH
    kept = keep_weight(w_ptr, tl.arange(0, BLOCK_D), WIDTH, BLOCK_K, False)
    begin = first_tile + tl.program_id(0) * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, end_tile)):
        row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        if BY_SOURCE:
            source, target = row, other
            rows = tile_rows(rank_ptr, tile, members, replica, sources, tiles, BLOCK_E)
        else:
            source, target = other, row
            rows = tile_rows(rank_ptr, tile, members, replica, targets, tiles, BLOCK_E)
        source += replica * sources
        target += replica * targets
        in_chunk = replica * chunk + (tile - first_tile) * BLOCK_E + tl.arange(0, BLOCK_E)
        for k0 in range(0, WIDTH, BLOCK_D):
            k = k0 + tl.arange(0, BLOCK_D)
            mask = inside[:, None] & (k < WIDTH)[None, :]
            d_x = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
            if WIDTH <= BLOCK_D:
                for i in tl.static_range(0, (WIDTH + BLOCK_K - 1) // BLOCK_K):
                    l1, l2, l3 = split(load_rows(d_logit_ptr, in_chunk, i * BLOCK_K + tl.arange(0, BLOCK_K), WIDTH))
                    w1, w2, w3 = kept[i]
                    d_x = product(l1, l2, l3, w1, w2, w3, d_x, TERMS)
            else:
                for n0 in range(0, WIDTH, BLOCK_K):
                    n = n0 + tl.arange(0, BLOCK_K)
                    l1, l2, l3 = split(load_rows(d_logit_ptr, in_chunk, n, WIDTH))
                    w1, w2, w3 = load_weight(w_ptr, n, k, WIDTH)
                    d_x = product(l1, l2, l3, w1, w2, w3, d_x, TERMS)
            x = load_hidden(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, k, WIDTH, HEADS)
            cdf, pdf = gelu_parts(x)
            d_x = tl.where(inside[:, None], d_x * (cdf + x * pdf), 0.0)
            if SCATTER_SOURCE:
                tl.atomic_add(d_a_ptr + source[:, None] * WIDTH + k[None, :], d_x, mask=mask, sem="relaxed")
            if BY_SOURCE:
                store_rows(rows, ranked_ptr, d_x, d_a_ptr, carry_a_ptr, WIDTH, k, WIDTH)
            else:
                store_rows(rows, ranked_ptr, d_x, d_b_ptr, carry_b_ptr, WIDTH, k, WIDTH)
                for h in tl.static_range(HEADS):
                    if NEEDS_T:
                        share = tl.sum(d_x * load_rows(c_ptr, target * HEADS + h, k, WIDTH), 1)
                        d_t_at = d_t_ptr + (replica * members + member) * HEADS + h
                        tl.atomic_add(d_t_at, -share, mask=inside, sem="relaxed")
                    d_c = -tl.load(t_ptr + member * HEADS + h)[:, None] * d_x
                    store_rows(
                        rows, ranked_ptr, d_c, d_c_ptr + h * WIDTH, carry_c_ptr + h * WIDTH, HEADS * WIDTH, k, WIDTH
                    )


@triton.jit(do_not_specialize=SIZES)
def weight_backward(
    a_ptr,
    b_ptr,
    c_ptr,
    t_ptr,
    row_ptr,
    other_ptr,
    member_ptr,
    d_w_ptr,
    d_bias_ptr,
    d_logit_ptr,
    sources,
    targets,
    members,
    first_tile,
    end_tile,
    chunk,
    tiles_per_program,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TERMS: tl.constexpr,
):
    """``d_W2 += d_logit^T GELU(x)`` and ``d_b2`` over a chunk; a partial sum a program, kept from chunk to chunk."""
    program, replica = tl.program_id(0), tl.program_id(2).to(tl.int64)
    blocks: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    n = (tl.program_id(1) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = (tl.program_id(1) % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
    d_w = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    d_bias = tl.zeros([BLOCK_N], tl.float32)
    begin = first_tile + program * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, end_tile)):
        row, other, member, inside = tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E)
        source, target = other + replica * sources, row + replica * targets
        in_chunk = replica * chunk + (tile - first_tile) * BLOCK_E + tl.arange(0, BLOCK_E)
        hidden = load_gelu(a_ptr, b_ptr, c_ptr, t_ptr, source, target, member, k, WIDTH, HEADS)
        q1, q2, q3 = split(tl.where(inside[:, None], hidden, 0.0))
        d_logit = load_rows(d_logit_ptr, in_chunk, n, WIDTH)
        l1, l2, l3 = split(tl.trans(d_logit))
        d_w = product(l1, l2, l3, q1, q2, q3, d_w, TERMS)
        d_bias += tl.sum(d_logit, 0)
    partial = replica * tl.num_programs(0) + program
    w_at = d_w_ptr + partial * WIDTH * WIDTH + n[:, None] * WIDTH + k[None, :]
    w_inside = (n < WIDTH)[:, None] & (k < WIDTH)[None, :]
    bias_at = d_bias_ptr + partial * WIDTH + n
    bias_inside = n < tl.where(tl.program_id(1) % blocks == 0, WIDTH, 0)  # once for all blocks of input channels
    if first_tile > 0:
        d_w += tl.load(w_at, mask=w_inside, other=0.0)
        d_bias += tl.load(bias_at, mask=bias_inside, other=0.0)
    tl.store(w_at, d_w, mask=w_inside)
    tl.store(bias_at, d_bias, mask=bias_inside)
