"""The members of every group side by side: what turns sums over groups into gathers."""

from typing import NamedTuple

import torch
from torch import Tensor


class GroupLayout(NamedTuple):
    """Who belongs to which group, ready for the merge kernels.

    Attributes:
        group: Group of each token, ``[B, N]``, int64.
        share: Its share ``t_i = s_i / Σ s`` in the group, ``[B, N]``, fp32; 0 for padding.
        order: Tokens group by group, in a fixed order within a group, padding last, ``[B, N]``, int32.
        start: Where each group begins in that order, ``[B, G + 1]``, int32; the last entry is the end of the last one.
        size: Size of each group, ``[B, G]``, fp32; 0 without members.
    """

    group: Tensor
    share: Tensor
    order: Tensor
    start: Tensor
    size: Tensor


def lay_out(group: Tensor, size: Tensor, num_groups: int) -> GroupLayout:
    """Lay out groups of tokens.

    Args:
        group: Group of each token, ``[B, N]``, int64.
        size: What shares are proportional to, ``[B, N]``; 0 marks padding, which joins no group.
        num_groups: ``G``, at most ``N``.
    """
    return GroupLayout(group, *_lay_out(group, size, num_groups))


@torch.library.custom_op("nsr::lay_out", mutates_args=())
def _lay_out(group: Tensor, size: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    import triton

    from nsr.kernels.tokens.layout_kernels import lay_out as kernel

    batch, length = group.shape
    assert length < 1 << 15, "group and place of a token share one 32-bit number"
    share, order, start, total = empty_layout(group, num_groups)
    total.zero_()
    # one tile more than there are tokens where the end of the last group falls on its border
    grid = (triton.cdiv(max(length, num_groups + 1), 32), batch)
    kernel[grid](
        group.contiguous(), size.float().contiguous(), order, start, share, total, length, num_groups,
        BLOCK_A=32, BLOCK_B=64,
    )  # fmt: skip
    return share, order, start, total


@_lay_out.register_fake
def _(group: Tensor, size: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_layout(group, num_groups)


def bucket(count: int, medium: int = 512) -> int:
    """Lanes for so many tokens, few, ``medium`` or more: not many different numbers, because each is a compilation."""
    import triton

    return 64 if count <= 64 else max(medium, triton.next_power_of_2(count))


def empty_layout(group: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for share, order, start and size of a layout of ``group``."""
    batch, length = group.shape
    return (
        group.new_empty(batch, length, dtype=torch.float32),
        group.new_empty(batch, length, dtype=torch.int32),
        group.new_empty(batch, num_groups + 1, dtype=torch.int32),
        group.new_empty(batch, num_groups, dtype=torch.float32),
    )
