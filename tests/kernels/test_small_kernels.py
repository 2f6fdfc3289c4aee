"""The small kernels around the fused sums, interpreted and on a GPU, each against a line of plain PyTorch."""

import pytest

from kernels.printed import printed

CASES = (
    *("1 and 256 parts", "132 and 396 parts", "300 and 1 parts"),
    *("weights", "transposed weights", "sorted coefficients", "zeros", "behind the zeros", "without members"),
    *("runs of 7", "runs of 64"),
    *(f"{rows} rows, {heads} heads" for rows in ("short", "long", "uneven") for heads in (1, 3)),
)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def errors(request: pytest.FixtureRequest) -> dict[str, float]:
    return printed("small_on_cpu.py", request.param)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_plain(errors: dict[str, float], case: str) -> None:
    assert set(errors) == set(CASES)
    assert errors[case] <= 1e-6
