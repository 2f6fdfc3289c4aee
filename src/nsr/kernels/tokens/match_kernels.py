"""Matching without a matrix in memory: score tiles, and what is reduced from them before the next one.

Scores are the grid cosines of :mod:`nsr.tokens.similarity`: every sum of products is exact, so tensor cores give the
bits that any other order of adding would. A NaN counts as infinity, above every number.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot

EPS = tl.constexpr(1e-6)


@triton.jit(do_not_specialize=["length"])
def split_features(
    x_ptr,
    x_batch,
    x_head,
    x_row,
    terms_ptr,
    length,
    HEADS: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The mean over heads, as unit features on the grid, in two terms; programs are (tile of tokens, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    inside = i < length
    high, low = grid_terms(x_ptr + sample * x_batch, x_head, x_row, i, inside, d, HEADS, LOW, WIDTH)
    mask = inside[:, None] & (d < WIDTH)[None, :]
    row = terms_ptr + ((sample * length + i) * (2 * WIDTH))[:, None] + d[None, :]
    tl.store(row, high, mask=mask)
    tl.store(row + WIDTH, low, mask=mask)


@triton.jit
def grid_terms(
    x_ptr,
    x_head,
    x_row,
    token,
    inside,
    d,
    HEADS: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Both terms of the unit features of some tokens, ``[token, d]``: of the mean over heads, all channels of it.

    A product is rounded before anything is added to it, so kernels that call this are compiled without fused ones.
    """
    mask = inside[:, None] & (d < WIDTH)[None, :]
    at = x_ptr + token.to(tl.int64)[:, None] * x_row + d[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HEADS <= 4:  # few enough to be read together: one program waits for nothing else
        for head in tl.static_range(1, HEADS):
            x += tl.load(at + head * x_head, mask=mask, other=0.0).to(tl.float32)
    else:
        for head in range(1, HEADS):
            x += tl.load(at + head * x_head, mask=mask, other=0.0).to(tl.float32)
    if HEADS > 1:
        x = (x * (1.0 / HEADS)).to(x_ptr.dtype.element_ty).to(tl.float32)
    wide = x.to(tl.float64)
    length_of = tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), EPS)
    scale = (tl.full([token.shape[0]], 2.0 ** (11 + LOW), tl.float64) / length_of).to(tl.float32)
    value = to_nearest(x * scale[:, None])
    high = to_nearest(value * 2.0**-LOW)
    return high.to(tl.float16), (value - high * 2.0**LOW).to(tl.float16)


@triton.jit
def to_nearest(x):
    """The nearest integer, of two the even one; of numbers below 2^22 in float32."""
    # the sum has no room for a fraction
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tokens_at(order_ptr, rank, inside, ORDERED: tl.constexpr):
    """The tokens at these ranks; without an order, rank and token are the same."""
    if ORDERED:
        return tl.load(order_ptr + rank, mask=inside, other=0)
    else:
        return rank


@triton.jit
def load_terms(terms_ptr, token, inside, c, WIDTH: tl.constexpr):
    """Channels ``c`` of both terms of some tokens."""
    at = terms_ptr + (token.to(tl.int64) * (2 * WIDTH))[:, None] + c[None, :]
    mask = inside[:, None] & (c < WIDTH)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + WIDTH, mask=mask, other=0.0)


@triton.jit
def grid_products(state, a, b):
    """Add the products of some channels to the three sums."""
    coarse, mixed, fine = state
    a_high, a_low = a
    b_high, b_low = b
    coarse += dot(a_high, tl.trans(b_high), "ieee")
    mixed += dot(a_high, tl.trans(b_low), "ieee")
    mixed += dot(a_low, tl.trans(b_high), "ieee")
    fine += dot(a_low, tl.trans(b_low), "ieee")
    return coarse, mixed, fine


@triton.jit
def score_tile(
    terms_ptr,
    first,
    token_a,
    inside_a,
    token_b,
    inside_b,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The cosines of two tiles of tokens, ``[a, b]``, correctly rounded: three exact sums make one number.

    ``first`` are the first channels of the tile of a, which stays while those of b come and go.
    """
    zeros = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    state = (zeros, zeros, zeros)
    for begin in tl.static_range(0, WIDTH, BLOCK_C):
        c = begin + tl.arange(0, BLOCK_C)
        b = load_terms(terms_ptr, token_b, inside_b, c, WIDTH)
        if begin == 0:
            state = grid_products(state, first, b)
        else:
            state = grid_products(state, load_terms(terms_ptr, token_a, inside_a, c, WIDTH), b)
    return rounded_cosine(state, LOW)


@triton.jit
def rounded_cosine(state, LOW: tl.constexpr):
    """The number that three exact sums make, correctly rounded."""
    coarse, mixed, fine = state
    # What a rounding loses is found exactly and added again, so that only the last one counts.
    high = coarse * 4.0**LOW
    rest = mixed * 2.0**LOW + fine
    lost = (mixed * 2.0**LOW - rest) + fine
    total = high + rest
    part = total - high
    lost += (high - (total - part)) + (rest - part)
    return (total + lost) * 4.0 ** (-11 - LOW)


@triton.jit(
    do_not_specialize=["length", "order_batch", "valid_batch", "count_a", "count_b", "first_a", "first_b", "step"],
    do_not_specialize_on_alignment=["order_ptr", "valid_ptr"],
)
def best_match(
    terms_ptr,
    order_ptr,
    valid_ptr,
    best_ptr,
    partner_ptr,
    length,
    order_batch,
    valid_batch,
    count_a,
    count_b,
    first_a,
    first_b,
    step,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ORDERED: tl.constexpr,
    MASKED: tl.constexpr,
    NOT_SELF: tl.constexpr,
):
    """The highest cosine of each a among all b, and the first b that has it; programs are (tile of a, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    terms_ptr += sample * length * (2 * WIDTH)
    order_ptr += sample * order_batch
    valid_ptr += sample * valid_batch
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    column = tl.arange(0, BLOCK_B)
    inside_a = i < count_a
    token_a = tokens_at(order_ptr, first_a + step * i, inside_a, ORDERED)
    first = load_terms(terms_ptr, token_a, inside_a, tl.arange(0, BLOCK_C), WIDTH)

    # Every lane keeps the best of its own column; columns are compared once, at the end.
    best = tl.full([BLOCK_A, BLOCK_B], float("-inf"), tl.float32)
    tile = tl.zeros([BLOCK_A, BLOCK_B], tl.int32)
    for begin in range(0, count_b, BLOCK_B):
        j = begin + column
        inside_b = j < count_b
        token_b = tokens_at(order_ptr, first_b + step * j, inside_b, ORDERED)
        score = score_tile(
            terms_ptr, first, token_a, inside_a, token_b, inside_b, LOW, WIDTH, BLOCK_C, BLOCK_A, BLOCK_B
        )
        score = tl.where(score != score, float("inf"), score)
        allowed = inside_b
        if MASKED:
            allowed = allowed & (tl.load(valid_ptr + token_b, mask=inside_b, other=0) != 0)
        score = tl.where(allowed[None, :], score, float("-inf"))
        if NOT_SELF:
            score = tl.where(i[:, None] == j[None, :], float("-inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        tile = tl.where(better, begin, tile)
    top = tl.max(best, 1)
    partner = tl.min(tl.where(best == top[:, None], tile + column[None, :], count_b), 1)
    at = sample * count_a + i
    tl.store(best_ptr + at, top, mask=inside_a)
    tl.store(partner_ptr + at, tl.minimum(partner, count_b - 1).to(tl.int64), mask=inside_a)


@triton.jit(do_not_specialize=["count"])
def energy(
    terms_ptr,
    energy_ptr,
    count,
    margin,
    units,
    inverse,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """``mean_j ELU(cos(x_i, x_j) - margin)``, terms rounded to ``1 / units``; programs are (tile of i, sample).

    The exponential is taken in double precision: rounded to a unit, it is the same number everywhere.
    """
    sample = tl.program_id(1).to(tl.int64)
    terms_ptr += sample * count * (2 * WIDTH)
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    first = load_terms(terms_ptr, i, i < count, tl.arange(0, BLOCK_C), WIDTH)
    total = tl.zeros([BLOCK_A, BLOCK_B], tl.int32)
    for begin in range(0, count, BLOCK_B):
        j = begin + tl.arange(0, BLOCK_B)
        score = score_tile(terms_ptr, first, i, i < count, j, j < count, LOW, WIDTH, BLOCK_C, BLOCK_A, BLOCK_B)
        over = score.to(tl.float64) - margin
        elu = tl.where(over > 0, over, tl.exp(over) - 1.0)
        # the sum has no room for a fraction: a multiple of the unit, rounded as torch.round does
        elu = (elu * units + 6755399441055744.0) - 6755399441055744.0
        counts = (score == score) & (j < count)[None, :]
        total += tl.where(counts, elu, 0.0).to(tl.int32)
    tl.store(energy_ptr + sample * count + i, tl.sum(total, 1).to(tl.float32) * inverse, mask=i < count)


@triton.jit
def load_scores(ptr, at, inside):
    """Scores in which NaN is infinity and nothing is below what lies outside."""
    score = tl.load(ptr + at, mask=inside, other=float("-inf"))
    return tl.where(score != score, float("inf"), score)


@triton.jit(do_not_specialize=["count"])
def rank_scores(score_ptr, order_ptr, count, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr):
    """Positions by descending score, equal ones ascending. A score's rank is the number of scores ahead of it."""
    sample = tl.program_id(1).to(tl.int64)
    score_ptr += sample * count
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    own = load_scores(score_ptr, i, i < count)[:, None]
    ahead = tl.zeros([BLOCK_A, BLOCK_B], tl.int32)
    for begin in range(0, count, BLOCK_B):
        j = begin + tl.arange(0, BLOCK_B)
        other = load_scores(score_ptr, j, j < count)[None, :]
        first = (j[None, :] < i[:, None]) & (j < count)[None, :]
        ahead += ((other > own) | ((other == own) & first)).to(tl.int32)
    tl.store(order_ptr + sample * count + tl.sum(ahead, 1), i.to(tl.int64), mask=i < count)
