"""The sums over members in C++ against their plain twins in fp64: results and every gradient."""

import pytest
import torch

from kernels import fused_on_cpu
from nsr.kernels.native import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

CASES = {
    **fused_on_cpu.cases(),
    "width 80": fused_on_cpu.Case(torch.randint(0, 40, (150,)), 45, width=80),  # no whole number of tiles
    "more blocks than threads": fused_on_cpu.Case(torch.randint(0, 40, (1500,)), 45, width=32, heads=2),
}
# Heads that have no whole vectors each take the plain path.
NATIVE = {name: case for name, case in CASES.items() if case.width % (16 * case.heads) == 0}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", NATIVE)
def test_equal_to_the_plain_twin(name: str) -> None:
    torch.manual_seed(0)
    errors = fused_on_cpu.errors(NATIVE[name])
    rounded = ("messages", "source_gate", "target_gate", "mean_gate") if NATIVE[name].bf16_tables else ()
    assert all(error <= (5e-3 if key in rounded else 2e-6) for key, error in errors.items()), errors
