"""The kernels that segmenters are trained with equal their plain twins: through Triton's interpreter, and on a GPU."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("segmentation_kernel_checks.py")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_equal_their_plain_twins(device: str) -> None:
    pytest.importorskip("triton")
    seed = random.randrange(10_000)  # fresh inputs each time; the seed is in the message of a failure
    # torch 2.11 warns of itself when its compiler is imported
    own = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
    command = [sys.executable, "-W", "error", "-W", own, str(CHECKS), device, str(seed)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if device == "cpu" else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    assert len(done.stdout.split()) == 5
