"""What every operator must satisfy. A new operator inherits all of it by giving its dense matrix.

Derive from :class:`OperatorContract`, give ``case`` (the operator, its dense matrix, and how members are laid out), and
pytest does the rest.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import nsr

# |A Z| relative to the scale of the input
NULL_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
MATCH_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}


@dataclass(frozen=True)
class Case:
    """One operator to hold to the contract.

    Attributes:
        op: The operator.
        dense: Its matrix ``A``, ``[..., G, N]``.
        x: Members, as ``op.apply`` takes them.
        traces_whole: Whether it compiles without a graph break.
    """

    op: nsr.LinearOperator
    dense: Tensor
    x: Tensor
    traces_whole: bool = True

    def columns(self, value: Tensor) -> Tensor:
        """Features last and members flattened, so that the dense matrix acts by ``A @ columns``."""
        value = value.movedim(self.op.feature_axis, -1)
        members = -1 - self.op.feature_axis or 1
        return value.flatten(-1 - members, -2)


class OperatorContract:
    """Inherit, override ``case``, and every test below runs on your operator."""

    def case(self, dtype: torch.dtype) -> Case:
        raise NotImplementedError

    @pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
    def one(self, request: pytest.FixtureRequest) -> Case:
        return self.case(request.param)

    def test_apply_equals_dense(self, one: Case) -> None:
        torch.testing.assert_close(one.columns(one.op.apply(one.x)), one.dense @ one.columns(one.x), **_close(one))

    def test_lift_is_a_lift(self, one: Case) -> None:
        y = one.op.apply(one.x)
        torch.testing.assert_close(one.op.apply(one.op.lift(y)), y, **_close(one))

    def test_residual_is_invisible(self, one: Case) -> None:
        scale = one.x.abs().max() * one.dense.abs().sum(-1).max().clamp_min(1)
        assert one.op.apply(one.op.residual(one.x)).abs().max() <= NULL_TOLERANCE[one.x.dtype] * scale

    def test_kept_and_lost_make_the_whole(self, one: Case) -> None:
        kept, lost = nsr.split(one.op, one.x)
        torch.testing.assert_close(kept + lost, one.x, rtol=0, atol=4 * torch.finfo(one.x.dtype).eps * _peak(one.x))
        torch.testing.assert_close(one.op.apply(kept), one.op.apply(one.x), **_close(one))

    def test_residual_is_idempotent(self, one: Case) -> None:
        z = one.op.residual(one.x)
        torch.testing.assert_close(one.op.residual(z), z, **_close(one))

    def test_null_vectors_pass_unchanged(self, one: Case) -> None:
        basis = torch.linalg.svd(one.dense.double(), full_matrices=True).Vh
        rank = int(torch.linalg.matrix_rank(one.dense).flatten()[0])
        null = basis[..., rank : rank + 1, :].mT.to(one.x.dtype)
        z = one.columns(one.op.residual(self.rows(one, null)))
        torch.testing.assert_close(z, null.expand_as(z), **_close(one))

    def rows(self, one: Case, columns: Tensor) -> Tensor:
        """The inverse of ``Case.columns``, with the features of ``one.x`` repeated from one."""
        axis = one.op.feature_axis
        shape = one.x.movedim(axis, -1).shape
        return columns.expand(*columns.shape[:-1], shape[-1]).reshape(shape).movedim(-1, axis)

    def test_null_rank_is_that_of_the_matrix(self, one: Case) -> None:
        rank = torch.linalg.matrix_rank(one.dense)
        assert one.op.null_rank(one.x) == int((one.dense.shape[-1] - rank).sum())

    def test_gradients(self) -> None:
        one = self.case(torch.float64)
        x = one.x.clone().requires_grad_()
        assert torch.autograd.gradcheck(one.op.apply, (x,))
        # on the range of A, the only place where a lift is asked for
        assert torch.autograd.gradcheck(lambda v: one.op.lift(one.op.apply(v)), (x,))
        assert torch.autograd.gradcheck(one.op.residual, (x,))

    def test_keeps_dtype_and_shape(self, one: Case) -> None:
        y = one.op.apply(one.x)
        assert y.dtype == one.op.lift(y).dtype == one.op.residual(one.x).dtype == one.x.dtype
        assert one.op.lift(y).shape == one.op.residual(one.x).shape == one.x.shape

    def test_check_passes(self, one: Case) -> None:
        assert nsr.check(one.op, one.x).passed

    def test_compiled_equals_eager(self) -> None:
        one = self.case(torch.float32)

        def whole(x: Tensor) -> tuple[Tensor, Tensor]:
            return one.op.apply(x), one.op.residual(x)

        torch.compiler.reset()
        compiled = torch.compile(whole, fullgraph=one.traces_whole, backend="aot_eager")
        for got, expected in zip(compiled(one.x), whole(one.x), strict=True):
            torch.testing.assert_close(got, expected, **_close(one))

    def test_stays_exact_under_autocast(self) -> None:
        one = self.case(torch.float32)
        plain = one.op.residual(one.x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(one.op.residual(one.x), plain, rtol=0, atol=0)

    @pytest.mark.parametrize("bad", [torch.int64, torch.complex64, torch.bool])
    def test_refuses_what_is_not_real(self, bad: torch.dtype) -> None:
        one = self.case(torch.float32)
        with pytest.raises(ValueError, match="floating point"):
            one.op.apply(one.x.to(bad))

    def test_refuses_a_shape_that_does_not_fit(self) -> None:
        one = self.case(torch.float32)
        with pytest.raises(ValueError, match="expected"):
            one.op.apply(one.x.repeat_interleave(2, dim=-2 if one.op.feature_axis == -1 else -1))


def _peak(value: Tensor) -> Tensor:
    return value.abs().max()


def _close(one: Case) -> dict[str, float]:
    tolerance = MATCH_TOLERANCE[one.x.dtype]
    return {"rtol": tolerance, "atol": tolerance * max(1.0, float(_peak(one.x)))}
