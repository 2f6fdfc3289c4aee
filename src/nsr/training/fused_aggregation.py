"""The paper's convs with their weighted sum in one fused operator: no ``[E, D]`` tensor, and replicas in one launch.

PyG gathers a message for every edge and scatters it. Ten replicas of a graph with a million edges at width 128 would
need 5 GB for each such tensor; the operator that the branch uses for its own sums needs none of them.
"""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import GCNConv, GINConv, MessagePassing, SAGEConv

from nsr.kernels import segment_sum, unit_coefficient

M = TypeVar("M", bound=nn.Module)


def _propagate(self: MessagePassing, edge_index: Tensor, size: Any = None, **arguments: Any) -> Tensor:
    """The sum of a conv whose messages are its input rows, times ``edge_weight`` where it has one."""
    x = arguments["x"][0] if isinstance(arguments["x"], tuple) else arguments["x"]
    weight = arguments.get("edge_weight")
    source, target = edge_index
    t = (torch.ones_like(source, dtype=x.dtype) if weight is None else weight).unsqueeze(1)
    if self.aggr == "mean":
        t = unit_coefficient(t, source, target, x.shape[0]).square()  # 1 / K of ones
    return segment_sum(x, source, target, t, x.shape[0])


# `propagate` stands in each class itself: PyG puts a generated one into every class that only inherits it, whenever an
# instance is copied or unpickled, and the sum would be PyG's again without a word.


class FusedGCNConv(GCNConv):
    """GCN over an edge index."""

    propagate = _propagate


class FusedSAGEConv(SAGEConv):
    """GraphSAGE with mean or sum over an edge index."""

    propagate = _propagate


class FusedGINConv(GINConv):
    """GIN over an edge index."""

    propagate = _propagate


_FUSED: dict[type, type] = {GCNConv: FusedGCNConv, SAGEConv: FusedSAGEConv, GINConv: FusedGINConv}


def fuse_aggregation(model: M) -> M:
    """Let every GCN, SAGE and GIN conv of a model of the paper sum by the fused operator, in place.

    Meant for models on one graph without sampling, before :func:`nsr.attach`. Parameters, names and results stay.
    """
    for module in model.modules():
        if isinstance(module, MessagePassing):
            if type(module) not in _FUSED:
                raise ValueError(
                    f"{type(module).__name__} has no fused form; there are {[c.__name__ for c in _FUSED]}."
                )
            module.__class__ = _FUSED[type(module)]
    return model
