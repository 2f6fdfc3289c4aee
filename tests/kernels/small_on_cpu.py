"""Run the small kernels around the fused sums and print how far each is from a line of plain PyTorch, as JSON.

A program of its own, as ``fused_on_cpu.py``: ``TRITON_INTERPRET=1 python small_on_cpu.py``, or with ``cuda`` on a GPU.
"""

import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from nsr.kernels import gated_sum_narrow, unit_coefficient
from nsr.kernels.launch import Sums, carry_for, finish_rows
from nsr.kernels.member_order import member_order


def off(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).norm() / expected.norm().clamp(min=1e-30))


def parts() -> Iterator[tuple[str, float]]:
    """Parts of ``W2`` and ``b2`` that fill a block, that do not, and that take several."""
    for of_weight, of_bias, width in ((1, 256, 16), (132, 396, 48), (300, 1, 32)):
        weight, bias = torch.randn(2, of_weight, width, width), torch.randn(2, of_bias, width)
        sums = gated_sum_narrow._add_up(weight, bias)
        name = f"{of_weight} and {of_bias} parts"
        yield name, max(off(sums[0], weight.double().sum(1)), off(sums[1], bias.double().sum(1)))


def prepared() -> Iterator[tuple[str, float]]:
    """Weights in terms, sorted coefficients and zeros, each of no whole number of blocks."""
    target = torch.randint(0, 300, (1300,))
    order = member_order(target, target, 300)
    weight, coefficient = torch.randn(3, 48, 48), torch.randn(1300, 1)
    tables = torch.ones(3, 70, 48), torch.ones(3, 70, 48)
    behind = torch.ones(2, 3 * 70 * 48 + 4096)  # what follows a table stays as it is
    cleared = tuple(row[: 3 * 70 * 48].view_as(table) for row, table in zip(behind, tables, strict=True))
    ready = gated_sum_narrow._prepare(weight, coefficient, order, "fp32", cleared)
    yield "weights", off(ready.weight.double().sum(0), weight)
    yield "transposed weights", off(ready.transposed.double().sum(0), weight.transpose(1, 2))
    yield "sorted coefficients", off(ready.coefficient, coefficient[order.member.long()])
    yield "zeros", float(behind[:, : 3 * 70 * 48].abs().max())
    yield "behind the zeros", float((behind[:, 3 * 70 * 48 :] - 1).abs().max())
    nothing = gated_sum_narrow._prepare(weight, coefficient[:0], order, "bf16")
    yield "without members", off(nothing.weight[0], weight.bfloat16())


def finished() -> Iterator[tuple[str, float]]:
    """Two tables with runs of their own: rows inside a run are there, the others are in the carry, or empty."""
    target, width, rows = torch.randint(0, 60, (700,)) // 7 * 7 + torch.randint(0, 2, (700,)), 16, 75
    target[:300] = 20  # over many runs
    order = member_order(target, target, rows)
    value = torch.randn(2, 700, width, dtype=torch.float64)  # of the sorted members
    expected = value.new_zeros(2, rows, width).index_add_(1, order.row.long(), value)
    tables = []
    for length in (7, 64):
        out = torch.full((2, rows, width), torch.nan)
        carry = carry_for(out, -(-700 // length)).fill_(torch.nan)
        for run in range(carry.shape[1]):
            begin, end = run * length, min((run + 1) * length, 700)
            for row in order.row[begin:end].unique().tolist():
                mine = value[:, begin:end][:, order.row[begin:end] == row].sum(1).float()
                first, last = int(order.start[row]) // length, (int(order.start[row + 1]) - 1) // length
                if first == last:
                    out[:, row] = mine
                else:
                    carry[:, run, int(run == first)] = mine
        tables.append(Sums(out, carry, length))
    finish_rows(order, *tables)
    for table in tables:
        yield f"runs of {table.members_per_run}", off(table.out, expected)


def units() -> Iterator[tuple[str, float]]:
    """Both directions, where rows are short, long and very uneven; some have no members."""
    targets = {
        "short": (torch.randint(0, 50, (120,)), 61),
        "long": (torch.randint(0, 3, (700,)), 4),
        "uneven": (torch.cat([torch.full((400,), 7), torch.randint(0, 200, (300,))]), 210),
    }
    for name, (target, rows) in targets.items():
        for heads in (1, 3):
            t, weights = torch.randn(len(target), heads), torch.randn(len(target), heads)
            t[target == target[-1]] = 0
            results = []
            for dtype, fused in ((torch.float32, True), (torch.float64, False)):
                mine = t.to(dtype, copy=True).requires_grad_()
                unit = unit_coefficient(mine, target, target, rows, fused=fused)
                results.append((unit, *torch.autograd.grad((unit * weights.to(dtype)).sum(), mine)))
            yield f"{name} rows, {heads} heads", max(off(a, b) for a, b in zip(*results, strict=True))


def main() -> None:
    torch.set_default_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    torch.manual_seed(0)
    print(json.dumps({name: error for cases in (parts, prepared, finished, units) for name, error in cases()}))


if __name__ == "__main__":
    main()
