"""Whether a call takes the token kernels or the plain code beside them: decided here, in one place."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

_HAS_TRITON = find_spec("triton") is not None
_forced: bool | None = None


@contextmanager
def token_kernels(enabled: bool | None) -> Iterator[None]:
    """Run the block with the token kernels off (``False``), on (``True``), or chosen by device (``None``, the default).

    On a CPU ``True`` works under Triton's interpreter alone; it is how the kernels are tested without a GPU.

    Example:
        >>> with token_kernels(False):  # the plain code, also on a GPU  # doctest: +SKIP
        ...     logits = segmenter(image)
    """
    global _forced
    before, _forced = _forced, enabled
    try:
        yield
    finally:
        _forced = before


def use_kernels(*tensors: Tensor | None) -> bool:
    """Whether these tensors go to the kernels: on CUDA, in single or half precision."""
    if _forced is not None:
        return _forced
    given = [x for x in tensors if x is not None]
    return _HAS_TRITON and all(x.is_cuda and x.dtype != torch.float64 for x in given)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
