"""The gated residual sum in plain PyTorch: the reference of the fused kernels, and the path of the CPU.

Both directions walk over the members in chunks whose tensors stay in the cache of a core, and the backward pass
computes every per-member value anew. So no ``[E, D]`` tensor ever exists: memory is ``O((S + T) D)``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nsr.kernels.gated_sum_tables import Gradients, Tables

# A chunk's tensors: two megabytes each on a CPU (they live in its cache), 64 MB on a GPU (few launches).
_CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}


class _Chunk(NamedTuple):
    """Everything that a range of members has on its way to the sum, each ``[C, D]`` but the first three."""

    members: slice
    source: Tensor  # shape: [C]
    target: Tensor  # shape: [C]
    per_channel: Tensor  # shape: [C, D] or [C, 1], the coefficient of each channel's head
    before: Tensor  # the hidden layer before GELU
    hidden: Tensor
    gate: Tensor
    residual: Tensor


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor) -> Tensor:
    """``[R, T, D]``; shapes as in :func:`nsr.kernels.gated_residual_sum`, the replica axis always there."""
    out = torch.zeros_like(tables.mean)
    for r in range(out.shape[0]):
        for chunk in _chunks(tables.replica(r), source, target, coefficient):
            out[r].index_add_(0, chunk.target, chunk.gate.mul_(chunk.residual))
    return out.mul_(_scale(target, out))


def backward(
    grad: Tensor, tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, needs_coefficient: bool
) -> Gradients:
    """Gradients of every argument of :func:`forward` from that of its result."""
    sums = Tables(*(grad.new_zeros(table.shape) for table in tables))
    d_coefficient = torch.zeros_like(coefficient) if needs_coefficient else None
    scaled = grad * _scale(target, grad)
    for r in range(grad.shape[0]):
        mine, my_sums = tables.replica(r), Gradients(sums.replica(r), d_coefficient)
        for chunk in _chunks(mine, source, target, coefficient):
            _accumulate(my_sums, chunk, scaled[r], mine, coefficient)
    return Gradients(sums, d_coefficient)


def _accumulate(sums: Gradients, chunk: _Chunk, grad: Tensor, tables: Tables, coefficient: Tensor) -> None:
    """Add one chunk's share to the gradients of one replica."""
    heads, width = tables.mean_gate.shape[1:]
    grads = sums.tables
    from_sum = grad.index_select(0, chunk.target)
    # g (1 - g) z dr: the gradient before the sigmoid; then g dr: that of the residual.
    d_logit = torch.ops.aten.sigmoid_backward(chunk.residual.mul_(from_sum), chunk.gate)
    d_residual = from_sum.mul_(chunk.gate)
    grads.weight.addmm_(d_logit.t(), chunk.hidden)
    grads.bias.add_(d_logit.sum(0))
    d_before = torch.ops.aten.gelu_backward(torch.mm(d_logit, tables.weight, out=chunk.hidden), chunk.before)

    grads.source_gate.index_add_(0, chunk.source, d_before)
    grads.target_gate.index_add_(0, chunk.target, d_before)
    grads.messages.index_add_(0, chunk.source, d_residual)
    if sums.coefficient is not None:
        by_head = d_residual.mul(tables.mean.index_select(0, chunk.target)).unflatten(1, (heads, width // heads)).sum(2)
        for h in range(heads):
            by_head[:, h].add_(d_before.mul(tables.mean_gate[:, h].index_select(0, chunk.target)).sum(1))
        sums.coefficient[chunk.members].sub_(by_head)
    grads.mean.index_add_(0, chunk.target, d_residual.mul_(chunk.per_channel), alpha=-1)
    for h in range(heads):
        t = coefficient[chunk.members, h : h + 1]
        last = h == heads - 1
        grads.mean_gate[:, h].index_add_(0, chunk.target, d_before.mul_(t) if last else d_before * t, alpha=-1)


def _chunks(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor) -> Iterator[_Chunk]:
    """One replica's members from the first to the last, a chunk at a time."""
    messages, source_gate, target_gate, mean, mean_gate, weight, bias = tables
    heads, width = mean_gate.shape[1:]
    size = max(1, _CHUNK_ELEMENTS.get(messages.device.type, 1 << 19) // width)
    for start in range(0, source.shape[0], size):
        members = slice(start, min(start + size, source.shape[0]))
        s, v, t = source[members], target[members], coefficient[members]
        before = source_gate.index_select(0, s).add_(target_gate.index_select(0, v))
        for h in range(heads):
            before.addcmul_(t[:, h : h + 1], mean_gate[:, h].index_select(0, v), value=-1)
        hidden = F.gelu(before)
        gate = torch.addmm(bias, hidden, weight.t()).sigmoid_()
        per_channel = t if heads == 1 else t.repeat_interleave(width // heads, dim=1)
        residual = messages.index_select(0, s).addcmul_(per_channel, mean.index_select(0, v), value=-1)
        yield _Chunk(members, s, v, per_channel, before, hidden, gate, residual)


def _scale(target: Tensor, like: Tensor) -> Tensor:
    """``K_v^{-1/2}`` as ``[T, 1]``; 1 where there is no member (the sum there is 0)."""
    ones = target.new_ones(()).expand(target.shape[0])  # integers: a float sum of ones stops at 2^24 members
    counts = target.new_zeros(like.shape[-2]).index_add_(0, target, ones)
    return counts.clamp_(min=1).to(like.dtype).rsqrt_().unsqueeze(-1)
