"""The contract of an operator: three linear maps over the member axis."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LinearOperator(ABC):
    r"""A linear map :math:`A` with a lift :math:`U` that satisfies :math:`A U A = A`.

    Then :math:`P = I - U A` projects onto the null space of :math:`A`: ``A P = 0``, ``P P = P``, and every input is
    ``x = U A x + P x``, the part that ``A`` keeps and the part that it makes invisible. ``P`` need not be orthogonal.

    Operators are frozen dataclasses with named methods, so that they trace under ``torch.compile(fullgraph=True)``.
    A new operator gives ``apply`` and ``lift`` and inherits a whole test suite by giving its dense matrix
    (``tests/contracts/operator.py``).
    """

    @property
    @abstractmethod
    def feature_axis(self) -> int:
        """The (negative) axis of ``x`` that holds features; the same one in ``apply(x)``."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``A x``: members to groups."""

    @abstractmethod
    def lift(self, y: Tensor) -> Tensor:
        """``U y``: groups back to members."""

    def residual(self, x: Tensor) -> Tensor:
        """``(I - U A) x``: the part of ``x`` that ``apply`` cannot see."""
        return x - self.lift(self.apply(x))

    def null_rank(self, like: Tensor | None = None) -> int | None:
        """Dimension of the null space of one feature channel, or ``None`` where it is not known.

        Args:
            like: An input, for its dtype and device, where the operator holds no tensor to take them from.
        """
        return None


def full_precision(x: Tensor) -> torch.autocast:
    """Switch autocast off: a projection in half precision is none, whatever the surrounding model computes in."""
    return torch.autocast(x.device.type, enabled=False)


def require_real(name: str, value: Tensor) -> None:
    """Refuse what a projection is not defined for: integers, booleans, complex numbers. Reads no values."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}.")
    if value.is_complex():
        raise ValueError(f"{name} is complex ({value.dtype}); expected real floating point. Use .real and .imag apart.")
    if not value.is_floating_point():
        raise ValueError(f"{name} has dtype {value.dtype}; expected floating point. Convert it with {name}.float().")


def require_finite(name: str, value: Tensor) -> None:
    """Refuse NaN and infinity. Reads the values (and so synchronises): for construction by a user only."""
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} non-finite of {value.numel()} values; expected all finite.")


def require_same_device(**tensors: Tensor) -> None:
    """Refuse tensors on different devices, naming each."""
    devices = {name: value.device for name, value in tensors.items()}
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"Mixed devices: {places}. Move them to one device with .to(device).")
