"""What a program of this folder prints about the kernels, interpreted on a CPU or compiled for a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed(program: str, device: str) -> Any:
    """The JSON of ``program DEVICE``; its own process, because Triton decides once whether kernels are interpreted."""
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    command = [sys.executable, str(Path(__file__).with_name(program)), device]
    run = subprocess.run(command, env=os.environ | interpreted, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)
