"""The fused kernels, interpreted and on a GPU, against the plain twin in fp64: the result and every gradient."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.printed import printed

# Relative to the fp64 twin. One bf16 term has 8 bits, two have 16, three 24; the residual, its product with the gate
# and the sum are fp32. The gradient of a bf16 table is rounded to bf16.
BOUNDS = {"tf32": 3e-5, "bf16": 3e-2, "wide, bf16": 3e-2, "long rows, bf16": 3e-2, "width 128, bf16": 3e-2}
BF16_TABLES = ("bf16 tables", "bf16 tables, columns", "bf16 tables, deterministic", "bf16 tables, wide")
BOUNDS |= dict.fromkeys(BF16_TABLES, 5e-3)
CASES = (
    "empty rows",
    "one member a row",
    "one row has all",
    "whole tiles",
    "no members",
    "replicas",
    "replicas, deterministic",
    "heads, replicas",
    "heads, replicas, deterministic",
    "long rows",
    "long rows, bf16",
    "columns",
    "columns, replicas",
    *BF16_TABLES,
    "width 128",
    "width 128, bf16",
    "chunks",
    "chunks, replicas",
    "short runs",
    "short runs, replicas",
    "wide",
    "wide, deterministic",
    "wide, replicas",
    "tf32",
    "bf16",
    "wide, bf16",
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def errors(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    return printed("fused_on_cpu.py", request.param)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_twin(errors: dict[str, dict[str, float]], case: str) -> None:
    assert set(errors) == set(CASES)
    bound = BOUNDS.get(case, 5e-6)
    assert all(error <= bound for error in errors[case].values()), errors[case]


@pytest.mark.parametrize("case", BF16_TABLES)
def test_bf16_tables_are_read_exactly(errors: dict[str, dict[str, float]], case: str) -> None:
    """Only their own gradients are rounded."""
    exact = ("out", "mean", "weight", "bias")
    assert all(errors[case][name] <= 1e-5 for name in exact), errors[case]


def test_narrow_products_are_narrower(errors: dict[str, dict[str, float]]) -> None:
    assert errors["bf16"]["out"] > 100 * errors["tf32"]["out"]


def test_interpreter_still_multiplies_bit_patterns(tmp_path: Path) -> None:
    """When this fails, the detour of ``nsr.kernels.tiles.dot`` is no longer needed."""
    program = """
import torch, triton, triton.language as tl
@triton.jit
def square(x_ptr, out_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at).to(tl.bfloat16)
    tl.store(out_ptr + at, tl.dot(x, x))
x, out = torch.ones(16, 16), torch.empty(16, 16)
square[(1,)](x, out)
print(float(out[0, 0]))
"""
    file = tmp_path / "square.py"
    file.write_text(program)
    run = subprocess.run(
        [sys.executable, str(file)], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert float(run.stdout) != 16.0
