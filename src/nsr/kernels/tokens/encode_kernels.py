"""The member codes of the null-space branch, tiles of members of groups of two or more.

``c = σ(W2 GELU(h) + b2) ⊙ W_enc u``,  ``h = W1 [u ; LN(x) ; LN(y)] + b1``,  ``u = RMSNorm(x - y)``. Nothing of it is
kept for the backward pass, which computes it again.

A batch may hold several models, as many samples of each, whose weights lie one behind the other. Controls read other
rows: ``u`` is of ``x`` (raw) or ``y`` (merged), and the latter has ``y`` in place of ``x`` everywhere. ``SOURCES`` says
so with two bits a model, so that one constant serves a whole stack, and 0 means that there is no control.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows, load_vector, load_weight

MERGED = tl.constexpr(2)


@triton.jit
def row_moments(x, eps, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mean of each row, and one over its standard deviation."""
    mean = tl.sum(x, 1) / WIDTH
    centred = tl.where((tl.arange(0, BLOCK_D) < WIDTH)[None, :], x - mean[:, None], 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)


@triton.jit
def source_of(model, SOURCES: tl.constexpr):
    """What a model's branch is fed with: 0 the residual, 1 the member itself, ``MERGED`` the merged row alone."""
    return (SOURCES >> (2 * model)) & 3


@triton.jit
def source_rows(x_ptr, y_ptr, x_row, token, group, member, model, d, WIDTH: tl.constexpr, SOURCES: tl.constexpr):
    """Channels ``d`` of what is encoded, of the member and of the merged row, in fp32."""
    x = load_rows(x_ptr, token, member, x_row, d, WIDTH).to(tl.float32)
    y = load_rows(y_ptr, group, member, WIDTH, d, WIDTH).to(tl.float32)
    if SOURCES == 0:
        z = x - y
    else:
        source = source_of(model, SOURCES)
        x = tl.where(source == MERGED, y, x)
        z = tl.where(source == 0, x - y, x)
    return z, x, y


@triton.jit
def row_statistics(
    x_ptr,
    y_ptr,
    x_row,
    token,
    group,
    member,
    model,
    eps,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """What the three norms need to know of each row: the scale of the source, mean and scale of ``x`` and of ``y``."""
    d = tl.arange(0, BLOCK_D)
    z, x, y = source_rows(x_ptr, y_ptr, x_row, token, group, member, model, d, WIDTH, SOURCES)
    z_scale = tl.rsqrt(tl.sum(z * z, 1) / WIDTH + eps)
    x_mean, x_scale = row_moments(x, eps, WIDTH, BLOCK_D)
    y_mean, y_scale = row_moments(y, eps, WIDTH, BLOCK_D)
    return z_scale, x_mean, x_scale, y_mean, y_scale


@triton.jit
def normed_rows(
    x_ptr, y_ptr, x_row, token, group, member, model, statistics, d, WIDTH: tl.constexpr, SOURCES: tl.constexpr
):
    """Channels ``d`` of the normalised source, ``x`` and ``y``, before the norms' weights."""
    z_scale, x_mean, x_scale, y_mean, y_scale = statistics
    z, x, y = source_rows(x_ptr, y_ptr, x_row, token, group, member, model, d, WIDTH, SOURCES)
    z_hat = z * z_scale[:, None]
    x_hat = (x - x_mean[:, None]) * x_scale[:, None]
    y_hat = (y - y_mean[:, None]) * y_scale[:, None]
    return z_hat, x_hat, y_hat


@triton.jit
def encode_channels(
    state,
    begin,
    x_ptr,
    y_ptr,
    x_row,
    token,
    group,
    member,
    model,
    statistics,
    norm_ptr,
    norm_x_ptr,
    norm_x_bias_ptr,
    norm_y_ptr,
    norm_y_bias_ptr,
    encoder_ptr,
    gate_in_ptr,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """Add what the channels from ``begin`` on contribute to the four products of :func:`encode_rows`."""
    encoded, hidden_z, hidden_x, hidden_y = state
    c = tl.arange(0, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    d = begin + tl.arange(0, BLOCK_K)
    z_hat, x_hat, y_hat = normed_rows(x_ptr, y_ptr, x_row, token, group, member, model, statistics, d, WIDTH, SOURCES)
    u = (z_hat * load_vector(norm_ptr, d, WIDTH)).to(KIND)
    encoded += dot(u, load_weight(encoder_ptr, WIDTH, d, c, WIDTH, CODE).to(KIND), PRECISION)
    hidden_z += dot(u, load_weight(gate_in_ptr, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(KIND), PRECISION)
    x = x_hat * load_vector(norm_x_ptr, d, WIDTH) + load_vector(norm_x_bias_ptr, d, WIDTH)
    of_x = load_weight(gate_in_ptr + WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN)
    hidden_x += dot(x.to(KIND), of_x.to(KIND), PRECISION)
    y = y_hat * load_vector(norm_y_ptr, d, WIDTH) + load_vector(norm_y_bias_ptr, d, WIDTH)
    of_y = load_weight(gate_in_ptr + 2 * WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN)
    hidden_y += dot(y.to(KIND), of_y.to(KIND), PRECISION)
    return encoded, hidden_z, hidden_x, hidden_y


@triton.jit
def encode_rows(
    x_ptr,
    y_ptr,
    x_row,
    token,
    group,
    member,
    model,
    statistics,
    norm_ptr,
    norm_x_ptr,
    norm_x_bias_ptr,
    norm_y_ptr,
    norm_y_bias_ptr,
    encoder_ptr,
    gate_in_ptr,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
    SOURCES: tl.constexpr,
):
    """``W_enc u`` of each row, and the three parts of ``h - b1``: of ``u``, ``LN(x)``, ``LN(y)``.

    Where not all channels fit at once, rows are read again, a few channels at a time, from the cache.
    """
    state = (
        tl.zeros([BLOCK_M, BLOCK_C], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_H], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_H], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_H], tl.float32),
    )
    if BLOCK_K >= WIDTH:
        state = encode_channels(
            state, 0, x_ptr, y_ptr, x_row, token, group, member, model, statistics,
            norm_ptr, norm_x_ptr, norm_x_bias_ptr, norm_y_ptr, norm_y_bias_ptr, encoder_ptr, gate_in_ptr,
            WIDTH, CODE, HIDDEN, BLOCK_C, BLOCK_H, BLOCK_K, KIND, PRECISION, SOURCES,
        )  # fmt: skip
    else:
        for begin in range(0, WIDTH, BLOCK_K):
            state = encode_channels(
                state, begin, x_ptr, y_ptr, x_row, token, group, member, model, statistics,
                norm_ptr, norm_x_ptr, norm_x_bias_ptr, norm_y_ptr, norm_y_bias_ptr, encoder_ptr, gate_in_ptr,
                WIDTH, CODE, HIDDEN, BLOCK_C, BLOCK_H, BLOCK_K, KIND, PRECISION, SOURCES,
            )  # fmt: skip
    return state


@triton.jit(
    do_not_specialize=["length", "num_groups", "slots", "samples"],
    do_not_specialize_on_alignment=["token_ptr", "group_ptr"],
)
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
    samples,
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
    SOURCES: tl.constexpr,
):
    """Codes of the members; programs are (tile of slots, sample), ``samples`` of them a model."""
    sample = tl.program_id(1).to(tl.int64)
    model = tl.program_id(1) // samples
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(token_ptr + sample * slots + slot, mask=slot < slots, other=-1)
    group = tl.load(group_ptr + sample * slots + slot, mask=slot < slots, other=0)
    member = token >= 0
    if tl.max(token, 0) >= 0:
        x_ptr += sample * x_batch
        y_ptr += sample * num_groups * WIDTH
        norm_ptr += model * WIDTH
        norm_x_ptr += model * WIDTH
        norm_x_bias_ptr += model * WIDTH
        norm_y_ptr += model * WIDTH
        norm_y_bias_ptr += model * WIDTH
        encoder_ptr += model * CODE * WIDTH
        gate_in_ptr += model * HIDDEN * 3 * WIDTH
        gate_in_bias_ptr += model * HIDDEN
        gate_out_ptr += model * CODE * HIDDEN
        gate_out_bias_ptr += model * CODE
        statistics = row_statistics(x_ptr, y_ptr, x_row, token, group, member, model, eps, WIDTH, BLOCK_D, SOURCES)
        code, hidden_z, hidden_x, hidden_y = encode_rows(
            x_ptr, y_ptr, x_row, token, group, member, model, statistics,
            norm_ptr, norm_x_ptr, norm_x_bias_ptr, norm_y_ptr, norm_y_bias_ptr,
            encoder_ptr, gate_in_ptr,
            WIDTH, CODE, HIDDEN, BLOCK_C, BLOCK_H, BLOCK_M, BLOCK_K, KIND, PRECISION, SOURCES,
        )  # fmt: skip
        c = tl.arange(0, BLOCK_C)
        h = tl.arange(0, BLOCK_H)
        hidden = hidden_z + hidden_x + hidden_y + load_vector(gate_in_bias_ptr, h, HIDDEN)
        hidden = 0.5 * hidden * (1.0 + tl.erf(hidden * 0.7071067811865476))
        gate = dot(hidden.to(KIND), load_weight(gate_out_ptr, HIDDEN, h, c, HIDDEN, CODE).to(KIND), PRECISION)
        code = code / (1.0 + tl.exp(-gate - load_vector(gate_out_bias_ptr, c, CODE)))
        at = (sample * length + token)[:, None] * CODE + c[None, :]
        tl.store(code_ptr + at, code.to(code_ptr.dtype.element_ty), mask=member[:, None] & (c < CODE)[None, :])
