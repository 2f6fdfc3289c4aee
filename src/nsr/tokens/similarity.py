r"""Cosines that every implementation computes to the same bit, whatever order it adds in.

Matching compares scores, and a difference in their last bit can change a plan. Floating-point sums depend on their
order, so the order must not matter: unit features are rounded to integers small enough for every partial sum of their
products to be exact, and the cosine is rounded once, at the end.

Double precision holds such sums as they are. Tensor cores get there in two terms of 11 bits, as float16 has:

.. math:: q = \mathrm{round}\big(2^{11 + low}\, x / |x|\big) = 2^{low} h + l, \qquad
          |h| \le 2^{11}, \quad |l| \le 2^{low - 1}.

Sums of ``h h'`` stay below :math:`2^{23}`, those of ``h l' + l h'`` and of ``l l'`` below :math:`2^{24}`, all of them
exact in float32. Rounding the features moves a cosine by about :math:`10^{-7}`.
"""

from torch import Tensor

from nsr.kernels.tokens import low_bits

EPS = 1e-6
_HIGH_BITS = 11


def compared(metric: Tensor) -> Tensor:
    """What a rule compares: ``[B, N, D]`` as it is, the mean over heads of ``[B, H, N, D]``."""
    if metric.dim() == 3:
        return metric
    total, *others = metric.detach().float().unbind(1)
    for head in others:  # one after another: the order is part of the result
        total = total + head
    return (total * (1 / metric.shape[1])).to(metric.dtype)


def heads_of(metric: Tensor) -> Tensor:
    """The same as ``[B, H, N, D]``, for the kernels, which average themselves."""
    return metric if metric.dim() == 4 else metric.unsqueeze(1)


def grid_features(features: Tensor) -> Tensor:
    """``round(2^(11 + low) x / |x|)``, integers in float32: ``[..., D] -> [..., D]``. A zero vector stays zero."""
    wide = features.detach().float()
    # in double precision, whose own rounding does not reach the float32 result
    length = wide.double().square().sum(dim=-1, keepdim=True).sqrt().clamp(min=EPS)
    return (wide * (2.0 ** (_HIGH_BITS + low_bits(features.shape[-1])) / length).float()).round()


def grid_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines of grid features, in float32: ``[B, M, D], [B, N, D] -> [B, M, N]``."""
    scale = 4.0 ** -(_HIGH_BITS + low_bits(a.shape[-1]))
    return (a.double() @ b.double().mT).float() * scale
