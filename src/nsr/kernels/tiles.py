"""Device functions of the fused kernels: members of a tile, sums over its rows, products in bf16 terms, the GELU.

A tile is a run of consecutive members sorted by row. Its rows are numbered by rank, and a row's sum is one line of the
product of a 0-1 matrix (rank x member) with the members' values: exact, because every fp32 value is the sum of three
bf16 terms. A row that lies inside a tile is stored at once; one that crosses a border leaves a partial sum in each of
its tiles' carry, ``[tiles, 2, width]``, see :mod:`nsr.kernels.row_runs`.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

# Triton's interpreter (3.9) multiplies the bit patterns of bf16 blocks; there the same terms are multiplied in fp32.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def tile_rows(rank_ptr, tile, members, replica, rows, tiles, BLOCK_E: tl.constexpr):
    """The rows of a tile, for :func:`store_rows`: the members' ranks, the first and the last, what crosses a border."""
    begin = tile * BLOCK_E
    end = tl.minimum(begin + BLOCK_E, members)
    at = begin + tl.arange(0, BLOCK_E)
    rank = tl.load(rank_ptr + at, mask=at < members, other=-1)
    first = tl.load(rank_ptr + begin)
    last = tl.load(rank_ptr + end - 1)
    # The first rank continues a row of the tile before where `left` is 1; the rank `right` goes on in the next tile.
    left = (tl.load(rank_ptr + begin - 1, mask=begin > 0, other=-1) == first).to(tl.int32)
    right = tl.where(tl.load(rank_ptr + end, mask=end < members, other=-1) == last, last, -1)
    return rank, first, last, left, right, replica * rows, (replica * tiles + tile) * 2


@triton.jit
def rank_places(tile_rows, ranked_ptr, first_rank, BLOCK_R: tl.constexpr):
    """Of ``BLOCK_R`` ranks: the 0-1 matrix, their rows in the table, their rows in the carry, and which go where."""
    rank, first, last, left, right, first_row, first_slot = tile_rows
    r = first_rank + tl.arange(0, BLOCK_R)
    selects = rank[None, :] == r[:, None]  # shape: [rank, member]
    row = first_row + tl.load(ranked_ptr + r, mask=r <= last, other=0)
    to_right = (r == right) & (r >= first + left)
    crosses = (r < first + left) | to_right
    whole = (r <= last) & ~crosses
    return selects, row, first_slot + to_right, whole, crosses


@triton.jit
def store_rows(tile_rows, ranked_ptr, values, out_ptr, carry_ptr, stride, column, WIDTH: tl.constexpr):
    """Sum ``values`` over each row of the tile into ``out``, or into the carry where the row crosses the border."""
    v1, v2, v3 = split(values)
    inside = column < WIDTH
    for first_rank in range(tile_rows[1], tile_rows[2] + 1, 16):
        selects, out_row, carry_row, whole, crosses = rank_places(tile_rows, ranked_ptr, first_rank, 16)
        selects = selects.to(tl.float32).to(tl.bfloat16)
        sums = dot(selects, v3, tl.zeros([16, values.shape[1]], tl.float32))
        sums = dot(selects, v2, sums)
        sums = dot(selects, v1, sums)
        out_at = out_row[:, None] * stride + column[None, :]
        tl.store(out_ptr + out_at, sums, mask=whole[:, None] & inside[None, :])
        carry_at = carry_row[:, None] * stride + column[None, :]
        tl.store(carry_ptr + carry_at, sums, mask=crosses[:, None] & inside[None, :])


@triton.jit
def tile_members(row_ptr, other_ptr, member_ptr, tile, members, BLOCK_E: tl.constexpr):
    """Both ends of each member of a tile, its place in the caller's order, and whether it exists (else all are 0)."""
    at = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = at < members
    row = tl.load(row_ptr + at, mask=inside, other=0).to(tl.int64)
    other = tl.load(other_ptr + at, mask=inside, other=0).to(tl.int64)
    member = tl.load(member_ptr + at, mask=inside, other=0).to(tl.int64)
    return row, other, member, inside


@triton.jit
def load_rows(table_ptr, row, column, WIDTH: tl.constexpr, STRIDE: tl.constexpr = 0):
    """``[row, column]`` of a table in fp32; 0 beyond its width. Members that do not exist read row 0, which exists.

    Rows are ``STRIDE`` elements apart where they do not follow each other.
    """
    at = row[:, None] * (STRIDE if STRIDE else WIDTH) + column[None, :]
    if column.shape[0] * (WIDTH // column.shape[0]) == WIDTH:
        block = tl.load(table_ptr + at)
    else:
        block = tl.load(table_ptr + at, mask=(column < WIDTH)[None, :], other=0.0)
    return block.to(tl.float32)


@triton.jit
def upper_half(x):
    """The upper 16 bits of an fp32 block as bf16, and what they leave; bit operations only, no conversion unit."""
    bits = x.to(tl.int32, bitcast=True)
    rest = x - (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), rest


@triton.jit
def split(x):
    """Three bf16 terms whose sum is the fp32 ``x``."""
    first, rest = upper_half(x)
    second, rest = upper_half(rest)
    third, _ = upper_half(rest)
    return first, second, third


@triton.jit
def exp2(x):
    """``2^x`` in one instruction (2 ulp; 0 below 2^-126)."""
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def reciprocal(x):
    """``1 / x`` in one instruction (1 ulp)."""
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def sigmoid(x, bias):
    """``1 / (1 + e^-(x + bias))``."""
    return reciprocal(1.0 + exp2(-1.4426950408889634 * x + -1.4426950408889634 * bias))


@triton.jit
def dot(a, b, total):
    """``total + a @ b`` of bf16 blocks, summed in fp32."""
    if INTERPRETED:
        total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def product(a1, a2, a3, b1, b2, b3, total, TERMS: tl.constexpr):
    """``total + a @ b`` from bf16 terms: 1 term is bf16, 2 are 16 bits (more than TF32 has), 3 are fp32's 24."""
    if TERMS >= 3:
        total = dot(a3, b1, total)
        total = dot(a2, b2, total)
        total = dot(a1, b3, total)
    if TERMS >= 2:
        total = dot(a2, b1, total)
        total = dot(a1, b2, total)
    return dot(a1, b1, total)


@triton.jit
def normal_tail(x):
    """``P(N > |x|)`` of a normal ``N``, and ``e^(-x^2 / 2)``.

    The error function is Abramowitz and Stegun's 7.1.26: within 1.5e-7 of the exact one, fp32's own rounding, and it
    shares its exponential with the density.
    """
    density = exp2(-0.7213475204444817 * x * x)
    k = reciprocal(1.0 + 0.2316418882 * tl.abs(x))  # 0.3275911 / sqrt(2)
    tail = k * (0.127414796 + k * (-0.142248368 + k * (0.7107068705 + k * (-0.7265760135 + k * 0.5307027145))))
    return tail * density, density


@triton.jit
def gelu(x):
    """``x cdf(x)`` with as few instructions as it takes."""
    tail, _ = normal_tail(x)
    return tl.maximum(x, 0.0) - tl.abs(x) * tail


@triton.jit
def gelu_parts(x):
    """The normal distribution function and density at ``x``; GELU is ``x cdf``, its slope ``cdf + x pdf``."""
    tail, density = normal_tail(x)
    return tl.where(x >= 0, 1.0 - tail, tail), density * 0.3989422804014327


@triton.jit
def tanh(x):
    """``tanh(x)`` in one instruction, within 2^-11 of its value."""
    if INTERPRETED:
        y = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
    else:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def normal_by_tanh(x):
    """``2 cdf(x) - 1`` of a normal as ``tanh(x p(x^2))``, and the derivative of the inner part.

    The polynomial is fitted to within 3.3e-5 of the distribution function, far below the instruction's own error;
    beyond the bound on ``x^2`` both are 1.
    """
    square = tl.minimum(x * x, 20.0)
    inner = x * (0.797618887 + square * (0.0369131652 + square * -0.000337601931))
    return tanh(inner), 0.797618887 + square * (0.1107394956 + square * -0.001688009655)


@triton.jit
def gelu_for(x, TERMS: tl.constexpr):
    """GELU as exactly as ``TERMS`` bf16 terms hold it: for one term with half the instructions."""
    if TERMS == 1:
        t, _ = normal_by_tanh(x)
        y = 0.5 * x * t + 0.5 * x
    else:
        y = gelu(x)
    return y


@triton.jit
def gelu_and_slope(x, TERMS: tl.constexpr):
    """GELU and its derivative, as :func:`gelu_for`."""
    if TERMS == 1:
        t, inner_slope = normal_by_tanh(x)
        y = 0.5 * x * t + 0.5 * x
        slope = 0.5 * t + 0.5 + 0.5 * x * inner_slope * (1.0 - t * t)
    else:
        cdf, pdf = gelu_parts(x)
        y = x * cdf
        slope = cdf + x * pdf
    return y, slope


@triton.jit
def round_to_bf16(x):
    """``x`` rounded to the nearest value that bf16 holds, still fp32; integer operations only."""
    return ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x):
    """``x`` in bf16, rounded to nearest; Triton's interpreter (3.9) would cut the bits off."""
    if INTERPRETED:
        x = round_to_bf16(x)
    return x.to(tl.bfloat16)


@triton.jit
def terms_of(x, TERMS: tl.constexpr):
    """bf16 terms whose sum approximates the fp32 ``x``: 1 has 8 bits, 2 have 17, 3 are exact."""
    if TERMS == 1:
        terms = (narrow(x),)
    else:
        first = round_to_bf16(x)
        if TERMS == 2:
            terms = (first.to(tl.bfloat16), narrow(x - first))
        else:
            second = round_to_bf16(x - first)
            terms = (first.to(tl.bfloat16), second.to(tl.bfloat16), narrow(x - first - second))
    return terms


@triton.jit
def multiply(a, b, total, TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, TERMS: tl.constexpr):
    """``total + a @ b`` from bf16 terms, small products first; those below the last term's rounding are left out."""
    for order in tl.static_range(TERMS):
        for i in tl.static_range(TERMS - order):
            x = a[i]
            y = b[TERMS - 1 - order - i]
            if TRANS_A:
                x = tl.trans(x)
            if TRANS_B:
                y = tl.trans(y)
            total = dot(x, y, total)
    return total
