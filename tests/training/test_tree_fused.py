"""The tree's kernels, interpreted on the CPU, against plain operators: loss, gradients, logits, statistics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("trees_on_cpu.py")
CASES = [f"{b} {v} 16" for b in ("gcn", "sage", "gin") for v in ("original", "nsr")] + [
    "gcn nsr 32",
    "adam 0.0",
    "adam 0.1",
]


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_twin(errors: dict[str, float], case: str) -> None:
    assert set(errors) == set(CASES)
    assert errors[case] <= 5e-6
