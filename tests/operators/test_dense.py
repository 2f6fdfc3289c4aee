import pytest
import torch

import nsr
from contracts.operator import Case, OperatorContract


class TestPseudoInverse(OperatorContract):
    def case(self, dtype: torch.dtype) -> Case:
        matrix = torch.randn(4, 7, dtype=dtype)
        return Case(nsr.Dense(matrix), matrix, torch.randn(7, 3, dtype=dtype))


class TestRankDeficient(OperatorContract):
    """A lift exists for every matrix, also one whose rows repeat."""

    def case(self, dtype: torch.dtype) -> Case:
        rows = torch.randn(2, 6, dtype=dtype)
        matrix = torch.stack([rows[0], rows[1], rows[0] + rows[1]])
        return Case(nsr.Dense(matrix), matrix, torch.randn(6, 2, dtype=dtype))


class TestExplicitLift(OperatorContract):
    """Averaging lifted by copying: a projection that is not orthogonal."""

    def case(self, dtype: torch.dtype) -> Case:
        matrix = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=dtype)
        lifting = (matrix != 0).to(dtype).mT
        return Case(nsr.Dense(matrix, lifting), matrix, torch.randn(4, 3, dtype=dtype))


class TestBatch(OperatorContract):
    def case(self, dtype: torch.dtype) -> Case:
        matrix = torch.randn(2, 3, 5, dtype=dtype)
        return Case(nsr.Dense(matrix), matrix, torch.randn(2, 5, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3),), "expected \\[G, N\\]"),
        ((torch.tensor([[1.0, float("inf")]]),), "non-finite"),
        ((torch.ones(1, 2, dtype=torch.long),), "floating point"),
        ((torch.ones(1, 2), torch.ones(1, 2)), "that of A\\^T"),
        ((torch.ones(1, 2), torch.ones(2, 1)), "no lift"),
        ((torch.ones(1, 2), torch.ones(2, 1, device="meta")), "non-finite|Mixed devices|meta"),
    ],
)
def test_bad_input_is_refused_with_the_reason(arguments: tuple, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        nsr.Dense(*arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_checks_run_in_half_precision(dtype: torch.dtype) -> None:
    matrix, x = torch.rand(3, 7), torch.randn(7, 4)
    assert nsr.check(nsr.Dense(matrix.to(dtype)), x.to(dtype)).null_rank == 4
