"""The member codes of the null-space branch, tiles of members of groups of two or more, and their gradient.

``c = σ(W2 GELU(h) + b2) ⊙ W_enc u``,  ``h = W1 [u ; LN(x) ; LN(y)] + b1``,  ``u = RMSNorm(x - y)``. Nothing of it is
kept for the backward pass, which computes it again.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows, load_vector, load_weight


@triton.jit
def row_moments(x, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mean of each row, and one over its standard deviation."""
    mean = tl.sum(x, 1) / WIDTH
    centred = tl.where((tl.arange(0, BLOCK_D) < WIDTH)[None, :], x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)


@triton.jit
def row_statistics(x_ptr, y_ptr, x_row, token, group, member, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """What the three norms need to know of each row: the scale of ``x - y``, mean and scale of ``x`` and of ``y``."""
    d = tl.arange(0, BLOCK_D)
    x = load_rows(x_ptr, token, member, x_row, d, WIDTH).to(tl.float32)
    y = load_rows(y_ptr, group, member, WIDTH, d, WIDTH).to(tl.float32)
    z_scale = tl.rsqrt(tl.sum((x - y) * (x - y), 1) / WIDTH + eps)
    x_mean, x_scale = row_moments(x, eps, WIDTH, BLOCK_D)
    y_mean, y_scale = row_moments(y, eps, WIDTH, BLOCK_D)
    return z_scale, x_mean, x_scale, y_mean, y_scale


@triton.jit
def normed_rows(x_ptr, y_ptr, x_row, token, group, member, statistics, d, WIDTH: tl.constexpr):
    """Channels ``d`` of the normalised residual, ``x`` and ``y``, before the norms' weights."""
    z_scale, x_mean, x_scale, y_mean, y_scale = statistics
    x = load_rows(x_ptr, token, member, x_row, d, WIDTH).to(tl.float32)
    y = load_rows(y_ptr, group, member, WIDTH, d, WIDTH).to(tl.float32)
    z_hat = (x - y) * z_scale[:, None]
    x_hat = (x - x_mean[:, None]) * x_scale[:, None]
    y_hat = (y - y_mean[:, None]) * y_scale[:, None]
    return z_hat, x_hat, y_hat


@triton.jit
def encode_rows(
    x_ptr,
    y_ptr,
    x_row,
    token,
    group,
    member,
    statistics,
    norm_ptr,
    norm_x_ptr,
    norm_x_bias_ptr,
    norm_y_ptr,
    norm_y_bias_ptr,
    encoder_ptr,
    gate_in_ptr,
    gate_in_bias_ptr,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``W_enc u`` and ``h`` of each row. Rows are read a few channels at a time, from the cache."""
    c = tl.arange(0, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    encoded = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    hidden = tl.zeros([BLOCK_M, BLOCK_H], tl.float32) + load_vector(gate_in_bias_ptr, h, HIDDEN)
    for begin in range(0, WIDTH, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        z_hat, x_hat, y_hat = normed_rows(x_ptr, y_ptr, x_row, token, group, member, statistics, d, WIDTH)
        u = (z_hat * load_vector(norm_ptr, d, WIDTH)).to(KIND)
        encoded += dot(u, load_weight(encoder_ptr, WIDTH, d, c, WIDTH, CODE).to(KIND), PRECISION)
        hidden += dot(u, load_weight(gate_in_ptr, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND), PRECISION)
        of_x = load_weight(gate_in_ptr + WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND)
        x = x_hat * load_vector(norm_x_ptr, d, WIDTH) + load_vector(norm_x_bias_ptr, d, WIDTH)
        hidden += dot(x.to(KIND), of_x, PRECISION)
        of_y = load_weight(gate_in_ptr + 2 * WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND)
        y = y_hat * load_vector(norm_y_ptr, d, WIDTH) + load_vector(norm_y_bias_ptr, d, WIDTH)
        hidden += dot(y.to(KIND), of_y, PRECISION)
    return encoded, hidden


@triton.jit
def encode(
    x_ptr,
    y_ptr,
    token_ptr,
    group_ptr,
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
    """Codes of the members; programs are (tile of slots, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(token_ptr + sample * slots + slot, mask=slot < slots, other=-1)
    group = tl.load(group_ptr + sample * slots + slot, mask=slot < slots, other=0)
    member = token >= 0
    if tl.max(token, 0) >= 0:
        x_ptr += sample * x_batch
        y_ptr += sample * num_groups * WIDTH
        statistics = row_statistics(x_ptr, y_ptr, x_row, token, group, member, eps, WIDTH, BLOCK_D)
        code, hidden = encode_rows(
            x_ptr, y_ptr, x_row, token, group, member, statistics,
            norm_ptr, norm_x_ptr, norm_x_bias_ptr, norm_y_ptr, norm_y_bias_ptr,
            encoder_ptr, gate_in_ptr, gate_in_bias_ptr,
            WIDTH, CODE, HIDDEN, BLOCK_C, BLOCK_H, BLOCK_M, BLOCK_K, KIND, PRECISION,
        )  # fmt: skip
        c = tl.arange(0, BLOCK_C)
        h = tl.arange(0, BLOCK_H)
        hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
        gate = dot(hidden.to(KIND), load_weight(gate_out_ptr, HIDDEN, h, c, HIDDEN, CODE).to(KIND), PRECISION)
        code = code / (1.0 + tl.exp(-gate - load_vector(gate_out_bias_ptr, c, CODE)))
        at = (sample * length + token)[:, None] * CODE + c[None, :]
        tl.store(code_ptr + at, code.to(code_ptr.dtype.element_ty), mask=member[:, None] & (c < CODE)[None, :])


@triton.jit
def store_slots(ptr, at, column, values, inside, WIDTH: tl.constexpr):
    """Rows of a table ``[slots, WIDTH]``."""
    mask = inside[:, None] & (column < WIDTH)[None, :]
    tl.store(ptr + at[:, None] * WIDTH + column[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def encode_backward(
    x_ptr,
    y_ptr,
    token_ptr,
    group_ptr,
    share_ptr,
    grad_code_ptr,
    grad_sum_ptr,
    d_encoded_ptr,
    d_hidden_ptr,
    d_gate_ptr,
    active_ptr,
    normed_ptr,
    to_x_ptr,
    to_y_ptr,
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
    """Gradients of the members' codes; programs are (tile of slots, sample).

    Written a row a slot, 0 in unfilled ones: the gradients of ``W_enc u``, ``h`` and ``W2 GELU(h)``, ``GELU(h)`` itself
    and the three normalised rows, of which products give the gradients of all weights; and what ``x`` and ``y`` get.
    """
    sample = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = slot < slots
    at = sample * slots + slot
    token = tl.load(token_ptr + at, mask=inside, other=-1)
    group = tl.load(group_ptr + at, mask=inside, other=0)
    member = token >= 0
    x_ptr += sample * x_batch
    y_ptr += sample * num_groups * WIDTH
    statistics = row_statistics(x_ptr, y_ptr, x_row, token, group, member, eps, WIDTH, BLOCK_D)
    encoded, hidden = encode_rows(
        x_ptr, y_ptr, x_row, token, group, member, statistics,
        norm_ptr, norm_x_ptr, norm_x_bias_ptr, norm_y_ptr, norm_y_bias_ptr, encoder_ptr, gate_in_ptr, gate_in_bias_ptr,
        WIDTH, CODE, HIDDEN, BLOCK_C, BLOCK_H, BLOCK_M, BLOCK_K, KIND, PRECISION,
    )  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    below = 0.5 * (1.0 + tl.erf(hidden * 0.7071067811865476))
    active = hidden * below
    gate_out = load_weight(gate_out_ptr, HIDDEN, h, c, HIDDEN, CODE).to(KIND)  # shape: [h, c]
    gate = dot(active.to(KIND), gate_out, PRECISION) + load_vector(gate_out_bias_ptr, c, CODE)
    gate = 1.0 / (1.0 + tl.exp(-gate))

    grad = load_rows(grad_code_ptr + sample * length * CODE, token, member, CODE, c, CODE).to(tl.float32)
    share = tl.load(share_ptr + sample * length + token, mask=member, other=0.0)
    of_sum = load_rows(grad_sum_ptr + sample * num_groups * CODE, group, member, CODE, c, CODE).to(tl.float32)
    grad += share[:, None] * of_sum
    d_encoded = grad * gate
    d_gate = grad * encoded * gate * (1.0 - gate)
    slope = below + hidden * tl.exp(-0.5 * hidden * hidden) * 0.3989422804014327
    d_hidden = dot(d_gate.to(KIND), tl.trans(gate_out), PRECISION) * slope
    store_slots(d_encoded_ptr, at, c, d_encoded, inside, CODE)
    store_slots(d_gate_ptr, at, c, d_gate, inside, CODE)
    store_slots(d_hidden_ptr, at, h, d_hidden, inside, HIDDEN)
    store_slots(active_ptr, at, h, tl.where(member[:, None], active, 0.0), inside, HIDDEN)

    # A norm's gradient needs a sum over all channels before it can be written: two walks over them.
    d_encoded = d_encoded.to(KIND)
    d_hidden = d_hidden.to(KIND)
    z_scale, _, x_scale, _, y_scale = statistics
    z_dot = tl.zeros([BLOCK_M], tl.float32)
    x_sum = tl.zeros([BLOCK_M], tl.float32)
    x_dot = tl.zeros([BLOCK_M], tl.float32)
    y_sum = tl.zeros([BLOCK_M], tl.float32)
    y_dot = tl.zeros([BLOCK_M], tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        z_hat, x_hat, y_hat = normed_rows(x_ptr, y_ptr, x_row, token, group, member, statistics, d, WIDTH)
        d_z, d_x, d_y = normed_gradients(
            d_encoded, d_hidden, norm_ptr, norm_x_ptr, norm_y_ptr, encoder_ptr, gate_in_ptr, d, c, h,
            WIDTH, CODE, HIDDEN, KIND, PRECISION,
        )  # fmt: skip
        z_dot += tl.sum(d_z * z_hat, 1)
        x_sum += tl.sum(d_x, 1)
        x_dot += tl.sum(d_x * x_hat, 1)
        y_sum += tl.sum(d_y, 1)
        y_dot += tl.sum(d_y * y_hat, 1)
    for begin in range(0, WIDTH, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        z_hat, x_hat, y_hat = normed_rows(x_ptr, y_ptr, x_row, token, group, member, statistics, d, WIDTH)
        d_z, d_x, d_y = normed_gradients(
            d_encoded, d_hidden, norm_ptr, norm_x_ptr, norm_y_ptr, encoder_ptr, gate_in_ptr, d, c, h,
            WIDTH, CODE, HIDDEN, KIND, PRECISION,
        )  # fmt: skip
        d_z = (d_z - z_hat * (z_dot / WIDTH)[:, None]) * z_scale[:, None]
        d_x = (d_x - (x_sum / WIDTH)[:, None] - x_hat * (x_dot / WIDTH)[:, None]) * x_scale[:, None]
        d_y = (d_y - (y_sum / WIDTH)[:, None] - y_hat * (y_dot / WIDTH)[:, None]) * y_scale[:, None]
        store_slots(to_x_ptr, at, d, d_x + d_z, inside, WIDTH)
        store_slots(to_y_ptr, at, d, d_y - d_z, inside, WIDTH)
        row = normed_ptr + at[:, None] * (3 * WIDTH) + d[None, :]
        mask = inside[:, None] & (d < WIDTH)[None, :]
        kind = normed_ptr.dtype.element_ty
        tl.store(row, z_hat.to(kind), mask=mask)
        tl.store(row + WIDTH, x_hat.to(kind), mask=mask)
        tl.store(row + 2 * WIDTH, y_hat.to(kind), mask=mask)


@triton.jit
def normed_gradients(
    d_encoded,
    d_hidden,
    norm_ptr,
    norm_x_ptr,
    norm_y_ptr,
    encoder_ptr,
    gate_in_ptr,
    d,
    c,
    h,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    HIDDEN: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of channels ``d`` of the three normalised rows."""
    of_u = tl.trans(load_weight(gate_in_ptr, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND))
    of_x = tl.trans(load_weight(gate_in_ptr + WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND))
    of_y = tl.trans(load_weight(gate_in_ptr + 2 * WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND))
    encoder = tl.trans(load_weight(encoder_ptr, WIDTH, d, c, WIDTH, CODE).to(KIND))
    d_z = dot(d_encoded, encoder, PRECISION) + dot(d_hidden, of_u, PRECISION)
    d_x = dot(d_hidden, of_x, PRECISION) * load_vector(norm_x_ptr, d, WIDTH)
    d_y = dot(d_hidden, of_y, PRECISION) * load_vector(norm_y_ptr, d, WIDTH)
    return d_z * load_vector(norm_ptr, d, WIDTH), d_x, d_y
