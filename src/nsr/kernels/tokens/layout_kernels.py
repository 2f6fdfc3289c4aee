"""Groups laid out one after another: where each begins, who its members are, and what share each has.

A member's place is the number of members ahead of it, counted: a few comparisons a pair of tokens, no sort, nothing
atomic, so sums over members have a fixed order.
"""

# A kernel's arguments are pointers, numbers and blocks, which have no types to write down.
# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

SPAN = tl.constexpr(1 << 15)  # above every length: group and place of a token share one number


@triton.jit(
    do_not_specialize=["length", "num_groups", "slots"],
    do_not_specialize_on_alignment=["group_ptr", "order_ptr", "start_ptr", "token_ptr", "of_group_ptr", "slot_ptr"],
)
def list_members(
    group_ptr,
    order_ptr,
    start_ptr,
    token_ptr,
    of_group_ptr,
    slot_ptr,
    length,
    num_groups,
    slots,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Tokens of groups of two or more, group by group, with their groups, then -1; and the slot of each place.

    One program a sample.
    """
    sample = tl.program_id(0).to(tl.int64)
    start_ptr += sample * (num_groups + 1)
    token_ptr += sample * slots
    of_group_ptr += sample * slots
    i = tl.arange(0, BLOCK_N)
    # padding comes after the end of the last group
    inside = i < tl.load(start_ptr + num_groups)
    token = tl.load(order_ptr + sample * length + i, mask=inside, other=0)
    group = tl.load(group_ptr + sample * length + token, mask=inside, other=0)
    start = tl.load(start_ptr + group, mask=inside, other=0)
    end = tl.load(start_ptr + group + 1, mask=inside, other=0)
    member = (inside & (end - start > 1)).to(tl.int32)
    slot = tl.cumsum(member, 0) - 1
    tl.store(token_ptr + slot, token, mask=(member > 0) & (slot < slots))
    tl.store(of_group_ptr + slot, group.to(tl.int32), mask=(member > 0) & (slot < slots))
    tl.store(slot_ptr + sample * length + i, tl.where(member > 0, slot, -1), mask=i < length)
    m = tl.arange(0, BLOCK_M)
    tl.store(token_ptr + m, tl.full([BLOCK_M], -1, tl.int32), mask=(m >= tl.sum(member, 0)) & (m < slots))


@triton.jit(
    do_not_specialize=["length", "num_groups"],
    do_not_specialize_on_alignment=["group_ptr", "size_ptr", "order_ptr", "start_ptr", "share_ptr", "total_ptr"],
)
def lay_out(
    group_ptr,
    size_ptr,
    order_ptr,
    start_ptr,
    share_ptr,
    total_ptr,
    length,
    num_groups,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Lay out one tile of tokens, and of groups; programs are (tile, sample). A token of size 0 is padding."""
    sample = tl.program_id(1).to(tl.int64)
    group_ptr += sample * length
    size_ptr += sample * length
    i = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    inside = i < length
    size = tl.load(size_ptr + i, mask=inside, other=0.0)
    # Padding and what lies outside come after all groups; within a group tokens ascend.
    own = tl.load(group_ptr + i, mask=inside, other=0).to(tl.int32)
    own = tl.where(inside & (size > 0), own, num_groups)
    key = own * SPAN + i
    ahead = tl.zeros([BLOCK_A, BLOCK_B], tl.int32)
    before = tl.zeros([BLOCK_A, BLOCK_B], tl.int32)
    total = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for begin in range(0, length, BLOCK_B):
        j = begin + tl.arange(0, BLOCK_B)
        other_size = tl.load(size_ptr + j, mask=j < length, other=0.0)
        other = tl.load(group_ptr + j, mask=j < length, other=0).to(tl.int32)
        other = tl.where((j < length) & (other_size > 0), other, num_groups)
        other_key = tl.where(j < length, other * SPAN + j, 2147483647)
        ahead += (other_key[None, :] < key[:, None]).to(tl.int32)
        before += (other_key[None, :] < (i * SPAN)[:, None]).to(tl.int32)
        total += tl.where(other[None, :] == own[:, None], other_size[None, :], 0.0)
    total = tl.sum(total, 1)
    real = inside & (size > 0)
    tl.store(order_ptr + sample * length + tl.sum(ahead, 1), i, mask=inside)
    tl.store(share_ptr + sample * length + i, tl.where(real, size / tl.where(real, total, 1.0), 0.0), mask=inside)
    tl.store(start_ptr + sample * (num_groups + 1) + i, tl.sum(before, 1), mask=i <= num_groups)
    # all members of a group write the same number
    tl.store(total_ptr + sample * num_groups + own, total, mask=real)
