from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nsr
from contracts.operator import Case, OperatorContract


def blur_and_downsample(x: Tensor) -> Tensor:
    kernel = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype)
    kernel = (kernel[:, None] * kernel) / 16
    return F.conv2d(x.unsqueeze(1), kernel[None, None], stride=2, padding=1).squeeze(1)


class FunctionContract(OperatorContract):
    fn: Callable[[Tensor], Tensor]
    in_shape: tuple[int, ...]

    def case(self, dtype: torch.dtype) -> Case:
        op = nsr.Function(type(self).fn, self.in_shape)
        n = torch.Size(self.in_shape).numel()
        dense = type(self).fn(torch.eye(n, dtype=dtype).reshape(n, *self.in_shape)).reshape(n, -1).mT
        # conjugate gradients decide when to stop by reading a value: not one graph
        return Case(op, dense, torch.randn(2, *self.in_shape, dtype=dtype), traces_whole=False)


class TestOverlappingAveragePool(FunctionContract):
    fn = staticmethod(lambda x: F.avg_pool2d(x, 3, stride=2))
    in_shape = (7, 9)


class TestBlurAndDownsample(FunctionContract):
    fn = staticmethod(blur_and_downsample)
    in_shape = (8, 6)


class TestStridedSum(FunctionContract):
    fn = staticmethod(lambda x: x[:, ::2] + x[:, 1::2])
    in_shape = (10,)


class TestRankDeficient(FunctionContract):
    """The same sums twice: A Aᵀ is singular, and the solve still converges because A x lies in its range."""

    fn = staticmethod(lambda x: torch.cat([x[:, ::2] + x[:, 1::2]] * 2, dim=1))
    in_shape = (8,)


def test_a_large_image_converges() -> None:
    op = nsr.Function(lambda x: F.avg_pool2d(x, 3, stride=2), (512, 512))
    z = op.residual(torch.randn(64, 512, 512))
    assert op.apply(z).abs().max() <= 1e-5


def test_rows_do_not_depend_on_their_batch() -> None:
    op = nsr.Function(lambda x: F.avg_pool2d(x, 3, stride=2), (9, 9))
    x = torch.randn(3, 9, 9)
    x[1] *= 1e4
    torch.testing.assert_close(op.residual(x)[0], op.residual(x[:1])[0], rtol=1e-5, atol=1e-6)


def test_parameters_inside_the_callable_take_gradients() -> None:
    x = torch.randn(1, 8, dtype=torch.float64)

    def residual(kernel: Tensor) -> Tensor:
        return nsr.Function(lambda v: F.conv1d(v.unsqueeze(1), kernel[None, None], stride=2).squeeze(1), (8,)).residual(
            x
        )

    kernel = torch.tensor([0.5, 1.0, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(residual, (kernel,), atol=1e-6)


def test_no_convergence_is_said() -> None:
    op = nsr.Function(lambda x: F.avg_pool2d(x, 5, stride=1), (32, 32), tolerance=1e-7, max_iterations=3)
    with pytest.warns(UserWarning, match="stopped after 3 iterations"):
        op.residual(torch.randn(1, 32, 32))


def test_a_callable_that_mixes_or_drops_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="keep the first axis"):
        nsr.Function(lambda x: x.sum(0, keepdim=True), (3,)).apply(torch.randn(2, 3))


def test_a_callable_without_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="differentiable"):
        nsr.Function(lambda x: x.detach()[:, :1], (3,)).residual(torch.randn(2, 3))


@pytest.mark.parametrize(("fn", "in_shape"), [(None, (3,)), (torch.sin, ()), (torch.sin, (0,)), (torch.sin, (2.5,))])
def test_bad_construction_is_refused(fn: object, in_shape: tuple) -> None:
    with pytest.raises(ValueError, match=r"callable|in_shape"):
        nsr.Function(fn, in_shape)


def test_works_within_inference_mode() -> None:
    op, x = nsr.Function(lambda x: F.avg_pool2d(x, 2), (6, 6)), torch.randn(3, 6, 6)
    outside = op.residual(x)
    with torch.inference_mode():
        torch.testing.assert_close(op.residual(x), outside)
