"""Launching the fused kernels of the weighted sum over members."""

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.launch import Sums, carry_for, finish_rows, num_programs
from nsr.kernels.member_order import MemberOrder, member_order
from nsr.kernels.segment_sum_kernels import coefficient_backward, weighted_sum

BLOCK_ELEMENTS = 1024  # of the block that a warp sums: 32 registers a thread
PROGRAMS = 32  # warps a multiprocessor


def forward(messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int) -> Tensor:
    """As :func:`nsr.kernels.segment_sum_plain.forward`."""
    return _sum(messages, coefficient, member_order(target, source, num_targets), num_targets)


def backward(
    grad: Tensor, messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, needs_coefficient: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`nsr.kernels.segment_sum_plain.backward`; the sum to the sources runs over members sorted by source."""
    replicas, sources, width = messages.shape
    members, heads = coefficient.shape
    d_messages = _sum(grad, coefficient, member_order(source, target, sources), sources)
    if not needs_coefficient:
        return d_messages, None
    d_coefficient = torch.empty_like(coefficient)
    if members:
        coefficient_backward[(cdiv(members, 64),)](
            grad, messages.float().contiguous(), coefficient, source, target, d_coefficient,
            replicas, sources, grad.shape[1], members,
            HEADS=heads, HEAD_WIDTH=width // heads, BLOCK_E=64,
            BLOCK_D=min(128, next_power_of_2(width // heads)),
        )  # fmt: skip
    return d_messages, d_coefficient


def _sum(x: Tensor, coefficient: Tensor, order: MemberOrder, rows: int) -> Tensor:
    """``sum_i t_i x_i`` over the members of each row."""
    members, heads = coefficient.shape
    replicas, others, width = x.shape
    out = coefficient.new_empty(replicas, rows, width)
    block_d = min(128, next_power_of_2(width))
    block_e = min(128, BLOCK_ELEMENTS // block_d)
    blocks = cdiv(members, block_e)
    run = block_e * max(1, cdiv(blocks, num_programs(out.device, PROGRAMS)))
    carry = carry_for(out, cdiv(members, run))
    if members:
        weighted_sum[(carry.shape[1], cdiv(width, block_d), replicas)](
            x, coefficient, order.other, order.member, order.rank, order.ranked,
            out, carry, rows, others, members, run,
            WIDTH=width, STRIDE=x.stride(1), HEADS=heads, BLOCK_E=block_e, BLOCK_D=block_d, num_warps=1,
        )  # fmt: skip
    finish_rows(order, Sums(out, carry, run))
    return out
