"""What every fused kernel needs to be launched: how many programs, room for the carry, and its addition."""

from functools import cache

import torch
import triton
from torch import Tensor

from nsr.kernels.member_order import MemberOrder
from nsr.kernels.row_runs import add_carry


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


def finish_rows(order: MemberOrder, carry: Tensor, out: Tensor, members_per_run: int) -> None:
    """Add the carry of each run to the rows of ``out`` that cross its borders."""
    replicas, rows = out.shape[:2]
    runs = carry.shape[1]
    if runs < 2:
        return
    width = out[0, 0].numel()
    block = min(256, triton.next_power_of_2(width))
    add_carry[(runs, triton.cdiv(width, block), replicas)](
        order.row, order.start, carry, out, rows, runs, members_per_run, order.row.shape[0], width,
        BLOCK_W=block, num_warps=1,
    )  # fmt: skip
