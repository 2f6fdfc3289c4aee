"""Launching the fused kernels of the gated residual sum for one head and widths up to 128: buffers, chunks, tiles."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.gated_sum_narrow_kernels import hidden_backward, logit_backward, sum_forward
from nsr.kernels.gated_sum_narrow_tiles import add_parts, prepare
from nsr.kernels.gated_sum_tables import Gradients, Tables
from nsr.kernels.launch import Sums, carry_for, finish_rows, num_programs
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
        return {
            "BLOCK_E": self.block_e,
            "num_warps": self.num_warps,
            "num_stages": 1,
            "maxnreg": self.registers,
        }


class Tilings(NamedTuple):
    """The tiles of each kernel."""

    forward: Tiling
    logit: Tiling
    hidden: Tiling


# A few programs a multiprocessor hide the gathers' latency: chosen by a sweep on an H200 at width 128 for one and two
# terms. For three there is room for one program, and its tiles are those that spill nothing.
TILINGS = {
    "fp32": Tilings(Tiling(32, 8, 1), Tiling(16, 8, 1), Tiling(16, 8, 1)),
    "tf32": Tilings(Tiling(32, 4, 2), Tiling(16, 8, 2, 128), Tiling(32, 8, 1)),
    "bf16": Tilings(Tiling(32, 4, 3, 168), Tiling(16, 4, 3, 168), Tiling(32, 8, 1)),
}
TERMS = {"bf16": 1, "tf32": 2, "fp32": 3}  # bf16 terms of each factor of the product: 8, 16 and 24 bits
FEWEST_TILES = 6  # of a run, where replicas are many: each reads all of W2 first
SHORT_ROW = 12  # members of a row on average, up to which one product sums many rows of a tile
CHUNK_ELEMENTS = 1 << 29  # of the logits' gradients between the backward kernels, in bf16: 1 GB
# Members of a run in fp32. Tensor cores cut what they add up instead of rounding it: over 8,000 members that puts W2's
# gradient 8e-5 off, over 512 of them 4e-6. What runs leave is added in fp32.
FP32_RUN = 512
# Of a program that adds up parts: numbers, a cache line of them, and parts that it reads at once, 32 a thread.
NUMBERS, PARTS = 32, 256
# Of a program that prepares: numbers that it gathers or converts, and zeros that it stores.
PREPARED, ZEROS = 512, 4096


class _Runs(NamedTuple):
    """How a kernel of the backward pass walks over the members: each program over a run of tiles of each chunk."""

    tiling: Tiling
    tiles_per_run: int
    total: int  # of all chunks
    at_once: int  # of one chunk: programs

    @property
    def members(self) -> int:
        """Of one run."""
        return self.tiles_per_run * self.tiling.block_e


class _Ready(NamedTuple):
    """See :func:`_prepare`."""

    weight: Tensor  # shape: [TERMS, R, D, D], bf16
    transposed: Tensor  # shape: [TERMS, R, D, D], bf16
    coefficient: Tensor  # shape: [E, 1], in the walk's order


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, precision: str) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`."""
    tiling = _tilings(tables, precision).forward
    replicas, sources, _ = tables.messages.shape
    targets, members = tables.target_gate.shape[1], coefficient.shape[0]
    order = member_order(target, source, targets)
    out = torch.empty_like(tables.mean)
    tiles = cdiv(members, tiling.block_e)
    tiles_per_run = max(1, cdiv(tiles, _programs(tables, members, tiling)))
    carry = carry_for(out, cdiv(tiles, tiles_per_run))
    if members:
        ready = _prepare(tables.weight, coefficient, order, precision)
        sum_forward[(carry.shape[1], replicas)](
            *tables._replace(weight=ready.weight), ready.coefficient, *order.sums, order.scale,
            out, carry, sources, targets, members, tiles, tiles_per_run, M_STRIDE=tables.messages.stride(1),
            **_constants(tables, precision, members, targets), **tiling.options,
        )  # fmt: skip
    finish_rows(order, Sums(out, carry, tiles_per_run * tiling.block_e))
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
    replicas, sources, _ = tables.messages.shape
    of_source = grad.new_empty(tables.messages.shape), grad.new_empty(tables.messages.shape)
    of_target = grad.new_empty(grad.shape), grad.new_empty(grad.shape), grad.new_empty(grad.shape)
    d_sorted = coefficient.new_empty(replicas, *coefficient.shape) if needs_coefficient else None
    by_target = member_order(target, source, grad.shape[1])
    scattered = None if deterministic else of_source
    rest = (grad, tables, coefficient, precision, by_target.scale)
    d_weight, d_bias = _walk(*rest, by_target, of_target, scattered, d_sorted, by_source=False)
    if deterministic:
        _walk(*rest, member_order(source, target, sources), of_source, None, None, by_source=True)
    d_coefficient = None
    if d_sorted is not None:
        d_coefficient = torch.empty_like(coefficient).index_copy_(0, by_target.member.long(), d_sorted.sum(0))
    d_mean, d_target_gate, d_mean_gate = of_target
    of_tables = Tables(*of_source, d_target_gate, d_mean, d_mean_gate.unsqueeze(2), d_weight, d_bias)
    return Gradients(of_tables, d_coefficient)


def _walk(
    grad: Tensor,
    tables: Tables,
    coefficient: Tensor,
    precision: str,
    scale: Tensor,
    order: MemberOrder,
    sums: tuple[Tensor, ...],
    scattered: tuple[Tensor, ...] | None,
    d_sorted: Tensor | None,
    by_source: bool,
) -> tuple[Tensor, Tensor]:
    """Both backward kernels over the sorted members, a chunk of them at a time.

    Args:
        grad, tables, coefficient, precision: As given.
        scale: ``K^{-1/2}`` of each target.
        order: By target, or by source.
        sums: Receive the sums over its rows: by target those of ``u``, ``b`` and ``c``, by source of ``m`` and ``a``.
        scattered: Receive the gradients of ``m`` and ``a`` by atomic addition, in a walk by target.
        d_sorted: Receives the coefficients' gradient in the walk's order.
        by_source: What ``order`` is sorted by.

    Returns:
        The gradients of ``W2`` and ``b2``, ``[R, D, D]`` and ``[R, D]``, which only a walk by target makes.
    """
    replicas, sources, width = tables.messages.shape
    targets, rows, members = grad.shape[1], sums[0].shape[1], coefficient.shape[0]
    tilings = _tilings(tables, precision)
    elements = replicas * TERMS[precision] * width
    most = CHUNK_ELEMENTS // elements
    if precision == "fp32" and not by_source:  # which makes no gradient of W2
        most = min(most, FP32_RUN * _programs(tables, members, tilings.hidden))
    chunk, by_logit, by_hidden = _plan(members, most, tables, tilings)
    d_logit = grad.new_empty(chunk * elements, dtype=torch.bfloat16)
    d_weight = tables.weight.new_empty(replicas, by_hidden.at_once, width, width)
    d_bias = tables.bias.new_empty(replicas, by_logit.total, width)
    carries = [carry_for(sums[0], by_logit.total), *(carry_for(out, by_hidden.total) for out in sums[1:])]
    ready = _prepare(tables.weight, coefficient, order, precision, scattered)
    inputs = (*tables._replace(weight=ready.weight), ready.coefficient)
    # A kernel takes a pointer even where it writes nothing.
    d_m, d_a = scattered or sums[:2]
    d_t = coefficient if d_sorted is None else d_sorted
    (sum_z, sum_x, sum_c), (carry_z, carry_x, carry_c) = ((*x, x[0])[:3] for x in (sums, carries))
    constants = _constants(tables, precision, members, rows) | {
        "BY_SOURCE": by_source,
        "SCATTER": scattered is not None,
        "NEEDS_T": d_sorted is not None,
    }

    def sizes(runs: _Runs, first_run: int) -> tuple[int, ...]:
        tiles = cdiv(members, runs.tiling.block_e)
        return sources, targets, rows, members, tiles, first_run, runs.total, runs.tiles_per_run, chunk

    for begin in range(0, members, chunk):
        first_run = begin // by_logit.members
        logit_backward[(min(by_logit.at_once, by_logit.total - first_run), replicas)](
            grad, *inputs, *order.sums, scale, d_m, d_t, d_bias, d_logit, sum_z, carry_z,
            *sizes(by_logit, first_run), M_STRIDE=tables.messages.stride(1), **constants, **by_logit.tiling.options,
        )  # fmt: skip
        first_run = begin // by_hidden.members
        hidden_backward[(min(by_hidden.at_once, by_hidden.total - first_run), replicas)](
            tables.source_gate, tables.target_gate, tables.mean_gate, ready.transposed,
            ready.coefficient, *order.sums, d_a, d_t, d_weight, d_logit, sum_x, sum_c, carry_x, carry_c,
            *sizes(by_hidden, first_run), **constants, **by_hidden.tiling.options,
        )  # fmt: skip
    lengths = (by_logit.members, by_hidden.members, by_hidden.members)
    finish_rows(order, *map(Sums, sums, carries, lengths))
    return (d_weight, d_bias) if by_source else _add_up(d_weight, d_bias)


def _add_up(d_weight: Tensor, d_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients from the programs' parts, ``[R, parts, D, D]`` and ``[R, parts, D]``."""
    replicas, parts, width, _ = d_weight.shape
    weight, bias = d_weight.new_empty(replicas, width, width), d_bias.new_empty(replicas, width)
    add_parts[(cdiv(width * width, NUMBERS) + cdiv(width, NUMBERS), replicas)](
        d_weight, d_bias, weight, bias, parts, d_bias.shape[1], WIDTH=width, BLOCK_P=PARTS, BLOCK=NUMBERS, num_warps=8
    )
    return weight, bias


def _plan(members: int, most: int, tables: Tables, tilings: Tilings) -> tuple[int, _Runs, _Runs]:
    """The members of a chunk, at most ``most`` of them where possible, and the runs of both backward kernels.

    Both work through a chunk before the next one begins. Where there are several, each program of either kernel has
    whole tiles of every chunk, so that all runs are of one length.
    """
    programs = [_programs(tables, members, tiling) for tiling in tilings[1:]]
    at_least = math.lcm(*(n * tiling.block_e for n, tiling in zip(programs, tilings[1:], strict=True)))
    chunk = max(1, members if members <= most else min(members, max(1, most // at_least) * at_least))

    def runs(tiling: Tiling, at_once: int) -> _Runs:
        tiles_per_run = cdiv(chunk, at_once * tiling.block_e)
        length = tiles_per_run * tiling.block_e
        return _Runs(tiling, tiles_per_run, cdiv(members, length), cdiv(min(chunk, members), length))

    return chunk, runs(tilings.logit, programs[0]), runs(tilings.hidden, programs[1])


def _prepare(
    weight: Tensor,
    coefficient: Tensor,
    order: MemberOrder,
    precision: str,
    cleared: tuple[Tensor, ...] | None = None,
) -> _Ready:
    """What the kernels read, and two tables set to 0 for their atomic sums, in one launch."""
    terms, numel, members = TERMS[precision], weight.numel(), coefficient.shape[0]
    as_is, transposed = weight.new_empty(2, terms, *weight.shape, dtype=torch.bfloat16)
    in_order = torch.empty_like(coefficient)
    first, second = cleared or (weight, weight)  # a kernel takes a pointer even where it writes nothing
    rows = first.shape[0] * first.shape[1] if cleared else 0
    width = weight.shape[-1]
    programs = cdiv(numel, PREPARED) + cdiv(members, PREPARED) + cdiv(rows * width, ZEROS)
    prepare[(programs,)](
        weight, as_is, transposed, coefficient, order.member, in_order, first, second, numel, members, rows,
        WIDTH=width, BLOCK=PREPARED, BLOCK_ZERO=ZEROS, TERMS=terms,
    )  # fmt: skip
    return _Ready(as_is, transposed, in_order)


def _tilings(tables: Tables, precision: str) -> Tilings:
    """The tiles of a precision, at widths up to 64 by twice as many programs of four warps where they have eight.

    Four warps make the 64 channels of a product. Eight would share its 16 members, and a Hopper product of 8 columns
    may read past its factor in shared memory, which Triton does not pad for it (triton-lang/triton#10629). Triton 3.6's
    died of an illegal access on an H200.
    """
    tilings = TILINGS[precision]
    if next_power_of_2(tables.messages.shape[2]) > 64:
        return tilings
    return Tilings(*(t._replace(num_warps=4, programs=2 * t.programs) if t.num_warps > 4 else t for t in tilings))


def _programs(tables: Tables, members: int, tiling: Tiling) -> int:
    """Programs of one replica.

    All that fit on the chip: replicas then come one after the other, and the rows that are gathered stay in its cache.
    Of a small graph only so many, a power of two, that each has a few tiles; but together the replicas fill the chip.
    """
    at_once = num_programs(tables.messages.device, tiling.programs)
    busy = members // (FEWEST_TILES * tiling.block_e)
    return max(
        cdiv(at_once, tables.messages.shape[0]),
        at_once if busy >= at_once else 1 << max(0, busy.bit_length() - 1),
    )


def _constants(tables: Tables, precision: str, members: int, rows: int) -> dict[str, int]:
    """The compile-time arguments that every kernel has."""
    width = tables.messages.shape[2]
    strided = (tables.messages, tables.source_gate, tables.target_gate)
    return {
        "WIDTH": width,
        "BLOCK_W": max(16, next_power_of_2(width)),
        "TERMS": TERMS[precision],
        "LONG": max(x.shape[1] * x.stride(1) for x in strided) >= 1 << 31,
        "SHORT_ROWS": members <= SHORT_ROW * rows,
        "A_STRIDE": tables.source_gate.stride(1),
        "B_STRIDE": tables.target_gate.stride(1),
    }
