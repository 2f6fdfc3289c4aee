"""Hashed dropout of many replicas in one pass, in C++; the plain twin is ``nsr.training.noise.masked``."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from nsr.kernels.native import load_library, pointers, threads

_SOURCE = Path(__file__).parent / "native" / "noise.cpp"


def masked(x: Tensor, key: Tensor, p: float) -> Tensor | None:
    """See :func:`nsr.training.noise.masked`; ``None`` where it cannot be compiled."""
    library = load_library(_SOURCE)
    if library is None:
        return None
    x, key, out = x.contiguous(), key.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    library.seeded_dropout(
        threads(len(x)),
        *map(ctypes.c_int64, x.shape),
        *pointers(x, key),
        ctypes.c_int32(round(p * 2**32) - 2**31),
        ctypes.c_float(1 - p),
        *pointers(out),
    )
    return out
