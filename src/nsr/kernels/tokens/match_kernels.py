"""Matching without a matrix in memory: score tiles, and what is reduced from them before the next one.

Cosines are products of the raw features divided by the lengths afterwards: half-precision products are exact in fp32,
so the scores have fp32's precision at the tensor cores' full rate. A NaN counts as infinity, above every number.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.blocks import dot, load_rows

EPS = tl.constexpr(1e-6)


@triton.jit
def tokens_at(order_ptr, rank, inside, ORDERED: tl.constexpr):
    """The tokens at these ranks; without an order, rank and token are the same."""
    if ORDERED:
        return tl.load(order_ptr + rank, mask=inside, other=0)
    else:
        return rank


@triton.jit
def inverse_length(x):
    """``1 / max(|x|, eps)`` of each row."""
    wide = x.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), EPS)


@triton.jit
def best_match(
    x_ptr,
    order_ptr,
    valid_ptr,
    best_ptr,
    partner_ptr,
    x_batch,
    x_row,
    order_batch,
    valid_batch,
    count_a,
    count_b,
    first_a,
    first_b,
    step,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ORDERED: tl.constexpr,
    MASKED: tl.constexpr,
    NOT_SELF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The highest cosine of each a among all b, and the first b that has it; programs are (tile of a, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    x_ptr += sample * x_batch
    order_ptr += sample * order_batch
    valid_ptr += sample * valid_batch
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    column = tl.arange(0, BLOCK_B)
    inside_a = i < count_a
    d = tl.arange(0, BLOCK_D)
    a = load_rows(x_ptr, tokens_at(order_ptr, first_a + step * i, inside_a, ORDERED), inside_a, x_row, d, WIDTH)

    # Every lane keeps the best of its own column; columns are compared once, at the end.
    best = tl.full([BLOCK_A, BLOCK_B], float("-inf"), tl.float32)
    tile = tl.zeros([BLOCK_A, BLOCK_B], tl.int32)
    for begin in range(0, count_b, BLOCK_B):
        j = begin + column
        inside_b = j < count_b
        token_b = tokens_at(order_ptr, first_b + step * j, inside_b, ORDERED)
        b = load_rows(x_ptr, token_b, inside_b, x_row, d, WIDTH)
        score = dot(a, tl.trans(b), PRECISION) * inverse_length(b)[None, :]
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
    top = tl.where(tl.abs(top) == float("inf"), top, top * inverse_length(a))
    at = sample * count_a + i
    tl.store(best_ptr + at, top, mask=inside_a)
    tl.store(partner_ptr + at, tl.minimum(partner, count_b - 1).to(tl.int64), mask=inside_a)


@triton.jit
def energy(
    x_ptr,
    energy_ptr,
    x_batch,
    x_row,
    count,
    margin,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``mean_j ELU(cos(x_i, x_j) - margin)``; programs are (tile of i, sample)."""
    sample = tl.program_id(1).to(tl.int64)
    x_ptr += sample * x_batch
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    inside_a = i < count
    d = tl.arange(0, BLOCK_D)
    a = load_rows(x_ptr, i, inside_a, x_row, d, WIDTH)
    length_a = inverse_length(a)
    total = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for begin in range(0, count, BLOCK_B):
        j = begin + tl.arange(0, BLOCK_B)
        b = load_rows(x_ptr, j, j < count, x_row, d, WIDTH)
        over = dot(a, tl.trans(b), PRECISION) * length_a[:, None] * inverse_length(b)[None, :] - margin
        elu = tl.where(over > 0, over, tl.exp(over) - 1.0)
        total += tl.where((j < count)[None, :], elu, 0.0)
    tl.store(energy_ptr + sample * count + i, tl.sum(total, 1) / count, mask=inside_a)


@triton.jit
def load_scores(ptr, at, inside):
    """Scores in which NaN is infinity and nothing is below what lies outside."""
    score = tl.load(ptr + at, mask=inside, other=float("-inf"))
    return tl.where(score != score, float("inf"), score)


@triton.jit
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

    The ``r``-th highest is found bit by bit, in 32 counts.
    """
    # -0.0 + 0.0 is 0.0: equal scores get equal bits
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    # bits of floats, reordered so that they compare as unsigned numbers
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    key = tl.where(inside, key, 0)
    threshold = tl.full([], 0, tl.uint32)
    bit = tl.full([], 2147483648, tl.uint32)
    for _ in range(32):
        reached = tl.sum((key >= (threshold | bit)).to(tl.int32), 0)
        threshold = tl.where(reached >= r, threshold | bit, threshold)
        bit = bit >> 1
    above = key > threshold
    level = (key == threshold) & inside
    room = r - tl.sum(above.to(tl.int32), 0)
    return above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))


@triton.jit
def load_size(size_ptr, token, inside, SIZED: tl.constexpr):
    """Sizes of tokens; 1 where none are given."""
    if SIZED:
        return tl.load(size_ptr + token, mask=inside, other=0.0)
    else:
        return inside.to(tl.float32)


@triton.jit
def tome_layout(
    best_ptr,
    partner_ptr,
    size_ptr,
    group_ptr,
    share_ptr,
    order_ptr,
    start_ptr,
    total_ptr,
    key_ptr,
    key_size_ptr,
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

    New order: prefix, the a that stay, all b. In the layout a b comes ahead of the a that joined it. ``key``,
    ``key_size`` and ``count`` are room for the sources, which are sorted by counting, and for how many each b has.
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
    key_ptr += sample * r
    key_size_ptr += sample * r
    count_ptr += sample * count_b

    # Who merges; the others are alone in their groups.
    i = tl.arange(0, BLOCK_A)
    in_a = i < count_a
    token_a = first_a + 2 * i
    merges = highest(load_scores(best_ptr + sample * count_a, i, in_a), in_a, r)
    partner = tl.load(partner_ptr + sample * count_a + i, mask=in_a, other=0).to(tl.int32)
    alone = in_a & ~merges
    stays = num_prefix - 1 + tl.cumsum(alone.to(tl.int32), 0)
    tl.store(group_ptr + token_a, tl.where(merges, kept + partner, stays).to(tl.int64), mask=in_a)
    tl.store(order_ptr + stays, token_a, mask=alone)
    tl.store(start_ptr + stays, stays, mask=alone)
    tl.store(share_ptr + token_a, tl.full([BLOCK_A], 1.0, tl.float32), mask=alone)
    tl.store(total_ptr + stays, load_size(size_ptr, token_a, alone, SIZED), mask=alone)
    place = tl.cumsum(merges.to(tl.int32), 0) - 1
    tl.store(key_ptr + place, partner * BLOCK_A + i, mask=merges)
    tl.store(key_size_ptr + place, load_size(size_ptr, token_a, merges, SIZED), mask=merges)

    j = tl.arange(0, BLOCK_B)
    in_prefix = j < num_prefix
    tl.store(group_ptr + j, j.to(tl.int64), mask=in_prefix)
    tl.store(order_ptr + j, j, mask=in_prefix)
    tl.store(start_ptr + j, j, mask=in_prefix)
    tl.store(share_ptr + j, tl.full([BLOCK_B], 1.0, tl.float32), mask=in_prefix)
    tl.store(total_ptr + j, load_size(size_ptr, j, in_prefix, SIZED), mask=in_prefix)
    in_b = j < count_b
    token_b = first_b + 2 * j
    size_b = load_size(size_ptr, token_b, in_b, SIZED)
    tl.store(group_ptr + token_b, (kept + j).to(tl.int64), mask=in_b)
    tl.store(total_ptr + kept + j, size_b, mask=in_b)
    tl.store(count_ptr + j, tl.zeros([BLOCK_B], tl.int32), mask=in_b)
    tl.debug_barrier()

    # Each source: how many come ahead of it by (b, position), how many share its b, and their size.
    k = tl.arange(0, BLOCK_R)
    in_r = k < r
    key = tl.load(key_ptr + k, mask=in_r, other=2147483647)
    to = key // BLOCK_A
    ahead = tl.zeros([BLOCK_R, BLOCK_C], tl.int32)
    sizes = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for begin in tl.range(0, r, BLOCK_C, loop_unroll_factor=4):
        other_k = begin + tl.arange(0, BLOCK_C)
        other = tl.load(key_ptr + other_k, mask=other_k < r, other=2147483647)
        other_size = tl.load(key_size_ptr + other_k, mask=other_k < r, other=0.0)
        same = (other // BLOCK_A)[None, :] == to[:, None]
        # two counts in one number: those ahead below, those that share the b above
        ahead += (other[None, :] < key[:, None]).to(tl.int32) + tl.where(same, 65536, 0)
        sizes += tl.where(same, other_size[None, :], 0.0)
    counts = tl.sum(ahead, 1)
    source = first_a + 2 * (key % BLOCK_A)
    joined = tl.sum(sizes, 1) + load_size(size_ptr, first_b + 2 * to, in_r, SIZED)
    tl.store(order_ptr + kept + to + 1 + counts % 65536, source, mask=in_r)
    share = load_size(size_ptr, source, in_r, SIZED) / tl.where(in_r, joined, 1.0)
    tl.store(share_ptr + source, share, mask=in_r)
    # all sources of a b write the same numbers
    tl.store(total_ptr + kept + to, joined, mask=in_r)
    tl.store(count_ptr + to, counts // 65536, mask=in_r)
    tl.debug_barrier()

    count = tl.load(count_ptr + j, mask=in_b, other=0)
    start = kept + j + tl.cumsum(count, 0) - count
    tl.store(start_ptr + kept + j, start, mask=in_b)
    tl.store(start_ptr + num_groups + j, tl.full([BLOCK_B], 0, tl.int32) + length, mask=j == 0)
    tl.store(order_ptr + start, token_b, mask=in_b)
    total = tl.load(total_ptr + kept + j, mask=in_b, other=1.0)
    tl.store(share_ptr + token_b, size_b / total, mask=in_b)
