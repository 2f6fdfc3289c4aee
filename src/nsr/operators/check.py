"""The paper's numerical verification (Appendix C) for any operator."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.operators.operator import LinearOperator, require_finite, require_real


@dataclass(frozen=True)
class Check:
    """What :func:`check` measured. Printing it gives a small table.

    Attributes:
        linearity: ``|A(ax + by) - aAx - bAy|_inf`` relative to the size of ``Ax``.
        lift: ``|AUAx - Ax|_inf`` relative to the size of ``Ax``.
        null_violation: ``|AZ|_inf``, absolute as in the paper.
        residual_share: ``|Z|_F / |X|_F``.
        null_rank: Dimension of the null space of one channel, ``None`` where it is not known.
        passed: Whether all three identities hold to the precision of the input's dtype.
    """

    operator: str
    linearity: float
    lift: float
    null_violation: float
    residual_share: float
    null_rank: int | None
    passed: bool

    def __str__(self) -> str:
        rank = "unknown" if self.null_rank is None else f"{self.null_rank:,}"
        rows = [
            ("A(ax+by) = aAx+bAy", f"{self.linearity:.1e}"),
            ("AUA = A", f"{self.lift:.1e}"),
            ("|AZ|_inf", f"{self.null_violation:.1e}"),
            ("|Z|_F / |X|_F", f"{self.residual_share:.4f}"),
            ("null space", f"{rank} dimensions"),
            ("verdict", "holds" if self.passed else "DOES NOT HOLD"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.operator, *(f"  {name:<{width}}  {value}" for name, value in rows)])


@torch.no_grad()
def check(op: LinearOperator, x: Tensor) -> Check:
    """Verify on ``x`` that ``op`` is linear, that its lift is one, and that its residual is invisible to it.

    Args:
        op: The operator.
        x: Members, as ``op.apply`` takes them.

    Raises:
        ValueError: ``x`` is not finite, or the operator is not linear.

    Example:
        >>> import torch, nsr
        >>> result = nsr.check(nsr.Dense(torch.tensor([[0.5, 0.5]])), torch.tensor([[1.0], [3.0]]))
        >>> result.passed, result.null_rank
        (True, 1)
    """
    require_real("x", x)
    require_finite("x", x)
    y = op.apply(x)
    scale = max(_peak(y), _peak(x), torch.finfo(x.dtype).tiny)
    # a small share of rounding per summed term, generous because sums of many members round more than once
    bound = 200 * torch.finfo(x.dtype).eps

    linearity = _linearity(op, x, y) / scale
    if linearity > 100 * bound:
        raise ValueError(
            f"{type(op).__name__} is not linear: A(ax + by) differs from aAx + bAy by {linearity:.1e} of the output's "
            "size. A null space is defined for linear maps only; fix the groups and weights (or the mask, the maximum, "
            "the bias) inside the callable before wrapping it."
        )
    z = op.residual(x)
    lift = _peak(op.apply(op.lift(y)) - y) / scale
    violation = _peak(op.apply(z))
    share = float(z.double().norm() / x.double().norm().clamp_min(torch.finfo(torch.float64).tiny))
    return Check(
        operator=type(op).__name__,
        linearity=linearity,
        lift=lift,
        null_violation=violation,
        residual_share=share,
        null_rank=op.null_rank(x),
        passed=max(linearity, lift, violation / scale) <= bound,
    )


def _linearity(op: LinearOperator, x: Tensor, y: Tensor) -> float:
    """Deviation from linearity on ``x`` and a permuted, sign-flipped copy, at scales that a bias or a kink shows."""
    generator = torch.Generator().manual_seed(0)
    signs = (torch.rand(x.shape, generator=generator) < 0.5).to(x) * 2 - 1
    other = x.flip(op.feature_axis) * signs
    worst = 0.0
    for a, b in ((1.0, 1.0), (-0.75, 0.5), (0.0, 0.0)):
        worst = max(worst, _peak(op.apply(a * x + b * other) - (a * y + b * op.apply(other))))
    return worst


def _peak(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
