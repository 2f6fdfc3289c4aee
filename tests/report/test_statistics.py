"""Mean, spread and paired tests against known values."""

import random
import statistics as reference

import pytest
from scipy.stats import PermutationMethod, ttest_rel, wilcoxon

from nsr.report.statistics import mean, paired_differences, paired_test, sample_std, signed_rank

BEFORE = [0.90, 0.91, 0.89, 0.92, 0.90, 0.88, 0.91, 0.93, 0.90, 0.89]
AFTER = [0.92, 0.915, 0.91, 0.93, 0.925, 0.87, 0.94, 0.934, 0.927, 0.896]


def test_mean_and_spread() -> None:
    assert mean(BEFORE) == pytest.approx(reference.mean(BEFORE))
    assert sample_std(BEFORE) == pytest.approx(reference.stdev(BEFORE))
    assert sample_std([0.373] * 3) == 0.0


def test_tests_equal_scipys_on_the_pairs() -> None:
    found = paired_test([b - a for a, b in zip(BEFORE, AFTER, strict=True)])
    assert found is not None
    assert found.t_test == pytest.approx(ttest_rel(AFTER, BEFORE).pvalue)
    assert found.wilcoxon == pytest.approx(wilcoxon(AFTER, BEFORE).pvalue)
    assert "10 pairs" in str(found)


@pytest.mark.parametrize("count", [10, 12, 13])
@pytest.mark.parametrize("digits", [6, 1], ids=["without ties", "with ties and zeros"])
def test_signed_ranks_equal_scipys_count_over_sign_patterns(count: int, digits: int) -> None:
    draw = random.Random(count)
    values = [round(draw.gauss(0.1, 0.3), digits) for _ in range(count)]
    nonzero = [value for value in values if value]
    method = "exact" if digits == 6 else PermutationMethod(n_resamples=2**15)
    assert signed_rank(values) == pytest.approx(wilcoxon(nonzero, method=method).pvalue)


def test_many_signed_ranks_are_taken_as_normal() -> None:
    draw = random.Random(0)
    values = [draw.gauss(0.1, 0.3) for _ in range(80)]
    assert signed_rank(values) == pytest.approx(wilcoxon(values, method="asymptotic").pvalue)


def test_nine_pairs_are_no_test() -> None:
    assert paired_test([0.1] * 9) is None


def test_degenerate_differences() -> None:
    nothing, shift = paired_test([0.0] * 10), paired_test([0.5] * 10)
    assert nothing is not None
    assert nothing.t_test == nothing.wilcoxon == 1.0
    assert shift is not None
    assert shift.t_test == 0.0
    assert shift.wilcoxon < 0.01


def test_only_common_replicates_are_paired() -> None:
    assert paired_differences({"seed 0": 1.0, "seed 1": 2.0}, {"seed 1": 5.0, "seed 2": 9.0}) == [3.0]
