"""The graph branch as the paper words it: every member its own row, ``W1`` applied to ``[h_src ; h_dst ; z]``.

The same parameters and the same function as :class:`nsr.graph.branch.GraphResidual`; what it costs is the point.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from nsr.graph.branch import GraphResidual
from nsr.graph.members import Members

M = TypeVar("M", bound=nn.Module)


class LiteralGraphResidual(GraphResidual):
    """A branch with ``[E, 3 D]`` tensors, for one head and the residual itself."""

    def forward(self, members: Members, source: Tensor, target: Tensor | None) -> Tensor:
        """As :meth:`GraphResidual.forward`."""
        assert target is not None, "the models of the benchmark have features at both ends"
        residual = members.residual(self.message(source))  # shape: [E, D]
        ends = source.index_select(0, members.source), target.index_select(0, members.target)
        hidden = nn.functional.gelu(self.gate_hidden(torch.cat([*ends, residual], dim=1)))  # W1 on [E, 3 D]
        gated = torch.sigmoid(self.gate_output(hidden)) * residual
        total = gated.new_zeros(members.num_targets, gated.shape[1]).index_add(0, members.target, gated)
        count = gated.new_zeros(members.num_targets).index_add(0, members.target, torch.ones_like(gated[:, 0]))
        scaled = total * count.clamp(min=1).rsqrt().unsqueeze(1)
        return self.output(self.dropout(self.norm(scaled)))


def as_worded(model: M) -> M:
    """Let every graph branch of a model compute as the paper words it, in place."""
    for module in model.modules():
        if type(module) is GraphResidual:
            module.__class__ = LiteralGraphResidual
    return model
