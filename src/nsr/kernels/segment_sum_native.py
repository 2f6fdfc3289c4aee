"""The weighted sum over members in C++, on a CPU; the plain twin is ``segment_sum_plain``."""

import torch
from torch import Tensor

from nsr.kernels.member_library import MemberGraph


def forward(messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, num_targets: int) -> Tensor:
    """As :func:`nsr.kernels.segment_sum_plain.forward`, in fp32."""
    replicas, sources, width = messages.shape
    graph = MemberGraph.of(sources, num_targets, width, source, target, coefficient)
    out = messages.new_zeros(replicas, num_targets, width, dtype=torch.float32)
    for mine, my_out in zip(messages.float().contiguous(), out, strict=True):
        graph.call("segment_sum", mine, graph.members, my_out)
    return out


def backward(
    grad: Tensor, messages: Tensor, source: Tensor, target: Tensor, coefficient: Tensor, needs_coefficient: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`nsr.kernels.segment_sum_plain.backward`, in fp32."""
    _, sources, width = messages.shape
    d_messages = forward(grad, target, source, coefficient, sources)
    if not needs_coefficient:
        return d_messages, None
    graph = MemberGraph.of(sources, grad.shape[1], width, source, target, coefficient)
    d_coefficient = torch.zeros_like(coefficient)
    for mine, my_grad in zip(messages.float().contiguous(), grad.float().contiguous(), strict=True):
        graph.call("segment_sum_coefficient", mine, my_grad, graph.members, d_coefficient)
    return d_messages, d_coefficient
