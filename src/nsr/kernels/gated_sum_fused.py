"""Launching the fused kernels of the gated residual sum: orders, buffers, tile sizes."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsr.kernels.gated_sum_kernels import sum_backward, sum_forward
from nsr.kernels.gated_sum_plain import Gradients
from nsr.kernels.gated_sum_wide_kernels import hidden_backward, logit_backward
from nsr.kernels.launch import carry_for, finish_rows, num_programs
from nsr.kernels.member_order import MemberOrder, member_order

# bf16 terms of each factor of the D x D product: 8, 16 and 24 bits.
TERMS = {"bf16": 1, "tf32": 2, "fp32": 3}


class Tiling(NamedTuple):
    """Sizes of one kernel's tiles and what it takes of the chip."""

    block_e: int  # members a tile
    block_d: int  # channels a block; wider layers take several
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor


FORWARD = Tiling(block_e=64, block_d=128, num_warps=8, num_stages=1, programs=2)
BACKWARD = Tiling(block_e=64, block_d=128, num_warps=8, num_stages=1, programs=1)
_CHUNK_ELEMENTS = 1 << 24  # of the wide backward's two buffers: 64 MB each


class _Rows(NamedTuple):
    """Gradients that are sums over rows, or their carries, by the table they belong to."""

    messages: Tensor
    source_gate: Tensor
    target_gate: Tensor
    mean: Tensor
    mean_gate: Tensor


class _Backward(NamedTuple):
    """One backward launch: everything but the order of the members, which says the side whose rows are summed."""

    grad: Tensor
    tables: tuple[Tensor, ...]  # messages, source_gate, target_gate, mean, mean_gate, weight, bias
    coefficient: Tensor
    scale: Tensor
    rows: _Rows
    d_coefficient: Tensor | None
    tiling: Tiling
    terms: int
    deterministic: bool

    def constants(self, by_source: bool) -> dict[str, Any]:
        """The kernels' compile-time arguments."""
        width = self.grad.shape[2]
        return {
            "WIDTH": width,
            "HEADS": self.coefficient.shape[1],
            "BLOCK_E": self.tiling.block_e,
            "BLOCK_D": min(self.tiling.block_d, triton.next_power_of_2(width)),
            "TERMS": self.terms,
            "BY_SOURCE": by_source,
            "SCATTER_SOURCE": not (self.deterministic or by_source),
            "NEEDS_T": self.d_coefficient is not None and not by_source,
            "num_warps": self.tiling.num_warps,
            "num_stages": self.tiling.num_stages,
        }


def forward(
    messages: Tensor,
    source_gate: Tensor,
    target_gate: Tensor,
    mean: Tensor,
    mean_gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    precision: str,
    tiling: Tiling = FORWARD,
) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`."""
    replicas, sources, width = messages.shape
    targets, (members, heads) = target_gate.shape[1], coefficient.shape
    order = member_order(target, source, targets)
    out = torch.empty_like(target_gate)
    tiles = triton.cdiv(members, tiling.block_e)
    carry = carry_for(out, tiles)
    if tiles:
        block = min(tiling.block_d, triton.next_power_of_2(width))
        run = triton.cdiv(tiles, num_programs(out.device, tiling.programs))
        sum_forward[(triton.cdiv(tiles, run), triton.cdiv(width, block), replicas)](
            messages, source_gate, target_gate, mean, mean_gate, weight, bias, coefficient,
            order.row, order.other, order.member, order.scale, out, carry,
            sources, targets, members, tiles, run,
            WIDTH=width, HEADS=heads, BLOCK_E=tiling.block_e, BLOCK_D=block, TERMS=TERMS[precision],
            num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip
    finish_rows(order, carry, out, tiling.block_e)
    return out


def backward(
    grad: Tensor,
    messages: Tensor,
    source_gate: Tensor,
    target_gate: Tensor,
    mean: Tensor,
    mean_gate: Tensor,
    weight: Tensor,
    bias: Tensor,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    needs_coefficient: bool,
    precision: str,
    deterministic: bool,
    tiling: Tiling = BACKWARD,
) -> Gradients:
    """As :func:`nsr.kernels.gated_sum_plain.backward`.

    The gradients of the source tables are added atomically in the same pass, or with ``deterministic`` in a second pass
    over the members sorted by source.
    """
    fill = torch.empty_like if deterministic else torch.zeros_like  # atomic addition starts from zero
    rows = _Rows(fill(messages), fill(source_gate), *map(torch.empty_like, (target_gate, mean, mean_gate)))
    d_coefficient = coefficient.new_zeros(grad.shape[0], *coefficient.shape) if needs_coefficient else None
    by_target = member_order(target, source, target_gate.shape[1])
    call = _Backward(
        grad=grad,
        tables=(messages, source_gate, target_gate, mean, mean_gate, weight, bias),
        coefficient=coefficient,
        scale=by_target.scale,
        rows=rows,
        d_coefficient=d_coefficient,
        tiling=tiling,
        terms=TERMS[precision],
        deterministic=deterministic,
    )
    run = _run_narrow if grad.shape[2] <= tiling.block_d else _run_wide
    d_weight, d_bias = run(call, by_target, by_source=False)
    if deterministic:
        run(call, member_order(source, target, messages.shape[1]), by_source=True)
    return Gradients(*rows, d_weight, d_bias, None if d_coefficient is None else d_coefficient.sum(0))


def _run_narrow(call: _Backward, order: MemberOrder, by_source: bool) -> tuple[Tensor, Tensor]:
    """One kernel for everything; the weights' gradients are a partial sum a program."""
    replicas, sources, width = call.tables[0].shape
    targets, members = call.grad.shape[1], call.coefficient.shape[0]
    tiles = triton.cdiv(members, call.tiling.block_e)
    per_program = max(1, triton.cdiv(tiles, num_programs(call.grad.device, call.tiling.programs)))
    programs = triton.cdiv(tiles, per_program)
    d_weight = call.grad.new_empty(replicas, programs, width, width)
    d_bias = call.grad.new_empty(replicas, programs, width)
    carries = _Rows(*(carry_for(out, tiles) for out in call.rows))
    if tiles:
        sum_backward[(programs, replicas)](
            call.grad, *call.tables, call.coefficient, order.row, order.other, order.member, call.scale,
            *call.rows, d_weight, d_bias, _or(call.d_coefficient, d_bias), *carries,
            sources, targets, members, tiles, per_program, **call.constants(by_source),
        )  # fmt: skip
    _finish(call, order, carries, by_source)
    return d_weight.sum(1), d_bias.sum(1)


def _run_wide(call: _Backward, order: MemberOrder, by_source: bool) -> tuple[Tensor, Tensor]:
    """Two kernels a chunk of members; the weight's gradient is a matrix product over the chunk."""
    messages, source_gate, target_gate, _, mean_gate, weight, bias = call.tables
    replicas, sources, width = messages.shape
    targets, members = call.grad.shape[1], call.coefficient.shape[0]
    tiles = triton.cdiv(members, call.tiling.block_e)
    chunk_tiles = max(1, min(tiles, _CHUNK_ELEMENTS // (replicas * width * call.tiling.block_e)))
    chunk = chunk_tiles * call.tiling.block_e
    d_logit, hidden = (call.grad.new_empty(replicas, chunk, width) for _ in range(2))
    d_weight, d_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    carries = _Rows(*(carry_for(out, tiles) for out in call.rows))
    rows, d_coefficient, constants = call.rows, _or(call.d_coefficient, d_bias), call.constants(by_source)
    for first in range(0, tiles, chunk_tiles):
        grid = (min(chunk_tiles, tiles - first), replicas)
        logit_backward[grid](
            call.grad, *call.tables, call.coefficient, order.row, order.other, order.member, call.scale,
            rows.messages, rows.mean, d_coefficient, carries.messages, carries.mean, d_logit,
            first, sources, targets, members, tiles, chunk, **constants,
        )  # fmt: skip
        hidden_backward[grid](
            source_gate, target_gate, mean_gate, weight, call.coefficient, order.row, order.other, order.member,
            rows.source_gate, rows.target_gate, rows.mean_gate, d_coefficient,
            carries.source_gate, carries.target_gate, carries.mean_gate, d_logit, hidden,
            first, sources, targets, members, tiles, chunk, **constants,
        )  # fmt: skip
        if not by_source:
            count = min(chunk, members - first * call.tiling.block_e)
            d_weight.baddbmm_(d_logit[:, :count].mT, hidden[:, :count])
            d_bias.add_(d_logit[:, :count].sum(1))
    _finish(call, order, carries, by_source)
    return d_weight, d_bias


def _finish(call: _Backward, order: MemberOrder, carries: _Rows, by_source: bool) -> None:
    """Add the carries of the side whose rows were summed."""
    side = slice(0, 2) if by_source else slice(2, 5)
    for out, carry in zip(call.rows[side], carries[side], strict=True):
        finish_rows(order, carry, out, call.tiling.block_e)


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A kernel takes a pointer even where it writes nothing."""
    return unused if tensor is None else tensor
