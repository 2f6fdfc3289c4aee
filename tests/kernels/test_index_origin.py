"""Sorted members in compiled graphs: an index that took another one's memory is told apart, a given one is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from nsr.kernels.index_origin import index_origin

PROGRAM = Path(__file__).with_name("compiled_indices.py")


def test_indices_of_a_compiled_graph() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found["error"] < 1e-6, "the second index was taken for the first"
    assert found["error in place"] < 1e-6, "a write was not noticed"
    assert found["orders of a given index"] == 1, "sorted once, however many layers and calls"


def test_outside_a_graph_the_storage_tells() -> None:
    assert index_origin(torch.arange(3), torch.arange(3)) == 0
