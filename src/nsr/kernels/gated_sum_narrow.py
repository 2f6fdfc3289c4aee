"""Launching the fused kernels of the gated residual sum for one head and widths up to 128: buffers, chunks, tiles."""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsr.kernels.gated_sum_narrow_kernels import hidden_backward, logit_backward, sum_forward, weight_terms
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


# A few programs a multiprocessor hide the gathers' latency. Chosen by a sweep on an H200 at width 128.
_TWO_TERMS = Tilings(Tiling(32, 4, 2), Tiling(16, 8, 2, 128), Tiling(32, 8, 1))
TILINGS = {
    "fp32": _TWO_TERMS,
    "tf32": _TWO_TERMS,
    "bf16": Tilings(Tiling(32, 4, 3, 168), Tiling(16, 4, 3, 168), Tiling(32, 8, 1)),
}
# bf16 terms of each factor of the product. Two have 16 bits: more than TF32's 11, and within 1e-5 of fp64.
TERMS = {"bf16": 1, "tf32": 2, "fp32": 2}
FEWEST_TILES = 8  # of a run, where replicas are many: each reads all of W2 first
CHUNK_ELEMENTS = 1 << 29  # of the logits' gradients between the backward kernels, in bf16: 1 GB


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


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, precision: str) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`."""
    tiling = TILINGS[precision].forward
    replicas, sources, _ = tables.messages.shape
    targets, members = tables.target_gate.shape[1], coefficient.shape[0]
    order = member_order(target, source, targets)
    out = torch.zeros_like(tables.target_gate)
    tiles = triton.cdiv(members, tiling.block_e)
    tiles_per_run = max(1, triton.cdiv(tiles, _programs(tables, members, tiling)))
    carry = carry_for(out, triton.cdiv(tiles, tiles_per_run))
    if members:
        sum_forward[(carry.shape[1], replicas)](
            *_inputs(tables, coefficient, order, precision)[0], *order.sums, order.scale, out, carry,
            sources, targets, members, tiles, tiles_per_run,
            **_constants(tables, coefficient, precision), **tiling.options,
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
    replicas, sources, _ = tables.messages.shape
    of_source = torch.zeros_like(tables.messages), torch.zeros_like(tables.source_gate)
    of_target = tuple(map(torch.zeros_like, (tables.mean, tables.target_gate, tables.mean_gate)))
    d_sorted = coefficient.new_empty(replicas, *coefficient.shape) if needs_coefficient else None
    by_target = member_order(target, source, grad.shape[1])
    rest = (grad * by_target.scale.unsqueeze(1), tables, coefficient, precision)
    scattered = None if deterministic else of_source
    d_weight, d_bias = _walk(*rest, by_target, of_target, scattered, d_sorted, by_source=False)
    if deterministic:
        _walk(*rest, member_order(source, target, sources), of_source, None, None, by_source=True)
    d_coefficient = None
    if d_sorted is not None:
        d_coefficient = torch.empty_like(coefficient).index_copy_(0, by_target.member.long(), d_sorted.sum(0))
    d_mean, d_target_gate, d_mean_gate = of_target
    return Gradients(Tables(*of_source, d_target_gate, d_mean, d_mean_gate, d_weight, d_bias), d_coefficient)


def _walk(
    grad: Tensor,
    tables: Tables,
    coefficient: Tensor,
    precision: str,
    order: MemberOrder,
    sums: tuple[Tensor, ...],
    scattered: tuple[Tensor, ...] | None,
    d_sorted: Tensor | None,
    by_source: bool,
) -> tuple[Tensor, Tensor]:
    """Both backward kernels over the sorted members, a chunk of them at a time.

    Args:
        grad: Of the sum, times ``K^{-1/2}``.
        tables, coefficient, precision: As given.
        order: By target, or by source.
        sums: Receive the sums over its rows: by target those of ``u``, ``b`` and ``c``, by source of ``m`` and ``a``.
        scattered: Receive the gradients of ``m`` and ``a`` by atomic addition, in a walk by target.
        d_sorted: Receives the coefficients' gradient in the walk's order.
        by_source: What ``order`` is sorted by.

    Returns:
        The gradients of ``W2`` and ``b2``, which only a walk by target makes.
    """
    replicas, sources, width = tables.messages.shape
    targets, rows, members = grad.shape[1], sums[0].shape[1], coefficient.shape[0]
    elements = replicas * TERMS[precision] * width
    chunk, by_logit, by_hidden = _plan(members, CHUNK_ELEMENTS // elements, tables, TILINGS[precision])
    d_logit = grad.new_empty(chunk * elements, dtype=torch.bfloat16)
    d_weight = tables.weight.new_empty(replicas, by_hidden.at_once, width, width)
    d_bias = tables.bias.new_empty(replicas, by_logit.total, width)
    carries = [carry_for(sums[0], by_logit.total), *(carry_for(out, by_hidden.total) for out in sums[1:])]
    inputs, w = _inputs(tables, coefficient, order, precision)
    _, a, b, _, c, _, _, t = inputs
    # A kernel takes a pointer even where it writes nothing.
    d_m, d_a = scattered or sums[:2]
    d_t = t if d_sorted is None else d_sorted
    (sum_z, sum_x, sum_c), (carry_z, carry_x, carry_c) = ((*x, x[0])[:3] for x in (sums, carries))
    constants = _constants(tables, coefficient, precision) | {
        "BY_SOURCE": by_source,
        "SCATTER": scattered is not None,
        "NEEDS_T": d_sorted is not None,
    }

    def sizes(runs: _Runs, first_run: int) -> tuple[int, ...]:
        tiles = triton.cdiv(members, runs.tiling.block_e)
        return sources, targets, rows, members, tiles, first_run, runs.total, runs.tiles_per_run, chunk

    for begin in range(0, members, chunk):
        first_run = begin // by_logit.members
        logit_backward[(min(by_logit.at_once, by_logit.total - first_run), replicas)](
            grad, *inputs, *order.sums, d_m, d_t, d_bias, d_logit, sum_z, carry_z, *sizes(by_logit, first_run),
            **constants, **by_logit.tiling.options,
        )  # fmt: skip
        first_run = begin // by_hidden.members
        hidden_backward[(min(by_hidden.at_once, by_hidden.total - first_run), replicas)](
            a, b, c, w, t, *order.sums, d_a, d_t, d_weight, d_logit, sum_x, sum_c, carry_x, carry_c,
            *sizes(by_hidden, first_run), **constants, **by_hidden.tiling.options,
        )  # fmt: skip
    finish_rows(order, carries[0], sums[0], by_logit.members)
    for out, carry in zip(sums[1:], carries[1:], strict=True):
        finish_rows(order, carry, out, by_hidden.members)
    return d_weight.sum(1), d_bias.sum(1)


def _plan(members: int, most: int, tables: Tables, tilings: Tilings) -> tuple[int, _Runs, _Runs]:
    """The members of a chunk, at most ``most`` of them where possible, and the runs of both backward kernels.

    Both work through a chunk before the next one begins. Where there are several, each program of either kernel has
    whole tiles of every chunk, so that all runs are of one length.
    """
    programs = [_programs(tables, members, tiling) for tiling in tilings[1:]]
    at_least = math.lcm(*(n * tiling.block_e for n, tiling in zip(programs, tilings[1:], strict=True)))
    chunk = max(1, members if members <= most else min(members, max(1, most // at_least) * at_least))

    def runs(tiling: Tiling, at_once: int) -> _Runs:
        tiles_per_run = triton.cdiv(chunk, at_once * tiling.block_e)
        length = tiles_per_run * tiling.block_e
        return _Runs(tiling, tiles_per_run, triton.cdiv(members, length), triton.cdiv(min(chunk, members), length))

    return chunk, runs(tilings.logit, programs[0]), runs(tilings.hidden, programs[1])


def _inputs(
    tables: Tables, coefficient: Tensor, order: MemberOrder, precision: str
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What the kernels read: tables with ``W2`` in bf16 terms, coefficients in the walk's order; ``W2`` transposed.

    Sorted coefficients are one gather less to wait for in every tile.
    """
    terms, numel = TERMS[precision], tables.weight.numel()
    weight, transposed = tables.weight.new_empty(2, terms, *tables.weight.shape, dtype=torch.bfloat16)
    weight_terms[(triton.cdiv(numel, 1024),)](
        tables.weight, weight, transposed, numel, WIDTH=tables.weight.shape[-1], BLOCK=1024, TERMS=terms
    )  # fmt: skip
    return (*tables._replace(weight=weight), coefficient.index_select(0, order.member)), transposed


def _programs(tables: Tables, members: int, tiling: Tiling) -> int:
    """Programs of one replica.

    All that fit on the chip: replicas then come one after the other, and the rows that are gathered stay in its cache.
    Of a small graph only so many, a power of two, that each has a few tiles; but together the replicas fill the chip.
    """
    at_once = num_programs(tables.messages.device, tiling.programs)
    busy = members // (FEWEST_TILES * tiling.block_e)
    return max(
        triton.cdiv(at_once, tables.messages.shape[0]),
        at_once if busy >= at_once else 1 << max(0, busy.bit_length() - 1),
    )


def _constants(tables: Tables, coefficient: Tensor, precision: str) -> dict[str, int]:
    """The compile-time arguments that every kernel has."""
    width = tables.messages.shape[2]
    largest = max(tables.messages[0].numel(), tables.mean_gate[0].numel(), coefficient.numel())
    return {
        "WIDTH": width,
        "BLOCK_W": max(16, triton.next_power_of_2(width)),
        "TERMS": TERMS[precision],
        "LONG": largest >= 1 << 31,
    }
