"""Launching the fused kernels of the gated residual sum for widths beyond 128: orders, buffers, tile sizes."""

from typing import NamedTuple

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.gated_sum_tables import Gradients, Tables
from nsr.kernels.gated_sum_wide_kernels import hidden_backward, logit_backward, sum_forward, weight_backward
from nsr.kernels.launch import Sums, carry_for, finish_rows, num_programs
from nsr.kernels.member_order import MemberOrder, member_order


class Tiling(NamedTuple):
    """Sizes of one kernel's tiles and what it takes of the chip."""

    block_e: int  # members a tile
    block_d: int  # channels of a sum; wider layers take several blocks
    block_k: int  # channels of a step of the product
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor

    def constants(self, width: int, heads: int, terms: int) -> dict[str, int]:
        """The compile-time arguments that every kernel has."""
        full = next_power_of_2(width)
        sizes = {"BLOCK_E": self.block_e, "BLOCK_D": min(self.block_d, full), "BLOCK_K": min(self.block_k, full)}
        chip = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {"WIDTH": width, "HEADS": heads, "TERMS": terms, **sizes, **chip}


class Tilings(NamedTuple):
    """The tiles of each kernel. Those of the backward pass have the same members: they share carries."""

    forward: Tiling
    logit: Tiling
    hidden: Tiling
    weight: Tiling


# Chosen by a sweep of an earlier version on an H200 at width 128; to be swept again for this one.
# More bf16 terms of W2 on chip leave room for fewer programs.
_LARGE = Tiling(block_e=128, block_d=128, block_k=64, num_warps=8, num_stages=1, programs=1)
_SMALL = Tiling(block_e=64, block_d=128, block_k=64, num_warps=4, num_stages=1, programs=2)
TILINGS = {
    "fp32": Tilings(_LARGE, _LARGE, _LARGE, _LARGE._replace(block_k=128)),
    "tf32": Tilings(_LARGE, _LARGE, _LARGE, _LARGE._replace(block_k=128)),
    "bf16": Tilings(_SMALL, _SMALL, _SMALL, _SMALL._replace(block_k=128, num_warps=8)),
}
TERMS = {"bf16": 1, "tf32": 2, "fp32": 3}  # bf16 terms of each factor of the product: 8, 16 and 24 bits
CHUNK_ELEMENTS = 1 << 25  # of the logits' gradients between the backward kernels: 128 MB


class _Rows(NamedTuple):
    """Gradients that are sums over rows, or their carries, by the table they belong to."""

    messages: Tensor
    source_gate: Tensor
    target_gate: Tensor
    mean: Tensor
    mean_gate: Tensor


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, precision: str) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`."""
    tables = tables.widened()
    tiling = TILINGS[precision].forward
    replicas, sources, width = tables.messages.shape
    targets, (members, heads) = tables.target_gate.shape[1], coefficient.shape
    order = member_order(target, source, targets)
    out = torch.empty_like(tables.target_gate)
    tiles = cdiv(members, tiling.block_e)
    carry = carry_for(out, tiles)
    if tiles:
        constants = tiling.constants(width, heads, TERMS[precision])
        run = cdiv(tiles, num_programs(out.device, tiling.programs))
        sum_forward[(cdiv(tiles, run), cdiv(width, constants["BLOCK_D"]), replicas)](
            *tables, coefficient, *order.walk, order.scale, out, carry,
            sources, targets, members, tiles, run, **constants,
        )  # fmt: skip
    finish_rows(order, Sums(out, carry, tiling.block_e))
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
    tables = tables.widened()
    messages = tables.messages
    rows = _Rows(*map(torch.zeros_like, tables[:5]))
    d_coefficient = coefficient.new_zeros(grad.shape[0], *coefficient.shape) if needs_coefficient else None
    by_target = member_order(target, source, grad.shape[1])
    rest = (rows, d_coefficient, precision, deterministic)
    d_weight, d_bias = _pass(grad, tables, coefficient, by_target, by_target.scale, False, *rest)
    if deterministic:
        by_source = member_order(source, target, messages.shape[1])
        _pass(grad, tables, coefficient, by_source, by_target.scale, True, *rest)
    return Gradients(Tables(*rows, d_weight, d_bias), None if d_coefficient is None else d_coefficient.sum(0))


def _pass(
    grad: Tensor,
    tables: Tables,
    coefficient: Tensor,
    order: MemberOrder,
    scale: Tensor,
    by_source: bool,
    rows: _Rows,
    d_coefficient: Tensor | None,
    precision: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """One walk over the sorted members, a chunk at a time; sums the rows of the side that they are sorted by.

    Returns the weights' gradients of a walk by target, where they are made.
    """
    messages, source_gate, target_gate, _, mean_gate, weight, bias = tables
    replicas, sources, width = messages.shape
    targets, (members, heads) = grad.shape[1], coefficient.shape
    tilings = TILINGS[precision][1:]
    block_e = tilings[0].block_e
    tiles = cdiv(members, block_e)
    chunk_tiles = max(1, min(tiles, CHUNK_ELEMENTS // (replicas * width * block_e)))
    chunk = chunk_tiles * block_e
    d_logit = grad.new_empty(replicas, chunk, width)
    carries = _Rows(*(carry_for(out, tiles) for out in rows))
    flags = {
        "BY_SOURCE": by_source,
        "SCATTER_SOURCE": not (deterministic or by_source),
        "NEEDS_T": d_coefficient is not None and not by_source,
    }
    logit, hidden, summed = (tiling.constants(width, heads, TERMS[precision]) for tiling in tilings)
    summed["BLOCK_N"] = summed.pop("BLOCK_D")
    blocks = cdiv(width, summed["BLOCK_N"]) * cdiv(width, summed["BLOCK_K"])
    logit_run, hidden_run, weight_run = (
        cdiv(chunk_tiles, num_programs(grad.device, tiling.programs)) for tiling in tilings
    )
    partials = cdiv(chunk_tiles, weight_run)
    d_weight = weight.new_zeros(replicas, partials, width, width)
    d_bias = bias.new_zeros(replicas, partials, width)
    d_t = d_bias if d_coefficient is None else d_coefficient  # a kernel takes a pointer even where it writes nothing
    for first in range(0, tiles, chunk_tiles):
        end = min(first + chunk_tiles, tiles)
        sizes = (sources, targets, members, tiles, first, end, chunk)
        logit_backward[(cdiv(end - first, logit_run), replicas)](
            grad, *tables, coefficient, *order.walk, scale,
            rows.messages, rows.mean, d_t, carries.messages, carries.mean, d_logit,
            *sizes, logit_run, **logit, **flags,
        )  # fmt: skip
        hidden_backward[(cdiv(end - first, hidden_run), replicas)](
            source_gate, target_gate, mean_gate, weight, coefficient, *order.walk,
            rows.source_gate, rows.target_gate, rows.mean_gate, d_t,
            carries.source_gate, carries.target_gate, carries.mean_gate, d_logit,
            *sizes, hidden_run, **hidden, **flags,
        )  # fmt: skip
        if not by_source:
            weight_backward[(partials, blocks, replicas)](
                source_gate, target_gate, mean_gate, coefficient, order.row, order.other, order.member,
                d_weight, d_bias, d_logit, sources, targets, members, first, end, chunk, weight_run, **summed,
            )  # fmt: skip
    side = slice(0, 2) if by_source else slice(2, 5)
    for out, carry in zip(rows[side], carries[side], strict=True):
        finish_rows(order, Sums(out, carry, block_e))
    return d_weight.sum(1), d_bias.sum(1)
