"""Mean, spread and two-sided paired tests over splits or seeds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erfc, inf, sqrt

# A paired test on fewer pairs than this says little; the paper has ten splits and ten seeds.
PAIRS_FOR_A_TEST = 10
EXACT_UP_TO = 50


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
    from scipy.special import stdtr

    if not any(differences):
        return PairedTest(len(differences), 1.0, 1.0)
    spread, count = sample_std(differences), len(differences)
    assert spread is not None
    # the same shift in every pair makes t infinite
    statistic = abs(mean(differences)) * sqrt(count) / spread if spread else inf
    return PairedTest(count, float(2 * stdtr(count - 1, -statistic)), signed_rank(differences))


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test.

    Zeros are left out and ties share their mean rank. Up to 50 differences the distribution over all sign patterns is
    counted, given the ties; above, it is taken as normal.

    >>> signed_rank([1.0, 2.0, 3.0, -4.0])
    0.875
    """
    values = sorted((value for value in differences if value), key=abs)
    ranks: list[int] = []  # doubled, so that shared ranks are whole numbers
    for value in values:
        first = next(i for i, other in enumerate(values) if abs(other) == abs(value))
        last = first + sum(abs(other) == abs(value) for other in values) - 1
        ranks.append(first + last + 2)
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    centre = sum(ranks) / 2
    if len(values) > EXACT_UP_TO:
        return erfc(abs(observed - centre) / sqrt(sum(rank * rank for rank in ranks) / 4) / sqrt(2))
    patterns = Counter({0: 1})  # how many sign patterns give each sum of positive ranks
    for rank in ranks:
        patterns.update({total + rank: ways for total, ways in list(patterns.items())})
    extreme = sum(ways for total, ways in patterns.items() if abs(total - centre) >= abs(observed - centre))
    return extreme / 2 ** len(values)


def p_value(p: float) -> str:
    """A p-value to three digits.

    >>> p_value(0.0004), p_value(0.03)
    ('p < 0.001', 'p = 0.030')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
