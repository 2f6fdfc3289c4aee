"""What every fused kernel needs to be launched: how many programs, room for the carry, and the last step of a sum."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nsr.kernels.counts import cdiv, next_power_of_2
from nsr.kernels.member_order import MemberOrder
from nsr.kernels.row_runs import finish_tables

ROWS_AT_ONCE = 32  # whose emptiness one program looks at


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_programs(device: torch.device, per_multiprocessor: int) -> int:
    """Programs that walk over the tiles together; a handful under Triton's interpreter."""
    if device.type != "cuda":
        return 3
    return per_multiprocessor * _multiprocessors(device.index or 0)


def carry_for(out: Tensor, runs: int) -> Tensor:
    """Two partial rows a run for the rows of ``out``, ``[R, T, ...]``."""
    return out.new_empty(out.shape[0], runs, 2, *out.shape[2:])


class Sums(NamedTuple):
    """A table of sums over rows that a kernel has left unfinished: what crosses a run's border is in the carry."""

    out: Tensor  # shape: [R, rows, ...]
    carry: Tensor  # shape: [R, runs, 2, ...]
    members_per_run: int


def finish_rows(order: MemberOrder, *tables: Sums) -> None:
    """Add the carry of each run to the rows that cross its borders, and set rows without members to 0.

    Up to three tables of equal shape are one launch.
    """
    replicas, rows = tables[0].out.shape[:2]
    width = tables[0].out[0, 0].numel() if rows else 0
    if not width or not replicas:
        return
    most_runs = max(table.carry.shape[1] for table in tables)
    arguments = [(x.carry, x.out, x.carry.shape[1], x.members_per_run) for x in (*tables, tables[0], tables[0])[:3]]
    finish_tables[(most_runs + cdiv(rows, ROWS_AT_ONCE), len(tables), replicas)](
        order.row, order.start, *(part for table in arguments for part in table), most_runs, rows, order.row.shape[0],
        width, BLOCK_R=ROWS_AT_ONCE, BLOCK_W=min(256, next_power_of_2(width)), num_warps=1,
    )  # fmt: skip
