"""Norms that do what follows them in the same kernel: activation and dropout, for all replicas at once.

A LayerNorm, a GELU and a dropout of replicas are six operators forward and eleven backward, each of which reads and
writes the whole ``[R, N, D]``. Here each direction is one pass (BatchNorm, which needs all rows first: two), and a
module's plain form, the operators themselves, is what runs where the kernels cannot.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsr.graph.branch import GraphResidual
from nsr.graph.models import GraphLayer
from nsr.kernels.paths import device_obstacle
from nsr.kernels.replicas import fold, unfold
from nsr.training.batch_norm import WeightedBatchNorm
from nsr.training.noise import SeededDropout

M = TypeVar("M", bound=nn.Module)

_NOTHING, _GELU, _RELU = 0, 1, 2  # what follows a norm, as the kernels number it
_PLAIN = {_NOTHING: lambda y: y, _GELU: F.gelu, _RELU: F.relu}
_EPS = 1e-5  # torch's default, and the kernels'


class FinishedLayerNorm(nn.LayerNorm):
    """A LayerNorm with the activation and the dropout that follow it.

    Args:
        norm: Whose parameters these are.
        activation: ``_NOTHING``, ``_GELU`` or ``_RELU``.
        dropout: What comes last.
    """

    def __init__(self, norm: nn.LayerNorm, activation: int, dropout: nn.Module) -> None:
        assert norm.eps == _EPS, "the kernels know one eps"
        super().__init__(norm.normalized_shape)
        self.weight, self.bias = norm.weight, norm.bias
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        if device_obstacle(x):
            return self.dropout(_PLAIN[self.activation](super().forward(x)))
        x, weight, bias = (part.unsqueeze(0).contiguous() for part in (x, self.weight, self.bias))
        return _layer_norm(x, weight, bias, *_draw(self.dropout, x), self.activation).squeeze(0)


class FinishedBatchNorm(WeightedBatchNorm):
    """A BatchNorm with the ReLU and the dropout that follow it.

    Args:
        norm: Whose parameters and statistics these are.
        dropout: What comes last.
    """

    def __init__(self, norm: nn.BatchNorm1d, dropout: nn.Module) -> None:
        assert norm.eps == _EPS, "the kernels know one eps"
        super().__init__(norm.num_features, norm.eps, norm.momentum)
        self.load_state_dict(norm.state_dict())
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """``[N, D]``."""
        if not self.training or device_obstacle(x):
            return self.dropout(F.relu(super().forward(x)))
        count = torch.ones(x.shape[0], device=x.device) if self.row_weight is None else self.row_weight
        total = count.sum()
        x, weight, bias = (part.unsqueeze(0).contiguous() for part in (x, self.weight, self.bias))
        seed, step, site, p = _draw(self.dropout, x)
        y, mean, variance = _batch_norm(x, weight, bias, seed, step, count, total, site, p, _RELU)
        self._track(mean.squeeze(0).detach(), variance.squeeze(0).detach() * total / (total - 1))
        return y.squeeze(0)


def fuse_norms(model: M) -> M:
    """Let the norms of a model of the paper, and of its branches, do what follows them, in place.

    Meant for after :func:`nsr.training.noise.seed_dropout`. Names of parameters and results stay.
    """
    for module in list(model.modules()):
        if isinstance(module, GraphResidual):
            module.norm = FinishedLayerNorm(module.norm, _NOTHING, module.dropout)
            module.register_module("dropout", nn.Identity())
        elif isinstance(module, GraphLayer) and isinstance(module.update, nn.Sequential):
            norm, gelu = module.update
            assert isinstance(norm, nn.LayerNorm), "the update of GCN and SAGE begins with a LayerNorm"
            assert isinstance(gelu, nn.GELU), "and goes on with a GELU"
            module.update = nn.Sequential(FinishedLayerNorm(norm, _GELU, module.dropout), nn.Identity())
            module.register_module("dropout", nn.Identity())
        elif isinstance(module, GraphLayer):
            stages = module.conv.nn
            for at, dropout in ((1, nn.Identity()), (4, module.dropout)):
                assert isinstance(stages[at], nn.BatchNorm1d), "a stage of GIN has a BatchNorm"
                assert isinstance(stages[at + 1], nn.ReLU), "and then a ReLU"
                stages[at], stages[at + 1] = FinishedBatchNorm(stages[at], dropout), nn.Identity()
            module.register_module("dropout", nn.Identity())
    return model


def _draw(dropout: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, int, float]:
    """Seed and step of a dropout's next mask, each ``[1]``, its site and probability; 0 where nothing is dropped."""
    if isinstance(dropout, SeededDropout) and dropout.training and dropout.p > 0:
        dropout.step.add_(1)
        return dropout.seed.view(1), dropout.step.clone().view(1), dropout.site, dropout.p
    assert not isinstance(dropout, nn.Dropout) or not dropout.training or dropout.p == 0, "a dropout without a seed"
    nothing = torch.zeros(1, dtype=torch.int32, device=x.device)
    return nothing, nothing, 0, 0.0


@torch.library.custom_op("nsr::finished_layer_norm", mutates_args=())
def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor, step: Tensor, site: int, p: float, activation: int
) -> Tensor:
    from nsr.training import norm_launches

    return norm_launches.layer_norm(x, weight, bias, seed, step, site, p, activation)


@_layer_norm.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _differentiate_layer(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    from nsr.training import norm_launches

    grads = norm_launches.layer_norm_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None, None)


_layer_norm.register_autograd(_differentiate_layer, setup_context=_save_layer)


@_layer_norm.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    tensors = [fold(x, dim, info.batch_size) for x, dim in zip(args[:5], in_dims, strict=False)]
    return unfold(_layer_norm(*tensors, *args[5:]), info.batch_size), 0


@torch.library.custom_op("nsr::finished_batch_norm", mutates_args=())
def _batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
    step: Tensor,
    count: Tensor,
    total: Tensor,
    site: int,
    p: float,
    activation: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result ``[R, N, D]``, mean and variance ``[R, D]``; no gradient flows through the latter."""
    from nsr.training import norm_launches

    return norm_launches.batch_norm(x, weight, bias, seed, step, count, site, p, activation)


@_batch_norm.register_fake
def _(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _save_batch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output[1:])
    ctx.options = inputs[7:]
    ctx.mark_non_differentiable(*output[1:])


def _differentiate_batch(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    from nsr.training import norm_launches

    grads = norm_launches.batch_norm_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options)
    return (*grads, *[None] * 7)


_batch_norm.register_autograd(_differentiate_batch, setup_context=_save_batch)


@_batch_norm.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    assert in_dims[5] is None, "replicas share the rows that count"
    tensors = [fold(x, dim, info.batch_size) for x, dim in zip(args[:5], in_dims, strict=False)]
    results = _batch_norm(*tensors, *args[5:])
    return tuple(unfold(x, info.batch_size) for x in results), (0, 0, 0)
