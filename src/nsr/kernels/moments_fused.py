"""Launching the fused kernels of the weighted sum over members."""

import torch
import triton
from torch import Tensor

from nsr.kernels.launch import carry_for, finish_rows, num_programs
from nsr.kernels.member_order import MemberOrder, member_order
from nsr.kernels.moments_kernels import coefficient_backward, weighted_sum

BLOCK_E = 64


def forward(
    messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int
) -> tuple[Tensor, Tensor]:
    """As :func:`nsr.kernels.moments_plain.forward`."""
    order = member_order(target, source, num_targets)
    energy = coefficient.new_empty(messages.shape[0], num_targets, coefficient.shape[1])  # equal for all replicas
    return _sum(messages, coefficient, order, num_targets, energy), energy[0]


def backward(
    grad: Tensor,
    grad_energy: Tensor,
    messages: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    needs_coefficient: bool,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`nsr.kernels.moments_plain.backward`; the sum back to the sources runs over members sorted by source."""
    replicas, sources, width = messages.shape
    members, heads = coefficient.shape
    d_messages = _sum(grad, coefficient, member_order(source, target, sources), sources, None)
    if not needs_coefficient:
        return d_messages, None
    d_coefficient = torch.empty_like(coefficient)
    if members:
        coefficient_backward[(triton.cdiv(members, BLOCK_E),)](
            grad, grad_energy, messages, coefficient, source, target, d_coefficient,
            replicas, sources, grad.shape[1], members,
            HEADS=heads, HEAD_WIDTH=width // heads, BLOCK_E=BLOCK_E,
            BLOCK_D=min(128, triton.next_power_of_2(width // heads)),
        )  # fmt: skip
    return d_messages, d_coefficient


def _sum(x: Tensor, coefficient: Tensor, order: MemberOrder, rows: int, energy: Tensor | None) -> Tensor:
    """``sum_i t_i x_i`` over the members of each row; with ``energy``, ``sum_i t_i^2`` into it."""
    replicas, others, width = x.shape
    members, heads = coefficient.shape
    out = x.new_empty(replicas, rows, width)
    tiles = triton.cdiv(members, BLOCK_E)
    carry = carry_for(out, tiles)
    energy_carry = carry if energy is None else carry_for(energy, tiles)
    block = min(128, triton.next_power_of_2(width))
    if tiles:
        run = triton.cdiv(tiles, num_programs(x.device, 8))
        weighted_sum[(triton.cdiv(tiles, run), triton.cdiv(width, block), replicas)](
            x, coefficient, order.row, order.other, order.member, out, carry,
            out if energy is None else energy, energy_carry,
            rows, others, members, tiles, run,
            WIDTH=width, HEADS=heads, BLOCK_E=BLOCK_E, BLOCK_D=block, ENERGY=energy is not None,
        )  # fmt: skip
    finish_rows(order, carry, out, BLOCK_E)
    if energy is not None:
        finish_rows(order, energy_carry, energy, BLOCK_E)
    return out
