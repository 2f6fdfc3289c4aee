"""Matrix products by oneDNN where MKL does not use all of a processor.

PyTorch multiplies fp32 matrices by MKL, which takes its AVX2 code on processors of other makers, AVX-512 or not: an
EPYC of 2024 then does half of what it can. oneDNN, which PyTorch has on board too, goes by what the processor says it
can do. Both compute in fp32; results differ by rounding.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MANY = 1 << 22  # multiplications from which on it pays: below, most of the time is the call's


def onednn_products(device: torch.device) -> AbstractContextManager[Any]:
    """Around passes of a model, forward and backward; of no effect where MKL is as fast."""
    return OneDNNProducts() if device.type == "cpu" and _mkl_takes_half() else nullcontext()


class OneDNNProducts(TorchDispatchMode):
    """Inside the block, large products of fp32 matrices on a CPU are oneDNN's."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs:
            if func is torch.ops.aten.mm.default and _pays(*args):
                return _product(*args)
            if func is torch.ops.aten.addmm.default and args[0].dim() == 1 and _pays(*args[1:]):
                bias, left, right = args
                return _product(left, right, bias)
            if func is torch.ops.aten.bmm.default and _pays(*args):
                return torch.stack([_product(a, b) for a, b in zip(*args, strict=True)])
        return func(*args, **(kwargs or {}))


def _pays(left: Tensor, right: Tensor) -> bool:
    rows, inner = left.shape[-2:]
    plain = left.dtype == torch.float32 and left.device.type == "cpu"
    return plain and rows * inner * right.shape[-1] >= _MANY


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right + bias`` of matrices, by the operator that Inductor compiles linear layers to.

    A right side with gaps between its rows would take its reference code, a thousand times as slow.
    """
    if not (right.is_contiguous() or right.t().is_contiguous()):
        right = right.contiguous()
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")


@cache
def _mkl_takes_half() -> bool:
    """Whether the processor has AVX-512, PyTorch has both libraries, and MKL's maker is not the processor's."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not _by_intel()


def _by_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux: who made it is not known
        return True
