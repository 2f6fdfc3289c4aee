"""The small kernels around the fused sums, interpreted and on a GPU, each against a line of plain PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("small_on_cpu.py")
CASES = (
    *("1 and 256 parts", "132 and 396 parts", "300 and 1 parts"),
    *("weights", "transposed weights", "sorted coefficients", "zeros", "behind the zeros", "without members"),
    *("runs of 7", "runs of 64"),
    *(f"{rows} rows, {heads} heads" for rows in ("short", "long", "uneven") for heads in (1, 3)),
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def errors(request: pytest.FixtureRequest) -> dict[str, float]:
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if request.param == "cpu" else {}
    command = [sys.executable, str(PROGRAM), request.param]
    run = subprocess.run(command, env=os.environ | interpreted, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_plain(errors: dict[str, float], case: str) -> None:
    assert set(errors) == set(CASES)
    assert errors[case] <= 1e-6
