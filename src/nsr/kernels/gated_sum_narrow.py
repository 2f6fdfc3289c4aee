"""Launching the fused kernels of the gated residual sum for widths up to 128: orders, buffers, tile sizes."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsr.kernels.gated_sum_narrow_kernels import sum_forward, tables_backward, weight_backward, weight_terms
from nsr.kernels.gated_sum_tables import Gradients, Tables
from nsr.kernels.launch import carry_for, finish_rows, num_programs
from nsr.kernels.member_order import MemberOrder, member_order

MAX_WIDTH = 128


class Tiling(NamedTuple):
    """What one kernel takes of the chip."""

    block_e: int  # members a tile
    num_warps: int
    programs: int  # per multiprocessor
    registers: int | None = None  # at most, a thread

    @property
    def options(self) -> dict[str, int | None]:
        """For the compiler."""
        return {"num_warps": self.num_warps, "num_stages": 1, "maxnreg": self.registers}


class Tilings(NamedTuple):
    """The tiles of each kernel; those of the backward pass have the same members."""

    forward: Tiling
    tables: Tiling
    weight: Tiling


TILINGS = {
    "fp32": Tilings(Tiling(32, 4, 2), Tiling(16, 4, 2), Tiling(16, 8, 2, 128)),
    "tf32": Tilings(Tiling(32, 4, 2), Tiling(16, 4, 2), Tiling(16, 8, 2, 128)),
    "bf16": Tilings(Tiling(32, 4, 3, 168), Tiling(32, 4, 2), Tiling(32, 8, 2, 128)),
}
TERMS = {"bf16": 1, "tf32": 2, "fp32": 2}  # bf16 terms of each factor of the product
CHUNK_ELEMENTS = 1 << 27  # of the logits' gradients between the backward kernels, in bf16: 256 MB


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, precision: str) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`."""
    tiling = TILINGS[precision].forward
    replicas, sources, _ = tables.messages.shape
    targets, members = tables.target_gate.shape[1], coefficient.shape[0]
    order = member_order(target, source, targets)
    out = torch.empty_like(tables.target_gate)
    tiles = triton.cdiv(members, tiling.block_e)
    tiles_per_run = max(1, triton.cdiv(tiles, _programs(tables, tiling)))
    carry = carry_for(out, triton.cdiv(tiles, tiles_per_run))
    if members:
        sum_forward[(carry.shape[1], replicas)](
            *_inputs(tables, coefficient, order, precision), *order.sums, order.scale, out, carry,
            sources, targets, members, tiles, tiles_per_run,
            BLOCK_E=tiling.block_e, **_constants(tables, coefficient, precision), **tiling.options,
        )  # fmt: skip
    finish_rows(order, carry, out, tiles_per_run * tiling.block_e)
    return out


def backward(
    grad: Tensor,
    tables: Tables,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    needs_coefficient: bool,
    precision: str,
    deterministic: bool,
) -> Gradients:
    """As :func:`nsr.kernels.gated_sum_plain.backward`.

    The gradients of the source tables are added atomically in the same pass, or with ``deterministic`` in a second pass
    over the members sorted by source.
    """
    fill = torch.empty_like if deterministic else torch.zeros_like  # atomic addition starts from zero
    d_messages, d_source_gate = fill(tables.messages), fill(tables.source_gate)
    d_target_gate, d_mean, d_mean_gate = map(torch.empty_like, (tables.target_gate, tables.mean, tables.mean_gate))
    d_sorted = coefficient.new_empty(grad.shape[0], *coefficient.shape) if needs_coefficient else None
    by_target = member_order(target, source, tables.target_gate.shape[1])
    walk = _Walk(grad * by_target.scale.unsqueeze(1), tables, coefficient, precision)
    d_weight, d_bias = walk.by_target(
        by_target, (d_mean, d_target_gate, d_mean_gate), None if deterministic else (d_messages, d_source_gate),
        d_sorted,
    )  # fmt: skip
    if deterministic:
        walk.by_source(member_order(source, target, tables.messages.shape[1]), (d_messages, d_source_gate))
    d_coefficient = None
    if d_sorted is not None:
        d_coefficient = torch.empty_like(coefficient).index_copy_(0, by_target.member.long(), d_sorted.sum(0))
    return Gradients(
        Tables(d_messages, d_source_gate, d_target_gate, d_mean, d_mean_gate, d_weight, d_bias), d_coefficient
    )


class _Walk(NamedTuple):
    """The backward kernels over the sorted members."""

    grad: Tensor  # shape: [R, T, D], times K^{-1/2}
    tables: Tables
    coefficient: Tensor
    precision: str

    def by_target(
        self,
        order: MemberOrder,
        sums: tuple[Tensor, Tensor, Tensor],
        scattered: tuple[Tensor, Tensor] | None,
        d_sorted: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sum the rows of ``u``, ``b`` and ``c``; the gradients of ``W2`` and ``b2`` are returned.

        ``d_sorted`` receives the coefficients' gradient. Goes over the members in chunks, whose logits' gradients pass
        from one kernel to the other.
        """
        tiling, terms = TILINGS[self.precision], TERMS[self.precision]
        replicas, _, width = self.tables.messages.shape
        sources, targets = self.tables.messages.shape[1], self.grad.shape[1]
        members = self.coefficient.shape[0]
        tiles = triton.cdiv(members, tiling.tables.block_e)
        programs = _programs(self.tables, tiling.tables)
        chunks = triton.cdiv(replicas * members * terms * width, CHUNK_ELEMENTS)
        tiles_per_run = max(1, triton.cdiv(tiles, chunks * programs)) if members else 1
        runs = triton.cdiv(tiles, tiles_per_run)
        chunk_tiles = min(programs, runs) * tiles_per_run
        adders = min(_programs(self.tables, tiling.weight), max(1, chunk_tiles))
        d_weight = self.tables.weight.new_empty(replicas, adders, width, width)
        d_bias = self.tables.bias.new_empty(replicas, runs, width)
        if not members:
            d_weight.zero_()
        d_logit = self.grad.new_empty(
            replicas * chunk_tiles * tiling.tables.block_e * terms * width, dtype=torch.bfloat16
        )
        carries = [carry_for(out, runs) for out in sums]
        d_m, d_a = scattered or sums[:2]  # a kernel takes a pointer even where it writes nothing
        constants = _constants(self.tables, self.coefficient, self.precision)
        inputs = _inputs(self.tables, self.coefficient, order, self.precision)
        t = inputs[-1]
        for first_run in range(0, runs, programs):
            now = min(programs, runs - first_run)
            tables_backward[(now, replicas)](
                self.grad, *inputs, *order.sums,
                d_m, d_a, t if d_sorted is None else d_sorted, d_bias, d_logit,
                *sums, *carries, sources, targets, targets, members, tiles, first_run, runs, tiles_per_run,
                BLOCK_E=tiling.tables.block_e, BLOCK_H=triton.next_power_of_2(constants["HEADS"]), BY_SOURCE=False,
                SCATTER=scattered is not None, NEEDS_T=d_sorted is not None, **constants, **tiling.tables.options,
            )  # fmt: skip
            first_tile, held = first_run * tiles_per_run, now * tiles_per_run
            weight_backward[(adders, replicas)](
                *self.tables[1:3], self.tables.mean_gate, t, *order.sums[:3], d_weight, d_logit,
                sources, targets, members, first_tile, min(first_tile + held, tiles), held, triton.cdiv(held, adders),
                BLOCK_E=tiling.weight.block_e, **constants, **tiling.weight.options,
            )  # fmt: skip
        for out, carry in zip(sums, carries, strict=True):
            finish_rows(order, carry, out, tiles_per_run * tiling.tables.block_e)
        return d_weight.sum(1), d_bias.sum(1)

    def by_source(self, order: MemberOrder, sums: tuple[Tensor, Tensor]) -> None:
        """Sum the rows of ``m`` and ``a``."""
        tiling = TILINGS[self.precision].tables
        replicas, sources, _ = self.tables.messages.shape
        members = self.coefficient.shape[0]
        tiles = triton.cdiv(members, tiling.block_e)
        tiles_per_run = max(1, triton.cdiv(tiles, _programs(self.tables, tiling)))
        runs = triton.cdiv(tiles, tiles_per_run)
        carries = [carry_for(out, runs) for out in sums]
        constants = _constants(self.tables, self.coefficient, self.precision)
        if members:
            tables_backward[(runs, replicas)](
                self.grad, *_inputs(self.tables, self.coefficient, order, self.precision), *order.sums,
                *sums, *[self.coefficient] * 3, *sums, sums[0], *carries, carries[0],  # those it writes nothing to
                sources, self.grad.shape[1], sources, members, tiles, 0, runs, tiles_per_run,
                BLOCK_E=tiling.block_e, BLOCK_H=triton.next_power_of_2(constants["HEADS"]),
                BY_SOURCE=True, SCATTER=False, NEEDS_T=False, **constants, **tiling.options,
            )  # fmt: skip
        for out, carry in zip(sums, carries, strict=True):
            finish_rows(order, carry, out, tiles_per_run * tiling.block_e)


def _inputs(tables: Tables, coefficient: Tensor, order: MemberOrder, precision: str) -> tuple[Tensor, ...]:
    """The tables with ``W2`` in bf16 terms, and the coefficients in the order of the walk: one gather less a tile."""
    terms = TERMS[precision]
    weight = tables.weight.new_empty(terms, *tables.weight.shape, dtype=torch.bfloat16)
    numel = tables.weight.numel()
    weight_terms[(triton.cdiv(numel, 1024),)](tables.weight, weight, numel, BLOCK=1024, TERMS=terms)
    return *tables._replace(weight=weight), coefficient.index_select(0, order.member)


def _programs(tables: Tables, tiling: Tiling) -> int:
    """Programs of one replica."""
    return triton.cdiv(num_programs(tables.messages.device, tiling.programs), tables.messages.shape[0])


def _constants(tables: Tables, coefficient: Tensor, precision: str) -> dict[str, int]:
    """The compile-time arguments that every kernel has."""
    width = tables.messages.shape[2]
    largest = max(tables.messages[0].numel(), tables.mean_gate[0].numel(), coefficient.numel())
    return {
        "WIDTH": width,
        "HEADS": coefficient.shape[1],
        "BLOCK_W": max(16, triton.next_power_of_2(width)),
        "TERMS": TERMS[precision],
        "LONG": largest >= 1 << 31,
    }
