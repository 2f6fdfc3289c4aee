"""Any linear callable: the adjoint comes from autograd, the lift from conjugate gradients."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.operators.operator import LinearOperator, full_precision, require_real

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Function(LinearOperator):
    r"""A linear callable as an operator: overlapping pooling, blur and downsample, a strided sum.

    The lift is the pseudo-inverse, so the residual is the orthogonal projection onto the null space:

    .. math:: U y = A^\top w \quad\text{with}\quad A A^\top w = y,

    solved by conjugate gradients for every channel at once, each with its own step. :math:`A^\top` is the
    vector-Jacobian product of ``fn``. Gradients flow to ``x`` and to parameters inside ``fn`` (by the implicit function
    theorem: the iterations are not recorded).

    Args:
        fn: Maps ``[M, *in_shape]`` to ``[M, *out_shape]``, linearly and each of the ``M`` rows by itself.
        in_shape: Shape of one input, such as ``(H, W)``. Leading axes of ``x``, channels among them, become ``M``.
        tolerance: Stop when the residual of the solve falls below ``tolerance`` times its right-hand side, in every
            channel; a few units of rounding of the input's dtype if not given.
        max_iterations: Give up after this many, with a warning that names the residual reached.

    Shapes:
        ``apply``: ``[..., D, *in_shape] -> [..., D, *out_shape]``; ``lift`` the other way.

    Example:
        >>> import torch, nsr
        >>> pairs = nsr.Function(lambda x: x[:, ::2] + x[:, 1::2], in_shape=(4,))
        >>> pairs.residual(torch.tensor([[1.0, 3.0, 5.0, 5.0]])).tolist()
        [[-1.0, 1.0, 0.0, 0.0]]
    """

    fn: Linear
    in_shape: tuple[int, ...]
    tolerance: float | None = None
    max_iterations: int = 500

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn must be callable, got {type(self.fn).__name__}.")
        shape = (self.in_shape,) if isinstance(self.in_shape, int) else tuple(self.in_shape)
        if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ValueError(f"in_shape is {self.in_shape!r}; expected positive sizes of one input, such as (32, 32).")
        object.__setattr__(self, "in_shape", shape)

    @property
    def feature_axis(self) -> int:
        """Features stand before the input's own axes, as channels do before height and width."""
        return -1 - len(self.in_shape)

    def apply(self, x: Tensor) -> Tensor:
        """``fn(x)``."""
        return self._unrows(x, self._apply_rows(self._rows(x)))

    def lift(self, y: Tensor) -> Tensor:
        """``A^T (A A^T)^{-1} y`` for a ``y`` in the range of ``A``."""
        require_real("y", y)
        shape = self._out_shape(y)
        if y.shape[y.dim() - len(shape) :] != shape:
            raise ValueError(f"y has shape {tuple(y.shape)}; expected [..., {', '.join(map(str, shape))}].")
        with torch.set_grad_enabled(self._takes_gradient(y)):
            x = self._adjoint(self._solve(y.reshape(-1, *shape)))
        return x.reshape(*y.shape[: y.dim() - len(shape)], *self.in_shape)

    def residual(self, x: Tensor) -> Tensor:
        """``x - A^T (A A^T)^{-1} A x``."""
        rows = self._rows(x)
        with torch.set_grad_enabled(self._takes_gradient(x)):
            z = rows - self._adjoint(self._solve(self._apply_rows(rows)))
        return z.reshape(x.shape)

    def null_rank(self, like: Tensor | None = None) -> int | None:
        """Known where the matrix is small enough to write down (at most 4,096 inputs)."""
        n = math.prod(self.in_shape)
        if n > 4096:
            return None
        identity = torch.eye(n) if like is None else torch.eye(n, dtype=like.dtype, device=like.device)
        with torch.no_grad():
            columns = self._apply_rows(identity.reshape(n, *self.in_shape)).reshape(n, -1)
        accuracy = max(columns.shape) * torch.finfo(columns.dtype).eps
        return n - int(torch.linalg.matrix_rank(columns.double(), rtol=accuracy))

    # -- rows: [..., D, *in_shape] <-> [M, *in_shape] ------------------------------------------------------------

    def _rows(self, x: Tensor) -> Tensor:
        require_real("x", x)
        if x.shape[-len(self.in_shape) :] != self.in_shape:
            wanted = ", ".join(map(str, self.in_shape))
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [..., {wanted}], the operator's in_shape last.")
        return x.reshape(-1, *self.in_shape)

    def _unrows(self, x: Tensor, rows: Tensor) -> Tensor:
        return rows.reshape(*x.shape[: x.dim() - len(self.in_shape)], *rows.shape[1:])

    def _apply_rows(self, rows: Tensor) -> Tensor:
        with full_precision(rows):
            out = self.fn(rows)
        if not isinstance(out, Tensor) or out.dim() < 2 or out.shape[0] != rows.shape[0]:
            given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"fn turned {tuple(rows.shape)} into {given}; expected a tensor [{rows.shape[0]}, *out_shape]: "
                "fn must keep the first axis and treat its rows apart."
            )
        return out

    def _out_shape(self, like: Tensor) -> tuple[int, ...]:
        return tuple(self._apply_rows(like.new_zeros(1, *self.in_shape)).shape[1:])

    def _takes_gradient(self, value: Tensor) -> bool:
        """Whether a graph is wanted: for ``value`` itself, or for a parameter that ``fn`` holds."""
        if not torch.is_grad_enabled():
            return False
        return value.requires_grad or self._apply_rows(value.new_zeros(1, *self.in_shape)).requires_grad

    # -- the solve -----------------------------------------------------------------------------------------------

    def _adjoint(self, w: Tensor) -> Tensor:
        """``A^T w``, differentiable in ``w`` and in the parameters of ``fn``; being linear, ``fn`` has one Jacobian."""
        recorded = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            point = w.new_zeros(w.shape[0], *self.in_shape).requires_grad_()
            out = self._apply_rows(point)
            if out.grad_fn is None:
                raise ValueError("fn returned a tensor without a gradient; it must be differentiable torch code.")
            return torch.autograd.grad(out, point, w, create_graph=recorded)[0]

    def _gram(self, w: Tensor) -> Tensor:
        """``A A^T w`` without a graph."""
        with torch.no_grad():
            return self._apply_rows(self._adjoint(w))

    def _solve(self, y: Tensor) -> Tensor:
        """``w`` with ``A A^T w = y``, differentiable by one refinement step through the recorded operator.

        ``w = w0 + (A A^T)^{-1} (y - A A^T w0)``: in value a refinement of the plain solve ``w0``, in derivative the
        implicit function theorem, for ``y`` and for whatever parameters ``fn`` holds.
        """
        with torch.no_grad():
            start = _conjugate_gradient(self._gram, y.detach(), self._tolerance(y), self.max_iterations)
        correction = y - self._apply_rows(self._adjoint(start))
        return start + _ImplicitSolve.apply(correction, self._gram, self._tolerance(y), self.max_iterations)

    def _tolerance(self, y: Tensor) -> float:
        return self.tolerance if self.tolerance is not None else 4 * torch.finfo(y.dtype).eps


class _ImplicitSolve(torch.autograd.Function):
    """``(A A^T)^{-1} y``; ``A A^T`` is symmetric, so the backward pass is the same solve."""

    @staticmethod
    def forward(ctx, y: Tensor, gram: Linear, tolerance: float, max_iterations: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.solve = (gram, tolerance, max_iterations)
        # y is the residual of a finished solve: two digits of it are enough to refine, and cheap
        return _conjugate_gradient(gram, y.detach(), max(tolerance, 1e-2), max_iterations, warn=False)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        return _SolveAgain.apply(grad, *ctx.solve), None, None, None


class _SolveAgain(torch.autograd.Function):
    """The full solve as a differentiable step, so that second derivatives exist."""

    @staticmethod
    def forward(ctx, y: Tensor, gram: Linear, tolerance: float, max_iterations: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.solve = (gram, tolerance, max_iterations)
        return _conjugate_gradient(gram, y.detach(), tolerance, max_iterations)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        return _SolveAgain.apply(grad, *ctx.solve), None, None, None


@torch.no_grad()
def _conjugate_gradient(gram: Linear, y: Tensor, tolerance: float, max_iterations: int, warn: bool = True) -> Tensor:
    """Solve ``gram(w) = y`` row by row (own step sizes), until every row has met the tolerance.

    A row that has converged takes steps of zero from then on, so no row depends on its batch. ``y`` lies in the range
    of ``A``, where conjugate gradients converge for a rank-deficient ``A`` as well.
    """
    axes = tuple(range(1, y.dim()))

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(axes, keepdim=True)

    w = torch.zeros_like(y)
    r = y.clone()
    p = r.clone()
    rho = dot(r, r)
    goal = tolerance**2 * rho
    for iteration in range(max_iterations):
        active = rho > goal
        # reading a flag synchronises a GPU: every eighth step is often enough
        if iteration % 8 == 0 and not bool(active.any()):
            return w
        q = gram(p)
        curvature = dot(p, q)
        step = torch.where(active & (curvature > 0), rho / curvature.where(curvature > 0, 1.0), 0.0)
        w = w + step * p
        r = r - step * q
        rho_next = dot(r, r)
        p = r + torch.where(active, rho_next / rho.where(rho > 0, 1.0), 0.0) * p
        rho = torch.where(active, rho_next, rho)
    worst = float((rho / goal.where(goal > 0, 1.0)).max().sqrt()) * tolerance
    if warn and worst > tolerance:
        warnings.warn(
            f"Conjugate gradients stopped after {max_iterations} iterations at a relative residual of {worst:.1e} "
            f"(goal {tolerance:.1e}). Raise max_iterations or tolerance, or check that fn is linear with nsr.check.",
            stacklevel=2,
        )
    return w
