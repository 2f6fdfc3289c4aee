"""The tree's kernels against plain operators: loss, every gradient, logits and statistics, interpreted and on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("trees_compared.py")
CASES = (
    "gcn",
    "gcn + nsr",
    "sage",
    "sage + nsr",
    "gin",
    "gin + nsr",
    "gcn + nsr, deep, whole trees",
    "gin + nsr, whole trees",
    "adam 0.0",
    "adam 0.1",
    "training",
    "training, single samples",
)


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_the_plain_twin(errors: dict[str, float], case: str) -> None:
    assert set(errors) == set(CASES)
    # Adam makes full steps of gradients that are 0 but for rounding: plain operators are 2.4e-3 from double precision.
    assert errors[case] <= (3e-2 if case == "training, single samples" else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [4, 5, 6])
@pytest.mark.parametrize("whole_trees", [False, True])
@pytest.mark.parametrize("backbone", ["gcn", "sage", "gin"])
def test_equal_on_a_gpu(backbone: str, whole_trees: bool, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the sizes of training: many programs at once, many pairs that read one row.

    A ReLU of GIN whose input is 0 but for rounding has one gradient or another: plain operators in single precision are
    then 1.8e-3 from those in double, at depth 6 on a CPU.
    """
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.set_float32_matmul_precision("highest")  # at rest torch computes the head and GIN's conv
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from trees_compared import Case, apart, kernels, plain, results

    case = Case(backbone, "nsr", width=32, depth=depth, trees=64, whole_trees=whole_trees)  # type: ignore[arg-type]
    error = apart(results(case, kernels, "cuda"), results(case, plain, "cuda", torch.float64))
    assert error <= (3e-3 if backbone == "gin" else 1e-3)
