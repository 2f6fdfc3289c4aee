"""The gated residual sum in C++, on a CPU; the plain twin is ``gated_sum_plain``."""

import torch
from torch import Tensor

from nsr.kernels.gated_sum_tables import Gradients, Tables
from nsr.kernels.member_library import MemberGraph
from nsr.kernels.native import struct_of_pointers


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`, in fp32."""
    tables, graph = tables.widened(), _graph(tables, source, target, coefficient)
    out = torch.zeros_like(tables.mean)
    for r, my_out in enumerate(out):
        graph.call("gated_sum_forward", struct_of_pointers(*tables.replica(r)), graph.members, my_out)
    return out


def backward(
    grad: Tensor, tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, needs_coefficient: bool
) -> Gradients:
    """As :func:`nsr.kernels.gated_sum_plain.backward`, in fp32."""
    tables, graph = tables.widened(), _graph(tables, source, target, coefficient)
    sums = Tables(*(torch.zeros_like(table) for table in tables))
    d_coefficient = torch.zeros_like(coefficient) if needs_coefficient else None
    for r, my_grad in enumerate(grad.float().contiguous()):
        mine, my_sums = (struct_of_pointers(*each.replica(r)) for each in (tables, sums))
        graph.call("gated_sum_backward", mine, graph.members, my_grad, my_sums, d_coefficient)
    return Gradients(sums, d_coefficient)


def _graph(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor) -> MemberGraph:
    _, targets, width = tables.mean.shape
    return MemberGraph.of(tables.messages.shape[1], targets, width, source, target, coefficient)
