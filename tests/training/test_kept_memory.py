"""Blocks that are taken and freed again and again cost page faults once."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

PROGRAM = """
import resource, sys
import torch
from nsr.training.kept_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    print("unsupported"); sys.exit()
for _ in range(5):
    torch.ones(16, 1 << 20).sum()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(16, 1 << 20).sum()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(find_spec("resource") is None, reason="page faults are counted on Unix alone")
def test_blocks_of_megabytes_are_not_mapped_anew() -> None:
    faults = {}
    for how in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        if done.stdout.strip() == "unsupported":
            pytest.skip("not glibc")
        faults[how] = int(done.stdout)
    # Now and then a block finds its old place taken and begins a new one, which is then kept as well.
    assert faults["keep"] < faults["default"] / 4
