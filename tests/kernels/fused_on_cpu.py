"""Run the fused kernels under Triton's interpreter and print how far they are from the plain twin in fp64, as JSON.

A program of its own, because Triton decides when a kernel is defined whether it is interpreted:
``TRITON_INTERPRET=1 python fused_on_cpu.py``. ``python fused_on_cpu.py cuda`` runs the same as compiled for a GPU.
"""

import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.kernels import (
    gated_residual_sum,
    gated_sum_narrow,
    gated_sum_wide,
    path_for,
    segment_sum,
    unit_coefficient,
)

NAMES = ("messages", "source_gate", "target_gate", "mean", "mean_gate", "weight", "bias", "coefficient")


@dataclass
class Case:
    target: Tensor
    rows: int
    sources: int = 7
    width: int = 16
    heads: int = 1
    replicas: int = 0
    precision: str = "fp32"
    deterministic: bool = False
    free_mean: bool = False  # any direction in place of the members' own, which leaves a single member no residual
    wide: bool = False  # by the kernels for wide layers, with blocks so small that this layer takes several
    short_runs: bool = False  # of a tile, as fp32 has them where there are many members
    chunked: bool = False  # the backward pass in chunks as small as they get
    bf16_tables: bool = False  # m, a, b and c in bf16, as products leave them under autocast
    columns: bool = False  # m and a as columns of one table


def cases() -> dict[str, Case]:
    """Fresh random graphs; members do not come sorted, and 150 is no multiple of a tile."""
    some = torch.randint(0, 40, (150,))
    return {
        "empty rows": Case(some.where(some < 25, 3), 45),
        "one member a row": Case(torch.randperm(90), 90, free_mean=True),
        "one row has all": Case(torch.full((150,), 2), 5),
        "whole tiles": Case(torch.arange(128) // 32, 4, deterministic=True),
        "no members": Case(torch.empty(0, dtype=torch.int64), 3, deterministic=True),
        "replicas": Case(some[:100], 40, width=48, replicas=2),
        "replicas, deterministic": Case(some[:100], 40, width=48, replicas=2, deterministic=True),
        "heads, replicas": Case(some[:100], 40, width=48, heads=3, replicas=2),
        "heads, replicas, deterministic": Case(some[:100], 40, width=48, heads=3, replicas=2, deterministic=True),
        "long rows": Case(some % 8, 9, deterministic=True),
        "long rows, bf16": Case(some % 8, 9, precision="bf16"),
        "columns": Case(some, 40, columns=True),
        "columns, replicas": Case(some[:100], 40, replicas=2, columns=True),
        "bf16 tables": Case(some, 45, bf16_tables=True),
        "bf16 tables, columns": Case(some[:100], 45, width=48, replicas=2, bf16_tables=True, columns=True),
        "bf16 tables, deterministic": Case(some[:100], 45, bf16_tables=True, columns=True, deterministic=True),
        "bf16 tables, wide": Case(some[:100], 45, bf16_tables=True, columns=True, wide=True),
        "width 128": Case(some, 45, width=128),
        "width 128, bf16": Case(some, 45, width=128, precision="bf16", bf16_tables=True, columns=True),
        "chunks": Case(some, 40, chunked=True),
        "chunks, replicas": Case(some, 40, replicas=2, chunked=True),
        "short runs": Case(torch.randint(0, 40, (400,)), 40, short_runs=True),
        "short runs, replicas": Case(torch.randint(0, 40, (200,)), 40, replicas=2, short_runs=True),
        "wide": Case(some, 40, width=48, wide=True, chunked=True),
        "wide, deterministic": Case(some[:100], 40, width=48, heads=2, deterministic=True, wide=True, chunked=True),
        "wide, replicas": Case(some[:100], 40, width=48, heads=3, replicas=2, wide=True),
        "tf32": Case(some, 40, precision="tf32"),
        "bf16": Case(some, 40, precision="bf16"),
        "wide, bf16": Case(some, 40, precision="bf16", wide=True),
    }


def errors(case: Case) -> dict[str, float]:
    """Relative errors of the result and of each gradient, the direction computed inside."""
    lead = (case.replicas,) if case.replicas else ()
    members, width, heads = case.target.shape[0], case.width, case.heads
    shapes = ((case.sources, width), (case.sources, width), (case.rows, width), (case.rows, heads, width))
    drawn = [torch.randn(*lead, *shape) for shape in shapes]
    drawn += [torch.randn(*lead, width, width) / width**0.5, torch.randn(*lead, width) - 2]
    if case.bf16_tables:
        drawn[:4] = [x.bfloat16().float() for x in drawn[:4]]
    free_mean = torch.randn(*lead, case.rows, width)
    source = torch.randint(0, case.sources, (members,))
    coefficient, weights = torch.randn(members, heads), torch.randn(*lead, case.rows, width)
    if members:
        coefficient[case.target == case.target[0]] = 0  # a row that the projection leaves as it is

    def run(dtype: torch.dtype, **options: object) -> list[Tensor]:
        tables = [x.to(dtype, copy=True).requires_grad_() for x in drawn]
        t = coefficient.to(dtype, copy=True).requires_grad_()
        fused = options["fused"]
        if fused and case.bf16_tables:
            tables[:4] = [x.detach().bfloat16().requires_grad_() for x in tables[:4]]
        if fused and case.columns:
            tables[:2] = torch.cat([x.detach() for x in tables[:2]], -1).requires_grad_().split(width, -1)
            for x in tables[:2]:
                x.retain_grad()
        if case.free_mean:
            unit, mean = t, free_mean.to(dtype, copy=True).requires_grad_()
        else:
            unit = unit_coefficient(t, source, case.target, case.rows, fused=None if fused else False)
            mean = segment_sum(tables[0], source, case.target, unit, case.rows, fused=fused)
        mean.retain_grad()
        arguments = (*tables[:3], mean, *tables[3:])
        out = gated_residual_sum(*arguments, source, case.target, unit, **options)
        (out * weights.to(dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in arguments), t.grad]

    assert path_for(drawn[0], coefficient, fused=True).startswith("fused")
    fast = run(torch.float32, fused=True, precision=case.precision, deterministic=case.deterministic)
    exact = run(torch.float64, fused=False)
    return {
        name: float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
        for name, a, b in zip(("out", *NAMES), fast, exact, strict=True)
    }


def main() -> None:
    torch.set_default_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    torch.manual_seed(0)
    results = {}
    for precision, kernels in gated_sum_wide.TILINGS.items():
        # four warps, because eight would make products of 8 columns, see gated_sum_narrow.py
        small = (kernel._replace(block_e=64, block_d=32, block_k=16, num_warps=4) for kernel in kernels)
        gated_sum_wide.TILINGS[precision] = gated_sum_wide.Tilings(*small)
    for name, case in cases().items():
        gated_sum_narrow.MAX_WIDTH = 0 if case.wide else 128
        gated_sum_narrow.FP32_RUN = 16 if case.short_runs else 512
        gated_sum_narrow.CHUNK_ELEMENTS = gated_sum_wide.CHUNK_ELEMENTS = 1 if case.chunked else 1 << 25
        results[name] = errors(case)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
