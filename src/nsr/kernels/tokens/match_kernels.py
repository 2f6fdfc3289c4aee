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


@triton.jit(do_not_specialize=["heads", "length"])
def split_features(
    x_ptr,
    terms_ptr,
    x_batch,
    x_head,
    x_row,
    heads,
    inverse_heads,
    length,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The mean over heads, as unit features on the grid, in two terms; programs are (tile of tokens, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    mask = (i < length)[:, None] & (d < WIDTH)[None, :]
    at = sample * x_batch + i.to(tl.int64)[:, None] * x_row + d[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    for head in range(1, heads):
        x += tl.load(x_ptr + at + head * x_head, mask=mask, other=0.0).to(tl.float32)
    if heads > 1:
        x = (x * inverse_heads).to(x_ptr.dtype.element_ty).to(tl.float32)
    wide = x.to(tl.float64)
    length_of = tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), EPS)
    scale = (tl.full([BLOCK_N], 2.0 ** (11 + LOW), tl.float64) / length_of).to(tl.float32)
    value = to_nearest(x * scale[:, None])
    high = to_nearest(value * 2.0**-LOW)
    row = terms_ptr + ((sample * length + i) * (2 * WIDTH))[:, None] + d[None, :]
    tl.store(row, high.to(tl.float16), mask=mask)
    tl.store(row + WIDTH, (value - high * 2.0**LOW).to(tl.float16), mask=mask)


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


@triton.jit
def highest(score, inside, r):
    """Which of a vector of scores are the ``r`` highest; among equals the first.

    The ``r``-th highest is found two bits at a time, in up to 16 rounds of counting: fewer where ``r`` scores are set
    off from the others earlier.
    """
    # -0.0 + 0.0 is 0.0: equal scores get equal bits
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    # bits of floats, reordered so that they compare as unsigned numbers
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    key = tl.where(inside, key, 0)
    threshold = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)
    count = tl.full([], score.shape[0], tl.int32)  # of the keys that reach the threshold
    while (unit > 0) & (count != r):
        # three counts in one number
        reach = (key >= threshold + unit).to(tl.int64)
        reach += (key >= threshold + 2 * unit).to(tl.int64) << 20
        reach += (key >= threshold + 3 * unit).to(tl.int64) << 40
        reached = tl.sum(reach, 0)
        once = (reached & 1048575).to(tl.int32)
        twice = ((reached >> 20) & 1048575).to(tl.int32)
        thrice = (reached >> 40).to(tl.int32)
        threshold += unit * ((once >= r).to(tl.uint32) + (twice >= r).to(tl.uint32) + (thrice >= r).to(tl.uint32))
        count = tl.where(thrice >= r, thrice, tl.where(twice >= r, twice, tl.where(once >= r, once, count)))
        unit = unit >> 2
    above = key > threshold
    level = (key == threshold) & inside
    counts = tl.sum(above.to(tl.int32) + level.to(tl.int32) * 65536, 0)
    room = r - counts % 65536
    chosen = above | level
    if counts // 65536 > room:
        chosen = above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
    return chosen


@triton.jit
def load_size(size_ptr, token, inside, SIZED: tl.constexpr):
    """Sizes of tokens; 1 where none are given."""
    if SIZED:
        return tl.load(size_ptr + token, mask=inside, other=0.0)
    else:
        return inside.to(tl.float32)


@triton.jit(
    do_not_specialize=["length", "count_a", "count_b", "first_a", "first_b", "num_prefix", "r"],
    do_not_specialize_on_alignment=["size_ptr"],
)
def tome_layout(
    best_ptr,
    partner_ptr,
    size_ptr,
    group_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    total_ptr,
    member_ptr,
    member_group_ptr,
    slot_ptr,
    key_ptr,
    count_ptr,
    length,
    count_a,
    count_b,
    first_a,
    first_b,
    num_prefix,
    r,
    SIZED: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """ToMe's groups from the best matches, laid out: the ``r`` most similar a join their b. One program a sample.

    New order: prefix, the a that stay, all b. In the layout a b comes ahead of the a that joined it. ``key`` is room
    for the sources, which are sorted by counting, ``count`` for how many each b has. Sizes are counts, so their sums
    are exact in any order and may be atomic.
    """
    sample = tl.program_id(0).to(tl.int64)
    num_groups = length - r
    kept = num_prefix + count_a - r
    size_ptr += sample * length
    group_ptr += sample * length
    share_ptr += sample * length
    order_ptr += sample * length
    start_ptr += sample * (num_groups + 1)
    total_ptr += sample * num_groups
    member_ptr += sample * 2 * r
    member_group_ptr += sample * 2 * r
    slot_ptr += sample * length
    key_ptr += sample * r
    count_ptr += sample * count_b

    # The prefix, whose tokens are alone, and the b before anyone joins them.
    j = tl.arange(0, BLOCK_B)
    in_prefix = j < num_prefix
    store_alone(group_ptr, share_ptr, order_ptr, start_ptr, total_ptr, slot_ptr, size_ptr, j, j, in_prefix, SIZED)
    in_b = j < count_b
    token_b = first_b + 2 * j
    size_b = load_size(size_ptr, token_b, in_b, SIZED)
    tl.store(group_ptr + token_b, (kept + j).to(tl.int64), mask=in_b)
    tl.store(total_ptr + kept + j, size_b, mask=in_b)
    tl.store(count_ptr + j, tl.zeros([BLOCK_B], tl.int32), mask=in_b)
    tl.debug_barrier()

    # Who merges; the others are alone in their groups.
    i = tl.arange(0, BLOCK_A)
    in_a = i < count_a
    token_a = first_a + 2 * i
    partner = tl.load(partner_ptr + sample * count_a + i, mask=in_a, other=0).to(tl.int32)
    merges = highest(load_scores(best_ptr + sample * count_a, i, in_a), in_a, r)
    merged = tl.cumsum(merges.to(tl.int32), 0)
    stays = num_prefix + i - merged
    store_alone(
        group_ptr, share_ptr, order_ptr, start_ptr, total_ptr, slot_ptr, size_ptr, token_a, stays, in_a & ~merges, SIZED
    )
    tl.store(group_ptr + token_a, (kept + partner).to(tl.int64), mask=merges)
    tl.store(key_ptr + merged - 1, partner * BLOCK_A + i, mask=merges)
    tl.atomic_add(count_ptr + partner, tl.full([BLOCK_A], 1, tl.int32), mask=merges, sem="relaxed", scope="cta")
    size_a = load_size(size_ptr, token_a, merges, SIZED)
    tl.atomic_add(total_ptr + kept + partner, size_a, mask=merges, sem="relaxed", scope="cta")
    tl.debug_barrier()

    # Each b: where its group begins, there and among the members of groups of two or more.
    count = tl.load(count_ptr + j, mask=in_b, other=0)
    joined = (count > 0).to(tl.int32)
    so_far = tl.cumsum(count + joined * 65536, 0)
    ahead_of_b = so_far % 65536 - count
    joined_to_b = so_far // 65536
    start = kept + j + ahead_of_b
    tl.store(start_ptr + kept + j, start, mask=in_b)
    tl.store(start_ptr + num_groups + j, tl.full([BLOCK_B], 0, tl.int32) + length, mask=j == 0)
    tl.store(order_ptr + start, token_b, mask=in_b)
    tl.store(share_ptr + token_b, size_b / tl.load(total_ptr + kept + j, mask=in_b, other=1.0), mask=in_b)
    slot = ahead_of_b + joined_to_b - 1
    tl.store(member_ptr + slot, token_b, mask=joined > 0)
    tl.store(member_group_ptr + slot, kept + j, mask=joined > 0)
    tl.store(slot_ptr + start, tl.where(joined > 0, slot, -1), mask=in_b)
    tl.store(count_ptr + j, joined_to_b, mask=in_b)
    tl.debug_barrier()

    # Each source: how many come ahead of it by (b, position).
    k = tl.arange(0, BLOCK_R)
    in_r = k < r
    key = tl.load(key_ptr + k, mask=in_r, other=2147483647)
    ahead = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    for begin in tl.range(0, r, BLOCK_C, loop_unroll_factor=4):
        other_k = begin + tl.arange(0, BLOCK_C)
        other = tl.load(key_ptr + other_k, mask=other_k < r, other=2147483647)
        ahead += (other[None, :] < key[:, None]).to(tl.int32)
    ahead = tl.sum(ahead, 1)
    to = key // BLOCK_A
    source = first_a + 2 * (key % BLOCK_A)
    place = kept + to + 1 + ahead
    tl.store(order_ptr + place, source, mask=in_r)
    total = tl.load(total_ptr + kept + to, mask=in_r, other=1.0)
    tl.store(share_ptr + source, load_size(size_ptr, source, in_r, SIZED) / total, mask=in_r)
    slot = ahead + tl.load(count_ptr + to, mask=in_r, other=0)
    tl.store(member_ptr + slot, source, mask=in_r)
    tl.store(member_group_ptr + slot, kept + to, mask=in_r)
    tl.store(slot_ptr + place, slot, mask=in_r)
    unfilled = r + tl.sum(joined, 0) + k
    tl.store(member_ptr + unfilled, tl.full([BLOCK_R], -1, tl.int32), mask=unfilled < 2 * r)


@triton.jit
def store_alone(
    group_ptr, share_ptr, order_ptr, start_ptr, total_ptr, slot_ptr, size_ptr, token, group, alone, SIZED: tl.constexpr
):
    """Tokens that are alone in their groups, which come in front, so that place and group are the same number."""
    tl.store(group_ptr + token, group.to(tl.int64), mask=alone)
    tl.store(order_ptr + group, token, mask=alone)
    tl.store(start_ptr + group, group, mask=alone)
    tl.store(share_ptr + token, tl.full([token.shape[0]], 1.0, tl.float32), mask=alone)
    tl.store(total_ptr + group, load_size(size_ptr, token, alone, SIZED), mask=alone)
    tl.store(slot_ptr + group, tl.full([token.shape[0]], -1, tl.int32), mask=alone)
