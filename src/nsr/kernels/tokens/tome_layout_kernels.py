"""ToMe's groups from the best partner of each token: the ``r`` best pairs, and their groups laid out in one program.

Where tokens are few, that program finds the partners too, from the keys.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from nsr.kernels.tokens.match_kernels import grid_products, grid_terms, load_scores, rounded_cosine


@triton.jit
def highest(score, inside, r):
    """Which of a vector of scores are the ``r`` highest; among equals the first."""
    # -0.0 + 0.0 is 0.0: equal scores get equal bits
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    # bits of floats, reordered so that they compare as unsigned numbers
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    key = tl.where(inside, key, 0)
    if score.shape[0] <= 128:
        return inside & (count_ahead(key) < r)
    else:
        return highest_keys(key, inside, r)


@triton.jit
def count_ahead(key):
    """How many come ahead of each of a few keys in descending order."""
    place = tl.arange(0, key.shape[0])
    ahead = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (place[None, :] < place[:, None]))
    return tl.sum(ahead.to(tl.int32), 1)


@triton.jit
def highest_keys(key, inside, r):
    """Which of many keys are the ``r`` highest; among equals the first.

    The ``r``-th highest is found two bits at a time, in up to 16 rounds of counting: fewer where ``r`` keys are set off
    from the others earlier.
    """
    threshold = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)
    count = tl.full([], key.shape[0], tl.int32)  # of the keys that reach the threshold
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


@triton.jit
def lay_out_matches(
    score,
    partner,
    sample,
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
    """Lay out ToMe's groups of one sample from the best match of each a: the ``r`` most similar a join their b.

    New order: prefix, the a that stay, all b. In the layout a b comes ahead of the a that joined it. ``key`` is room
    for the sources, which are sorted by counting, ``count`` for how many each b has. Sizes are counts, so their sums
    are exact in any order and may be atomic.
    """
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
    merges = highest(score, in_a, r)
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
    """ToMe's groups from the best matches, laid out. One program a sample."""
    sample = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_A)
    in_a = i < count_a
    partner = tl.load(partner_ptr + sample * count_a + i, mask=in_a, other=0).to(tl.int32)
    score = load_scores(best_ptr + sample * count_a, i, in_a)
    lay_out_matches(
        score, partner, sample,
        size_ptr, group_ptr, share_ptr, order_ptr, start_ptr, total_ptr, member_ptr, member_group_ptr, slot_ptr,
        key_ptr, count_ptr, length, count_a, count_b, first_a, first_b, num_prefix, r,
        SIZED, BLOCK_A, BLOCK_B, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["length", "count_a", "count_b", "first_a", "first_b", "num_prefix", "r"],
    do_not_specialize_on_alignment=["size_ptr"],
)
def match_few(
    x_ptr,
    x_batch,
    x_head,
    x_row,
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
    HEADS: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_B: tl.constexpr,
    SIZED: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """ToMe's groups from the keys, where they are few. One program a sample."""
    sample = tl.program_id(0).to(tl.int64)
    x_ptr += sample * x_batch
    i = tl.arange(0, BLOCK_A)
    d = tl.arange(0, BLOCK_D)
    in_a = i < count_a
    a = grid_terms(x_ptr, x_head, x_row, first_a + 2 * i, in_a, d, HEADS, LOW, WIDTH)
    zeros = tl.zeros([BLOCK_A, TILE_B], tl.float32)
    score = tl.full([BLOCK_A], float("-inf"), tl.float32)
    partner = tl.zeros([BLOCK_A], tl.int32)
    for begin in range(0, count_b, TILE_B):
        j = begin + tl.arange(0, TILE_B)
        in_b = j < count_b
        b = grid_terms(x_ptr, x_head, x_row, first_b + 2 * j, in_b, d, HEADS, LOW, WIDTH)
        cosine = rounded_cosine(grid_products((zeros, zeros, zeros), a, b), LOW)
        cosine = tl.where(cosine != cosine, float("inf"), cosine)
        cosine = tl.where(in_b[None, :], cosine, float("-inf"))
        best = tl.max(cosine, 1)
        first = tl.min(tl.where(cosine == best[:, None], j[None, :], count_b - 1), 1)
        partner = tl.where(best > score, first, partner)
        score = tl.maximum(best, score)
    score = tl.where(in_a, score, float("-inf"))
    lay_out_matches(
        score, partner, sample,
        size_ptr, group_ptr, share_ptr, order_ptr, start_ptr, total_ptr, member_ptr, member_group_ptr, slot_ptr,
        key_ptr, count_ptr, length, count_a, count_b, first_a, first_b, num_prefix, r,
        SIZED, BLOCK_A, BLOCK_B, BLOCK_R, BLOCK_C,
    )  # fmt: skip


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
