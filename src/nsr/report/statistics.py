"""Mean, spread and two-sided paired tests over splits or seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, sqrt

# A paired test on fewer pairs than this says little; the paper has ten splits and ten seeds.
PAIRS_FOR_A_TEST = 10


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1), ``None`` for fewer than two values.

    >>> sample_std([1.0, 3.0]) == 2 ** 0.5, sample_std([1.0])
    (True, None)
    """
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0  # exactly, where rounding of the mean would leave a trace
    centre = mean(values)
    return sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class PairedTest:
    """Two-sided paired tests of ``after - before = 0`` over the replicates that both have."""

    pairs: int
    t_test: float
    wilcoxon: float

    def __str__(self) -> str:
        return f"{p_value(self.t_test)} (paired t), {p_value(self.wilcoxon)} (Wilcoxon), {self.pairs} pairs"

    @property
    def larger(self) -> float:
        """The larger of the two p-values: claim no more than both tests allow."""
        return max(self.t_test, self.wilcoxon)


def paired_differences(before: Mapping[str, float], after: Mapping[str, float]) -> list[float]:
    """``after - before`` for each replicate (split or seed) that both sides have."""
    return [after[key] - before[key] for key in before if key in after]


def paired_test(differences: Sequence[float]) -> PairedTest | None:
    """Student's and Wilcoxon's signed-rank test, ``None`` below ten pairs.

    Without any difference at all neither test is defined; the p-value is then 1: nothing speaks against equality.
    """
    if len(differences) < PAIRS_FOR_A_TEST:
        return None
    from scipy.stats import ttest_1samp, wilcoxon

    if not any(differences):
        return PairedTest(len(differences), 1.0, 1.0)
    if sample_std(differences) == 0.0:  # the same shift in every pair: t is infinite, which scipy warns about
        student = 0.0
    else:
        student = float(ttest_1samp(differences, 0.0).pvalue)
    ranks = float(wilcoxon(differences, method="auto").pvalue)
    assert not isnan(student)
    assert not isnan(ranks)
    return PairedTest(len(differences), student, ranks)


def p_value(p: float) -> str:
    """A p-value to three digits.

    >>> p_value(0.0004), p_value(0.03)
    ('p < 0.001', 'p = 0.030')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
