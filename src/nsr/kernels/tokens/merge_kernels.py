"""Merging and the null-space branch over laid-out groups: three kernels, nothing atomic.

``merge``   tiles of groups:   y = Σ t x
``encode``  tiles of members:  c = σ(W2 GELU(W1 [u ; LN(x) ; LN(y)] + b1) + b2) ⊙ W_enc u,   u = RMSNorm(x - y)
``decode``  tiles of groups:   y += W_feat Σ t c
"""

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows


@triton.jit
def merge(
    x_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    y_ptr,
    x_batch,
    x_row,
    length,
    num_groups,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """``y_g = Σ t_i x_i`` in fp32; programs are (tile of groups, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = g < num_groups
    start_ptr += sample * (num_groups + 1)
    start = tl.load(start_ptr + g, mask=inside, other=0)
    count = tl.load(start_ptr + g + 1, mask=inside, other=0) - start
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for k in range(0, tl.max(count, 0)):
        active = k < count
        token = tl.load(order_ptr + sample * length + start + k, mask=active, other=0)
        share = tl.load(share_ptr + sample * length + token, mask=active, other=0.0)
        rows = load_rows(x_ptr + sample * x_batch, token, active, x_row, d, WIDTH)
        total += share[:, None] * rows.to(tl.float32)
    at = (sample * num_groups + g)[:, None] * WIDTH + d[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (d < WIDTH)[None, :])


@triton.jit
def row_moments(x, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mean of each row, and one over its standard deviation."""
    mean = tl.sum(x, 1) / WIDTH
    centred = tl.where((tl.arange(0, BLOCK_D) < WIDTH)[None, :], x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)


@triton.jit
def load_vector(ptr, at, length: tl.constexpr):
    """Entries of a vector as one fp32 row, 0 outside."""
    return tl.load(ptr + at, mask=at < length, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_weight(ptr, row_stride, d, n, WIDTH: tl.constexpr, OUT: tl.constexpr):
    """Columns ``d`` of a weight ``[OUT, WIDTH]``, transposed: ``[d, n]``, 0 outside."""
    return tl.load(
        ptr + n[None, :] * row_stride + d[:, None], mask=(d < WIDTH)[:, None] & (n < OUT)[None, :], other=0.0
    )


@triton.jit
def encode(
    x_ptr,
    y_ptr,
    group_ptr,
    order_ptr,
    member_ptr,
    code_ptr,
    norm_ptr,
    norm_x_ptr,
    norm_x_bias_ptr,
    norm_y_ptr,
    norm_y_bias_ptr,
    encoder_ptr,
    gate_in_ptr,
    gate_in_bias_ptr,
    gate_out_ptr,
    gate_out_bias_ptr,
    x_batch,
    x_row,
    length,
    num_groups,
    slots,
    eps,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Codes of the members of groups of two or more; programs are (tile of members, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.load(member_ptr + sample * slots + slot, mask=slot < slots, other=-1)
    member = place >= 0
    if tl.max(place, 0) >= 0:
        token = tl.load(order_ptr + sample * length + place, mask=member, other=0)
        group = tl.load(group_ptr + sample * length + token, mask=member, other=0)
        x_ptr += sample * x_batch
        y_ptr += sample * num_groups * WIDTH
        whole = tl.arange(0, BLOCK_D)
        x_whole = load_rows(x_ptr, token, member, x_row, whole, WIDTH).to(tl.float32)
        y_whole = load_rows(y_ptr, group, member, WIDTH, whole, WIDTH).to(tl.float32)
        z_whole = x_whole - y_whole
        z_scale = tl.rsqrt(tl.sum(z_whole * z_whole, 1) / WIDTH + eps)
        x_mean, x_scale = row_moments(x_whole, eps, WIDTH, BLOCK_D)
        y_mean, y_scale = row_moments(y_whole, eps, WIDTH, BLOCK_D)

        # The statistics are known; the products read the rows again, a few channels at a time, from the cache.
        c = tl.arange(0, BLOCK_C)
        h = tl.arange(0, BLOCK_H)
        code = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        hidden = tl.zeros([BLOCK_M, BLOCK_H], tl.float32) + load_vector(gate_in_bias_ptr, h, HIDDEN)
        for begin in range(0, WIDTH, BLOCK_K):
            d = begin + tl.arange(0, BLOCK_K)
            x = load_rows(x_ptr, token, member, x_row, d, WIDTH).to(tl.float32)
            y = load_rows(y_ptr, group, member, WIDTH, d, WIDTH).to(tl.float32)
            u = ((x - y) * z_scale[:, None] * load_vector(norm_ptr, d, WIDTH)).to(KIND)
            code += dot(u, load_weight(encoder_ptr, WIDTH, d, c, WIDTH, CODE).to(KIND), PRECISION)
            hidden += dot(u, load_weight(gate_in_ptr, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND), PRECISION)
            normed_x = (x - x_mean[:, None]) * x_scale[:, None] * load_vector(norm_x_ptr, d, WIDTH)
            normed_x += load_vector(norm_x_bias_ptr, d, WIDTH)
            of_x = load_weight(gate_in_ptr + WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN)
            hidden += dot(normed_x.to(KIND), of_x.to(KIND), PRECISION)
            normed_y = (y - y_mean[:, None]) * y_scale[:, None] * load_vector(norm_y_ptr, d, WIDTH)
            normed_y += load_vector(norm_y_bias_ptr, d, WIDTH)
            of_y = load_weight(gate_in_ptr + 2 * WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN)
            hidden += dot(normed_y.to(KIND), of_y.to(KIND), PRECISION)
        hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
        gate = dot(hidden.to(KIND), load_weight(gate_out_ptr, HIDDEN, h, c, HIDDEN, CODE).to(KIND), PRECISION)
        gate += load_vector(gate_out_bias_ptr, c, CODE)
        code = code / (1.0 + tl.exp(-gate))
        at = (sample * length + token)[:, None] * CODE + c[None, :]
        tl.store(code_ptr + at, code.to(code_ptr.dtype.element_ty), mask=member[:, None] & (c < CODE)[None, :])


@triton.jit
def decode(
    code_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    decoder_ptr,
    y_ptr,
    length,
    num_groups,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``y_g += W_feat Σ t_i c_i``, in place, groups of two or more only; programs are (tile of groups, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    inside = g < num_groups
    start_ptr += sample * (num_groups + 1)
    start = tl.load(start_ptr + g, mask=inside, other=0)
    count = tl.load(start_ptr + g + 1, mask=inside, other=0) - start
    count = tl.where(count > 1, count, 0)
    longest = tl.max(count, 0)
    if longest > 1:
        c = tl.arange(0, BLOCK_C)
        total = tl.zeros([BLOCK_G, BLOCK_C], tl.float32)
        for k in range(0, longest):
            active = k < count
            token = tl.load(order_ptr + sample * length + start + k, mask=active, other=0)
            share = tl.load(share_ptr + sample * length + token, mask=active, other=0.0)
            codes = load_rows(code_ptr + sample * length * CODE, token, active, CODE, c, CODE)
            total += share[:, None] * codes.to(tl.float32)
        d = tl.arange(0, BLOCK_D)
        update = dot(total.to(KIND), load_weight(decoder_ptr, CODE, c, d, CODE, WIDTH).to(KIND), PRECISION)
        kind = y_ptr.dtype.element_ty
        at = (sample * num_groups + g)[:, None] * WIDTH + d[None, :]
        mask = (count > 1)[:, None] & (d < WIDTH)[None, :]
        y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (y + update.to(kind).to(tl.float32)).to(kind), mask=mask)
