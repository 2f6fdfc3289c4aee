"""Which implementation a call takes, and why: chosen here, in one place, and said in words."""

from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

Precision = Literal["fp32", "tf32", "bf16"]

_FROM_TORCH: dict[str, Precision] = {"highest": "fp32", "high": "tf32", "medium": "bf16"}


class Path(NamedTuple):
    """A choice of implementation and the reason for it."""

    fused: bool
    precision: Precision
    deterministic: bool
    reason: str


def choose(
    messages: Tensor,
    coefficient: Tensor,
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
    obstacle = "the fused kernels are not built yet"
    if fused and obstacle:
        raise ValueError(f"fused=True, but {obstacle}. Leave it None to take the plain path.")
    if fused is False:
        return Path(False, precision, deterministic, "plain: asked for by fused=False")
    if obstacle:
        return Path(False, precision, deterministic, f"plain: {obstacle}")
    return Path(True, precision, deterministic, f"fused: {precision} product")


def path_for(
    messages: Tensor,
    coefficient: Tensor,
    *,
    fused: bool | None = None,
    precision: Precision | None = None,
    deterministic: bool | None = None,
) -> str:
    """One line that says which path :func:`gated_residual_sum` takes for these tensors, and why."""
    return choose(messages, coefficient, fused, precision, deterministic).reason


def _ambient_precision(device: str) -> Precision:
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
        return "bf16"
    return cast(Precision, _FROM_TORCH[torch.get_float32_matmul_precision()])
