"""Adam of all replicas in one pass over their rows, in C++; the plain twin is ``nsr.training.replicas.adam_rows``."""

import ctypes
from pathlib import Path

from torch import Tensor

from nsr.kernels.native import load_library, pointers, threads

_SOURCE = Path(__file__).parent / "native" / "adam.cpp"


def available() -> bool:
    """Whether it can be compiled here."""
    return load_library(_SOURCE) is not None


def adam_rows(
    weights: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    steps: Tensor,
    rate: Tensor,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """See :func:`nsr.training.replicas.adam_rows`."""
    library = load_library(_SOURCE)
    assert library is not None, "ask available() first"
    seen = [1 - beta ** steps.item() for beta in betas]
    library.adam(
        threads(len(weights)),
        *map(ctypes.c_int64, weights.shape),
        *pointers(weights, gradient, first, second, rate),
        *map(ctypes.c_float, (*seen, weight_decay, *betas, eps)),
    )
