"""Which implementation a call takes, and why: chosen here, in one place, and said in words."""

from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nsr.kernels import member_library

Precision = Literal["fp32", "tf32", "bf16"]
Kernels = Literal["plain", "native", "triton"]  # PyTorch's operators; C++ on a CPU; CUDA, or Triton's interpreter

_FROM_TORCH: dict[str, Precision] = {"highest": "fp32", "high": "tf32", "medium": "bf16"}
_DOUBLE = "float64 input, which the fused kernels would round to float32"
_MAX_WIDTH = 512
_MAX_HEADS = 16


class Path(NamedTuple):
    """A choice of implementation and the reason for it."""

    kernels: Kernels
    precision: Precision
    deterministic: bool
    reason: str


def path_for(
    messages: Tensor,
    coefficient: Tensor,
    *,
    fused: bool | None = None,
    precision: Precision | None = None,
    deterministic: bool | None = None,
) -> str:
    """One line that says which path :func:`gated_residual_sum` takes for these tensors, and why."""
    path = choose(messages, coefficient, fused=fused, precision=precision, deterministic=deterministic)
    return path.reason


def choose(
    messages: Tensor,
    coefficient: Tensor,
    *,
    fused: bool | None = None,
    precision: Precision | None = None,
    deterministic: bool | None = None,
) -> Path:
    """The path for these tensors; ``fused=True`` where it cannot be taken is an error that says why."""
    if precision is None:
        precision = _ambient_precision(messages.device.type)
    elif precision not in _FROM_TORCH.values():
        raise ValueError(f"precision is {precision!r}; expected 'fp32', 'tf32' or 'bf16'.")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if fused is False:
        return Path("plain", precision, deterministic, "plain: asked for by fused=False")
    obstacle = _obstacle(messages, coefficient)
    if obstacle is None:
        order = "in a fixed order" if deterministic else "with atomic sums to the sources"
        return Path("triton", precision, deterministic, f"fused: CUDA, {precision} product, {order}")
    if messages.device.type == "cpu":
        obstacle = _native_obstacle(messages.dtype, coefficient.dtype, messages.shape[-1], coefficient.shape[-1])
        if obstacle is None:  # products are always fp32 there, and sums always in the order of the members
            return Path("native", "fp32", True, "fused: CPU, fp32 product, in a fixed order")
    if fused:
        raise ValueError(f"fused=True, but {obstacle}. Leave fused at None to take the plain path there.")
    return Path("plain", precision, deterministic, f"plain: {obstacle}")


@torch.compiler.assume_constant_result
def _native_obstacle(messages: torch.dtype, coefficient: torch.dtype, width: int, heads: int) -> str | None:
    """Why the C++ kernels cannot run."""
    if torch.float64 in (messages, coefficient):
        return _DOUBLE
    return member_library.obstacle(width, heads)


def _obstacle(messages: Tensor, coefficient: Tensor) -> str | None:
    """Why the fused kernels cannot run on these tensors."""
    width, heads = messages.shape[-1], coefficient.shape[-1]
    if width % 16 or width > _MAX_WIDTH:
        return f"width {width}, and the fused kernels take multiples of 16 up to {_MAX_WIDTH}"
    if heads > _MAX_HEADS:
        return f"{heads} heads, and the fused kernels take up to {_MAX_HEADS}"
    return device_obstacle(messages) or device_obstacle(coefficient)


def device_obstacle(x: Tensor) -> str | None:
    """Why no fused kernel can run on a tensor like this, whatever its shape."""
    if x.dtype == torch.float64:
        return _DOUBLE
    return _device_obstacle(x.device.type, x.device.index)


@torch.compiler.assume_constant_result
def _device_obstacle(kind: str, index: int | None) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(index)
        return None if capability >= (8, 0) else f"compute capability {capability}, and bf16 products need (8, 0)"
    import triton

    return None if triton.knobs.runtime.interpret else f"a tensor on {kind}, and the fused kernels run on CUDA"


@torch.compiler.assume_constant_result
def _ambient_precision(device: str) -> Precision:
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
        return "bf16"
    return _FROM_TORCH[torch.get_float32_matmul_precision()]
