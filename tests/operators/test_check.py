import pytest
import torch
import torch.nn.functional as F

import nsr


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2) + 0.1,
        lambda x: F.avg_pool2d(x, 2).relu(),
        lambda x: F.avg_pool2d(x.square(), 2),
    ],
    ids=["max", "bias", "relu", "square"],
)
def test_what_is_not_linear_is_named(fn: object) -> None:
    with pytest.raises(ValueError, match="not linear"):
        nsr.check(nsr.Function(fn, (8, 8)), torch.randn(2, 8, 8))


def test_a_lift_that_is_none_fails_the_check() -> None:
    wrong = nsr.Dense(torch.ones(1, 2), torch.ones(2, 1), validate=False)
    result = nsr.check(wrong, torch.randn(2, 3))
    assert not result.passed
    assert "DOES NOT HOLD" in str(result)


def test_non_finite_input_is_refused() -> None:
    op = nsr.Dense(torch.ones(1, 2))
    with pytest.raises(ValueError, match="1 non-finite of 2"):
        nsr.check(op, torch.tensor([[1.0], [float("nan")]]))


def test_numbers_and_table() -> None:
    result = nsr.check(nsr.Dense(torch.tensor([[0.5, 0.5]])), torch.tensor([[1.0], [-1.0]]))
    assert result.residual_share == pytest.approx(1.0)  # all of it is invisible
    assert result.null_rank == 1
    assert "|AZ|_inf" in str(result)
