"""Compiled graphs that compute indices of their own, on the interpreted kernels: prints what goes wrong, as JSON.

A program of its own, because Triton decides when a kernel is defined whether it is interpreted.
"""

import json

import torch
from torch import Tensor

from nsr.kernels import member_order, segment_sum, unit_coefficient

ROWS, MEMBERS = 20, 64


def two_indices(x: Tensor, source: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The second index comes when the first is no longer needed, and takes its memory."""
    t = torch.ones(MEMBERS, 1)
    target = (first * 3 + 1) % ROWS
    y = segment_sum(x, source, target, unit_coefficient(t, source, target, ROWS, fused=True), ROWS, fused=True)
    target = (second * 7 + 2) % ROWS + (y.sum() * 0).long()
    return y + segment_sum(x, source, target, unit_coefficient(t, source, target, ROWS, fused=True), ROWS, fused=True)


def written_to(x: Tensor, source: Tensor, first: Tensor) -> Tensor:
    """The index is changed in place between two uses, once as a whole and once in part."""
    t = torch.ones(MEMBERS, 1)
    target = (first * 3 + 1) % ROWS
    y = segment_sum(x, source, target, t, ROWS, fused=True)
    target.add_(5 + (y.sum() * 0).long()).remainder_(ROWS)
    y = y + segment_sum(y, source, target, t, ROWS, fused=True)
    target[:7] = (y.sum() * 0).long()
    return y + segment_sum(y, source, target, t, ROWS, fused=True)


def given(x: Tensor, edge_index: Tensor) -> Tensor:
    """The same index in two layers, each taking its rows apart."""
    for _ in range(2):
        source, target = edge_index
        x = segment_sum(x, source, target, torch.ones(MEMBERS, 1), ROWS, fused=True)
    return x


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 16)
    source, first, second = torch.randint(0, ROWS, (3, MEMBERS))
    with torch.no_grad():
        expected = two_indices(x, source, first, second)
        run = torch.compile(two_indices, fullgraph=True)
        error = max(float((run(x, source, first, second) - expected).abs().max()) for _ in range(2))
        expected = written_to(x, source, first)
        run = torch.compile(written_to, fullgraph=True)
        in_place = max(float((run(x, source, first) - expected).abs().max()) for _ in range(2))
        edge_index = torch.stack([source, first])
        run = torch.compile(given, fullgraph=True)
        member_order._cache.clear()
        for _ in range(3):
            run(x, edge_index)
    print(json.dumps({"error": error, "error in place": in_place, "orders of a given index": len(member_order._cache)}))


if __name__ == "__main__":
    main()
