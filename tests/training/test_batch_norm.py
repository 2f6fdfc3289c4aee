"""A row of weight k counts as k equal rows, in outputs, gradients and running statistics."""

import copy

import torch
from torch import nn

from nsr.training.batch_norm import WeightedBatchNorm, row_weights, weigh_batch_norm


def test_weights_equal_repetition() -> None:
    repeats = torch.tensor([3, 1, 0, 2, 5])
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(5, 4, dtype=torch.float64)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    weighted = weigh_batch_norm(copy.deepcopy(plain))

    index = torch.arange(5).repeat_interleave(repeats)
    expected = plain(x[index])
    expected_grads = torch.autograd.grad((expected - target[index]).square().sum(), [x, *plain.parameters()])
    with row_weights(weighted, repeats.double()):
        out = weighted(x)
    loss = ((out - target).square() * repeats[:, None]).sum()
    grads = torch.autograd.grad(loss, [x, *weighted.parameters()])

    torch.testing.assert_close(out[index], expected)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(weighted.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(weighted.eval()(x), plain.eval()(x))


def test_without_weights_it_is_plain_batch_norm() -> None:
    plain = nn.BatchNorm1d(3)
    model = weigh_batch_norm(nn.Sequential(copy.deepcopy(plain)))
    assert isinstance(model[0], WeightedBatchNorm)
    x = torch.randn(10, 3)
    assert torch.equal(model(x), plain(x))
