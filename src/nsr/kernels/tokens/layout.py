"""The members of every group side by side: what turns sums over groups into gathers."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2


class GroupLayout(NamedTuple):
    """Who belongs to which group, ready for the merge kernels.

    Attributes:
        group: Group of each token, ``[B, N]``, int64.
        share: Its share ``t_i = s_i / Σ s`` in the group, ``[B, N]``, fp32; 0 for padding.
        order: Tokens group by group, in a fixed order within a group, padding last, ``[B, N]``, int32.
        start: Where each group begins in that order, ``[B, G + 1]``, int32; the last entry is the end of the last one.
        size: Size of each group, ``[B, G]``, fp32; 0 without members.
        member: Tokens of groups of two or more, each in a slot, then -1, ``[B, S]``, int32; no columns where they have
            not been listed, and so the rest.
        member_group: Their groups, ``[B, S]``, int32.
        slot: The slot of each place of ``order``, -1 where there is none, ``[B, N]``, int32.
    """

    group: Tensor
    share: Tensor
    order: Tensor
    start: Tensor
    size: Tensor
    member: Tensor
    member_group: Tensor
    slot: Tensor


def lay_out(group: Tensor, size: Tensor, num_groups: int) -> GroupLayout:
    """Lay out groups of tokens.

    Args:
        group: Group of each token, ``[B, N]``, int64.
        size: What shares are proportional to, ``[B, N]``; 0 marks padding, which joins no group.
        num_groups: ``G``, at most ``N``.
    """
    share, order, start, total = _lay_out(group, size, num_groups)
    return GroupLayout(group, share, order, start, total, *(order[:, :0] for _ in range(3)))


@torch.library.custom_op("nsr::lay_out", mutates_args=())
def _lay_out(group: Tensor, size: Tensor, num_groups: int) -> list[Tensor]:
    from nsr.kernels.tokens.layout_kernels import lay_out as kernel

    batch, length = group.shape
    assert length < 1 << 15, "group and place of a token share one 32-bit number"
    _, share, order, start, total, *_ = empty_layout(group, num_groups, 0)
    total.zero_()
    # one tile more than there are tokens where the end of the last group falls on its border
    grid = (cdiv(max(length, num_groups + 1), 32), batch)
    kernel[grid](
        group.contiguous(), size.float().contiguous(), order, start, share, total, length, num_groups,
        BLOCK_A=32, BLOCK_B=64,
    )  # fmt: skip
    return [share, order, start, total]


@_lay_out.register_fake
def _(group: Tensor, size: Tensor, num_groups: int) -> list[Tensor]:
    return list(empty_layout(group, num_groups, 0)[1:5])


def list_members(layout: GroupLayout, slots: int) -> GroupLayout:
    """The layout with its members listed, at most ``slots`` in a sample; itself where they have been already."""
    if layout.member.shape[1]:
        assert layout.member.shape[1] == slots
        return layout
    listed = _list_members(layout.group, layout.order, layout.start, slots)
    return GroupLayout(*layout[:5], *listed)


@torch.library.custom_op("nsr::list_members", mutates_args=())
def _list_members(group: Tensor, order: Tensor, start: Tensor, slots: int) -> list[Tensor]:
    from nsr.kernels.tokens.layout_kernels import list_members as kernel

    batch, length = order.shape
    *_, member, member_group, slot = empty_layout(group, 0, slots)
    kernel[(batch,)](
        group, order, start, member, member_group, slot, length, start.shape[1] - 1, slots,
        BLOCK_N=bucket(length), BLOCK_M=bucket(slots), num_warps=8,
    )  # fmt: skip
    return [member, member_group, slot]


@_list_members.register_fake
def _(group: Tensor, order: Tensor, start: Tensor, slots: int) -> list[Tensor]:
    return list(empty_layout(group, 0, slots)[5:])


def bucket(count: int, medium: int = 512) -> int:
    """Lanes for so many tokens, few, ``medium`` or more: not many different numbers, because each is a compilation."""
    return 64 if count <= 64 else max(medium, next_power_of_2(count))


def empty_layout(group: Tensor, num_groups: int, slots: int) -> GroupLayout:
    """Room for a layout of ``group``."""
    batch, length = group.shape

    def room(columns: int, kind: torch.dtype = torch.int32) -> Tensor:
        return group.new_empty(batch, columns, dtype=kind)

    return GroupLayout(
        group=group,
        share=room(length, torch.float32),
        order=room(length),
        start=room(num_groups + 1),
        size=room(num_groups, torch.float32),
        member=room(slots),
        member_group=room(slots),
        slot=room(length),
    )
