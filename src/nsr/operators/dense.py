"""An explicit matrix: the reference that every test compares with, and the operator for small dense maps."""

from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from nsr.operators.operator import LinearOperator, full_precision, require_finite, require_real, require_same_device


@dataclass(frozen=True)
class Dense(LinearOperator):
    r"""``A`` given as a matrix, with the pseudo-inverse or an explicit ``U`` as its lift.

    Args:
        matrix: ``A``, shape ``[G, N]`` or ``[B, G, N]``.
        lifting: ``U``, shape ``[N, G]`` or ``[B, N, G]``, with ``A U A = A``; the pseudo-inverse if not given.
        validate: Read and check the values once, see :class:`~nsr.Segment`.

    Shapes:
        ``apply``: ``[..., N, D] -> [..., G, D]``; ``lift``: ``[..., G, D] -> [..., N, D]``.

    Example:
        >>> import torch, nsr
        >>> mean = nsr.Dense(torch.tensor([[0.5, 0.5]]))
        >>> mean.residual(torch.tensor([[1.0], [3.0]])).round(decimals=4).tolist()
        [[-1.0], [1.0]]
    """

    matrix: Tensor  # shape: [..., G, N]
    lifting: Tensor | None = None  # shape: [..., N, G]
    validate: InitVar[bool] = True

    def __post_init__(self, validate: bool) -> None:
        if validate:
            _validate(self.matrix, self.lifting)
        if self.lifting is None:
            # in fp64, because its error bounds that of every residual; but a singular value is zero to the precision
            # in which the matrix was given
            rtol = max(self.matrix.shape[-2:]) * torch.finfo(self.matrix.dtype).eps
            inverse = torch.linalg.pinv(self.matrix.double(), rtol=rtol).to(self.matrix.dtype)
            object.__setattr__(self, "lifting", inverse)

    @property
    def feature_axis(self) -> int:
        """Features are last."""
        return -1

    def apply(self, x: Tensor) -> Tensor:
        """``A x``."""
        _require_rows("x", x, self.matrix)
        with full_precision(x):
            return self.matrix.to(x.dtype) @ x

    def lift(self, y: Tensor) -> Tensor:
        """``U y``."""
        assert self.lifting is not None
        _require_rows("y", y, self.lifting)
        with full_precision(y):
            return self.lifting.to(y.dtype) @ y

    def null_rank(self, like: Tensor | None = None) -> int:
        """Members less the rank of ``A``; summed over a batch."""
        accuracy = max(self.matrix.shape[-2:]) * torch.finfo(self.matrix.dtype).eps  # no finer than the matrix is given
        rank = torch.linalg.matrix_rank(self.matrix.double(), rtol=accuracy)
        return int((self.matrix.shape[-1] - rank).sum())


def _require_rows(name: str, value: Tensor, matrix: Tensor) -> None:
    require_real(name, value)
    if value.dim() < 2 or value.shape[-2] != matrix.shape[-1]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected [..., {matrix.shape[-1]}, D] for a matrix of shape "
            f"{tuple(matrix.shape)}, features last."
        )
    require_same_device(**{name: value, "matrix": matrix})


def _validate(matrix: Tensor, lifting: Tensor | None) -> None:
    require_real("matrix", matrix)
    if matrix.dim() < 2:
        raise ValueError(f"matrix has shape {tuple(matrix.shape)}; expected [G, N] or [B, G, N].")
    require_finite("matrix", matrix)
    if lifting is None:
        return
    require_real("lifting", lifting)
    if lifting.shape != matrix.mT.shape:
        raise ValueError(f"lifting has shape {tuple(lifting.shape)}; expected {tuple(matrix.mT.shape)}, that of A^T.")
    require_finite("lifting", lifting)
    require_same_device(matrix=matrix, lifting=lifting)
    wide = matrix.double()
    error = float((wide @ lifting.double() @ wide - wide).abs().max()) if matrix.numel() else 0.0
    scale = float(wide.abs().max()) if matrix.numel() else 1.0
    if error > 1e3 * torch.finfo(matrix.dtype).eps * max(scale, 1.0):
        raise ValueError(
            f"lifting is no lift of matrix: |A U A - A| reaches {error:.2e}. Leave it out for the pseudo-inverse."
        )
