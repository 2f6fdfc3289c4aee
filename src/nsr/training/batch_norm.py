"""BatchNorm whose rows count as often as they stand for: shared rows several times, padding not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


class WeightedBatchNorm(nn.BatchNorm1d):
    r"""``nn.BatchNorm1d`` with a weight for every row.

    .. math::
        \mu = \frac{\sum_i w_i x_i}{\sum_i w_i}, \qquad \sigma^2 = \frac{\sum_i w_i (x_i - \mu)^2}{\sum_i w_i}

    A row of weight 3 counts as three equal rows, a row of weight 0 not at all, in the running statistics too.

    Attributes:
        row_weight: ``w``, ``[N]``; while ``None``, this is plain BatchNorm. Set by :func:`row_weights`.
    """

    row_weight: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[N, D]``."""
        if self.row_weight is None or not self.training:
            return super().forward(x)
        weight = self.row_weight.unsqueeze(1)
        total = weight.sum()
        mean = (weight * x).sum(0) / total
        centred = x - mean
        variance = (weight * centred.square()).sum(0) / total
        self._track(mean.detach(), variance.detach() * total / (total - 1))
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None, "the paper's BatchNorm tracks running statistics"
        assert self.running_var is not None, "the paper's BatchNorm tracks running statistics"
        assert self.momentum is not None, "a cumulative average is not used here"
        self.running_mean.mul_(1 - self.momentum).add_(mean * self.momentum)
        self.running_var.mul_(1 - self.momentum).add_(variance * self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)


def weigh_batch_norm(model: M) -> M:
    """Put a :class:`WeightedBatchNorm` with the same tensors in the place of every ``nn.BatchNorm1d``, in place."""
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.BatchNorm1d]
    for name, module in found:
        weighted = WeightedBatchNorm(module.num_features, module.eps, module.momentum).to(module.weight)
        weighted.load_state_dict(module.state_dict())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, weighted)
    return model


@contextmanager
def row_weights(model: nn.Module, weight: Tensor | None) -> Iterator[None]:
    """Let every :class:`WeightedBatchNorm` of ``model`` count rows with ``weight [N]`` inside the block."""
    norms = [module for module in model.modules() if isinstance(module, WeightedBatchNorm)]
    for norm in norms:
        norm.row_weight = weight
    try:
        yield
    finally:
        for norm in norms:
            norm.row_weight = None
