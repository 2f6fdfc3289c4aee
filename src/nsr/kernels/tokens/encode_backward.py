"""The gradient of the member codes: what members, groups and weights get.

The codes are computed again. Gradients of weights are sums over all members; they come out of one product of two tables
that hold a row a member.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows, load_vector, load_weight
from nsr.kernels.tokens.encode_kernels import MERGED, encode_rows, normed_rows, row_statistics, source_of


@triton.jit
def store_slots(ptr, at, column, values, inside, ROW: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Columns ``FIRST`` to ``FIRST + COUNT`` of some rows of a table ``[slots, ROW]``."""
    mask = inside[:, None] & (column < COUNT)[None, :]
    tl.store(ptr + at[:, None] * ROW + FIRST + column[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["length", "num_groups", "slots", "samples"],
    do_not_specialize_on_alignment=["token_ptr", "group_ptr", "share_ptr"],
)
def encode_backward(
    x_ptr,
    y_ptr,
    token_ptr,
    group_ptr,
    share_ptr,
    grad_code_ptr,
    grad_y_ptr,
    sums_ptr,
    left_ptr,
    right_ptr,
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
    decoder_ptr,
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
    FEATURE: tl.constexpr,
    CODED: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Gradients of the members' codes; programs are (tile of slots, sample), ``samples`` of them a model.

    Written a row a slot: what ``x`` and ``y`` get, and two tables whose product, summed over the rows, has the
    gradients of all weights in it (:func:`weight_gradients` takes them out). Rows of ``left`` are 0 in unfilled slots::

        left   dh | d(W_enc u) | d(W2 GELU(h)) | dy          right   z^ | x^ | y^ | GELU(h) | t c | 1
    """
    sample = tl.program_id(1).to(tl.int64)
    model = tl.program_id(1) // samples
    slot = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = slot < slots
    at = sample * slots + slot
    token = tl.load(token_ptr + at, mask=inside, other=-1)
    group = tl.load(group_ptr + at, mask=inside, other=0)
    member = token >= 0
    x_ptr += sample * x_batch
    y_ptr += sample * num_groups * WIDTH
    grad_y_ptr += sample * num_groups * WIDTH
    sums_ptr += model * 4 * HIDDEN
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
    decoder_ptr += model * WIDTH * CODE
    statistics = row_statistics(x_ptr, y_ptr, x_row, token, group, member, model, eps, WIDTH, BLOCK_D, SOURCES)
    encoded, hidden_z, hidden_x, hidden_y = encode_rows(
        x_ptr, y_ptr, x_row, token, group, member, model, statistics,
        norm_ptr, norm_x_ptr, norm_x_bias_ptr, norm_y_ptr, norm_y_bias_ptr, encoder_ptr, gate_in_ptr,
        WIDTH, CODE, HIDDEN, BLOCK_C, BLOCK_H, BLOCK_M, BLOCK_K, KIND, PRECISION, SOURCES,
    )  # fmt: skip
    c = tl.arange(0, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    hidden = hidden_z + hidden_x + hidden_y + load_vector(gate_in_bias_ptr, h, HIDDEN)
    below = 0.5 * (1.0 + tl.erf(hidden * 0.7071067811865476))
    active = hidden * below
    gate_out = load_weight(gate_out_ptr, HIDDEN, h, c, HIDDEN, CODE).to(KIND)  # shape: [h, c]
    gate = dot(active.to(KIND), gate_out, PRECISION) + load_vector(gate_out_bias_ptr, c, CODE)
    gate = 1.0 / (1.0 + tl.exp(-gate))

    # What the codes get: from the patches, and through the feature path from their group.
    grad = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    share = tl.load(share_ptr + sample * length + token, mask=member, other=0.0)
    if FEATURE:
        for begin in range(0, WIDTH, BLOCK_K):
            d = begin + tl.arange(0, BLOCK_K)
            rows = load_rows(grad_y_ptr, group, member, WIDTH, d, WIDTH)
            store_slots(left_ptr, at, d, rows, inside, LEFT, HIDDEN + 2 * CODE, WIDTH)
            of_code = tl.load(
                decoder_ptr + d[:, None] * CODE + c[None, :], mask=(d < WIDTH)[:, None] & (c < CODE)[None, :], other=0.0
            )
            grad += dot(rows.to(KIND), of_code.to(KIND), PRECISION)
        grad *= share[:, None]
        store_slots(right_ptr, at, c, gate * encoded * share[:, None], inside, RIGHT, 3 * WIDTH + HIDDEN, CODE)
    if CODED:
        grad += load_rows(grad_code_ptr + sample * length * CODE, token, member, CODE, c, CODE).to(tl.float32)
    d_encoded = grad * gate
    d_gate = d_encoded * encoded * (1.0 - gate)
    slope = below + hidden * tl.exp(-0.5 * hidden * hidden) * 0.3989422804014327
    d_hidden = dot(d_gate.to(KIND), tl.trans(gate_out), PRECISION) * slope
    store_slots(left_ptr, at, h, d_hidden, inside, LEFT, 0, HIDDEN)
    store_slots(left_ptr, at, c, d_encoded, inside, LEFT, HIDDEN, CODE)
    store_slots(left_ptr, at, c, d_gate, inside, LEFT, HIDDEN + CODE, CODE)
    store_slots(right_ptr, at, h, active, inside, RIGHT, 3 * WIDTH, HIDDEN)
    one = tl.arange(0, 8)
    last: tl.constexpr = RIGHT - 8
    store_slots(right_ptr, at, one, tl.where(one == 0, 1.0, 0.0)[None, :] + tl.zeros([BLOCK_M, 8], tl.float32),
                inside, RIGHT, last, 8)  # fmt: skip

    # The sums over channels that a norm's gradient needs are products with what the layer behind it made of it.
    z_scale, _, x_scale, _, y_scale = statistics
    z_dot = (tl.sum(d_encoded * encoded, 1) + tl.sum(d_hidden * hidden_z, 1)) / WIDTH
    x_sum = tl.sum(d_hidden * load_vector(sums_ptr, h, HIDDEN), 1) / WIDTH
    x_dot = tl.sum(d_hidden * (hidden_x - load_vector(sums_ptr + HIDDEN, h, HIDDEN)), 1) / WIDTH
    y_sum = tl.sum(d_hidden * load_vector(sums_ptr + 2 * HIDDEN, h, HIDDEN), 1) / WIDTH
    y_dot = tl.sum(d_hidden * (hidden_y - load_vector(sums_ptr + 3 * HIDDEN, h, HIDDEN)), 1) / WIDTH
    d_encoded = d_encoded.to(KIND)
    d_hidden = d_hidden.to(KIND)
    for begin in range(0, WIDTH, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        z_hat, x_hat, y_hat = normed_rows(
            x_ptr, y_ptr, x_row, token, group, member, model, statistics, d, WIDTH, SOURCES
        )
        d_z, d_x, d_y = normed_gradients(
            d_encoded, d_hidden, norm_ptr, norm_x_ptr, norm_y_ptr, encoder_ptr, gate_in_ptr, d, c, h,
            WIDTH, CODE, HIDDEN, KIND, PRECISION,
        )  # fmt: skip
        d_z = (d_z - z_hat * z_dot[:, None]) * z_scale[:, None]
        d_x = (d_x - x_sum[:, None] - x_hat * x_dot[:, None]) * x_scale[:, None]
        d_y = (d_y - y_sum[:, None] - y_hat * y_dot[:, None]) * y_scale[:, None]
        d_x += d_z
        if SOURCES == 0:
            d_y -= d_z
        else:
            source = source_of(model, SOURCES)
            d_y += tl.where(source == MERGED, d_x, tl.where(source == 0, -d_z, 0.0))
            d_x = tl.where(source == MERGED, 0.0, d_x)
        store_slots(to_x_ptr, at, d, d_x, inside, WIDTH, 0, WIDTH)
        store_slots(to_y_ptr, at, d, d_y, inside, WIDTH, 0, WIDTH)
        store_slots(right_ptr, at, d, z_hat, inside, RIGHT, 0, WIDTH)
        store_slots(right_ptr, at, d, x_hat, inside, RIGHT, WIDTH, WIDTH)
        store_slots(right_ptr, at, d, y_hat, inside, RIGHT, 2 * WIDTH, WIDTH)


@triton.jit
def norm_sums(
    gate_in_ptr,
    norm_x_ptr,
    norm_x_bias_ptr,
    norm_y_ptr,
    norm_y_bias_ptr,
    sums_ptr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What the gate makes of a LayerNorm's weight and bias, ``[model, 4, h]``; programs are (``x`` or ``y``, model)."""
    of_y = tl.program_id(0)
    model = tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    norm_ptr = norm_x_ptr
    norm_bias_ptr = norm_x_bias_ptr
    if of_y == 1:
        norm_ptr = norm_y_ptr
        norm_bias_ptr = norm_y_bias_ptr
    norm_ptr += model * WIDTH
    norm_bias_ptr += model * WIDTH
    gate_in_ptr += model * HIDDEN * 3 * WIDTH
    sums_ptr += model * 4 * HIDDEN
    of_weight = tl.zeros([BLOCK_H], tl.float32)
    of_bias = tl.zeros([BLOCK_H], tl.float32)
    for begin in range(0, WIDTH, BLOCK_K):
        d = begin + tl.arange(0, BLOCK_K)
        weight = load_weight(gate_in_ptr + (1 + of_y) * WIDTH, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(tl.float32)
        norm = tl.load(norm_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        norm_bias = tl.load(norm_bias_ptr + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        of_weight += tl.sum(weight * norm[:, None], 0)
        of_bias += tl.sum(weight * norm_bias[:, None], 0)
    tl.store(sums_ptr + 2 * of_y * HIDDEN + h, of_weight, mask=h < HIDDEN)
    tl.store(sums_ptr + (2 * of_y + 1) * HIDDEN + h, of_bias, mask=h < HIDDEN)


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


@triton.jit
def load_products(ptr, first_row, row, rows, column, columns, RIGHT: tl.constexpr):
    """A block of the summed product of the two tables, in fp32, 0 outside."""
    at = (first_row + row)[:, None] * RIGHT + column[None, :]
    return tl.load(ptr + at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_block(ptr, row, rows, row_stride, column, columns, values):
    """A block of a matrix."""
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(ptr + row[:, None] * row_stride + column[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradients(
    product_ptr,
    norm_ptr,
    norm_x_ptr,
    norm_x_bias_ptr,
    norm_y_ptr,
    norm_y_bias_ptr,
    encoder_ptr,
    gate_in_ptr,
    to_norm_ptr,
    to_norm_x_ptr,
    to_norm_x_bias_ptr,
    to_norm_y_ptr,
    to_norm_y_bias_ptr,
    to_encoder_ptr,
    to_gate_in_ptr,
    to_gate_in_bias_ptr,
    to_gate_out_ptr,
    to_gate_out_bias_ptr,
    to_decoder_ptr,
    WIDTH: tl.constexpr,
    CODE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FEATURE: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """The gradients of all weights out of the product of the two tables; programs are (a few channels, model).

    A norm's weight is a factor on a column of the layer behind it, so its gradient is a sum down that column.
    """
    model = tl.program_id(1)
    product_ptr += model * LEFT * RIGHT
    norm_ptr += model * WIDTH
    norm_x_ptr += model * WIDTH
    norm_x_bias_ptr += model * WIDTH
    norm_y_ptr += model * WIDTH
    norm_y_bias_ptr += model * WIDTH
    encoder_ptr += model * CODE * WIDTH
    gate_in_ptr += model * HIDDEN * 3 * WIDTH
    to_norm_ptr += model * WIDTH
    to_norm_x_ptr += model * WIDTH
    to_norm_x_bias_ptr += model * WIDTH
    to_norm_y_ptr += model * WIDTH
    to_norm_y_bias_ptr += model * WIDTH
    to_encoder_ptr += model * CODE * WIDTH
    to_gate_in_ptr += model * HIDDEN * 3 * WIDTH
    to_gate_in_bias_ptr += model * HIDDEN
    to_gate_out_ptr += model * CODE * HIDDEN
    to_gate_out_bias_ptr += model * CODE
    to_decoder_ptr += model * WIDTH * CODE
    d = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    c = tl.arange(0, BLOCK_C)
    h = tl.arange(0, BLOCK_H)
    one = tl.arange(0, 8)
    last: tl.constexpr = RIGHT - 8
    norm = load_vector(norm_ptr, d, WIDTH)
    of_z = load_products(product_ptr, 0, h, HIDDEN, d, WIDTH, RIGHT)
    of_code = load_products(product_ptr, HIDDEN, c, CODE, d, WIDTH, RIGHT)
    d_bias = tl.sum(load_products(product_ptr + last, 0, h, HIDDEN, one, 8, RIGHT), 1)  # all but the first are 0
    weight_z = tl.trans(load_weight(gate_in_ptr, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(tl.float32))
    weight_c = tl.trans(load_weight(encoder_ptr, WIDTH, d, c, WIDTH, CODE).to(tl.float32))
    to_norm = tl.sum(weight_z * of_z, 0) + tl.sum(weight_c * of_code, 0)
    tl.store(to_norm_ptr + d, to_norm.to(to_norm_ptr.dtype.element_ty), mask=d < WIDTH)
    store_block(to_gate_in_ptr, h, HIDDEN, 3 * WIDTH, d, WIDTH, of_z * norm)
    store_block(to_encoder_ptr, c, CODE, WIDTH, d, WIDTH, of_code * norm)
    norm_gradients(
        product_ptr, d_bias, norm_x_ptr, norm_x_bias_ptr, gate_in_ptr, to_norm_x_ptr, to_norm_x_bias_ptr,
        to_gate_in_ptr, d, h, WIDTH, WIDTH, HIDDEN, RIGHT,
    )  # fmt: skip
    norm_gradients(
        product_ptr, d_bias, norm_y_ptr, norm_y_bias_ptr, gate_in_ptr, to_norm_y_ptr, to_norm_y_bias_ptr,
        to_gate_in_ptr, d, h, 2 * WIDTH, WIDTH, HIDDEN, RIGHT,
    )  # fmt: skip
    if FEATURE:
        of_sum = load_products(product_ptr + 3 * WIDTH + HIDDEN, HIDDEN + 2 * CODE, d, WIDTH, c, CODE, RIGHT)
        store_block(to_decoder_ptr, d, WIDTH, CODE, c, CODE, of_sum)
    if tl.program_id(0) == 0:
        of_active = load_products(product_ptr + 3 * WIDTH, HIDDEN + CODE, c, CODE, h, HIDDEN, RIGHT)
        store_block(to_gate_out_ptr, c, CODE, HIDDEN, h, HIDDEN, of_active)
        to_bias = tl.sum(load_products(product_ptr + last, HIDDEN + CODE, c, CODE, one, 8, RIGHT), 1)
        tl.store(to_gate_out_bias_ptr + c, to_bias.to(to_gate_out_bias_ptr.dtype.element_ty), mask=c < CODE)
        tl.store(to_gate_in_bias_ptr + h, d_bias.to(to_gate_in_bias_ptr.dtype.element_ty), mask=h < HIDDEN)


@triton.jit
def norm_gradients(
    product_ptr,
    d_bias,
    norm_ptr,
    norm_bias_ptr,
    gate_in_ptr,
    to_norm_ptr,
    to_norm_bias_ptr,
    to_gate_in_ptr,
    d,
    h,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Of one LayerNorm and of the gate's columns behind it, which begin at ``FIRST``."""
    product = load_products(product_ptr + FIRST, 0, h, HIDDEN, d, WIDTH, RIGHT)
    weight = tl.trans(load_weight(gate_in_ptr + FIRST, 3 * WIDTH, d, h, WIDTH, HIDDEN).to(tl.float32))
    to_norm = tl.sum(weight * product, 0)
    to_bias = tl.sum(weight * d_bias[:, None], 0)
    kind = to_norm_ptr.dtype.element_ty
    tl.store(to_norm_ptr + d, to_norm.to(kind), mask=d < WIDTH)
    tl.store(to_norm_bias_ptr + d, to_bias.to(kind), mask=d < WIDTH)
    to_weight = product * load_vector(norm_ptr, d, WIDTH) + d_bias[:, None] * load_vector(norm_bias_ptr, d, WIDTH)
    store_block(to_gate_in_ptr + FIRST, h, HIDDEN, 3 * WIDTH, d, WIDTH, to_weight)
