"""Who takes part in an aggregation, and with what weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.kernels import unit_coefficient


@dataclass(frozen=True, eq=False)
class Members:
    r"""The members of every aggregation of one layer, as the layer really uses them.

    Member ``i`` brings row ``source[i]`` of the source table into the aggregate of node ``target[i]``:

    .. math:: y_v = \sum_{i \in v} t_i\, x_{s(i)}, \qquad A_v = t_v^\top.

    The source table is that of the source nodes. Two cases differ, and :meth:`source_table` serves both: the root
    members of a bipartite graph stand behind the source nodes, and in the message view every member has its own row.

    Attributes:
        source: Row of each member in the source table, ``[E]``.
        target: Node that it is aggregated at, ``[E]``.
        coefficient: ``t``, one a head, ``[E, H]``.
        num_targets: Number of nodes ``T`` that aggregate, with or without members.
        num_roots: How many members, the last ones, are root terms (GIN's ``1 + eps``).
        messages: In the message view the realised messages, ``[E, M]``; then ``source`` counts them.
    """

    source: Tensor  # shape: [E]
    target: Tensor  # shape: [E]
    coefficient: Tensor  # shape: [E, H]
    num_targets: int
    num_roots: int = 0
    messages: Tensor | None = None  # shape: [E, M]

    @property
    def heads(self) -> int:
        """``H``."""
        return self.coefficient.shape[1]

    def unit_coefficient(self, *, fused: bool | None = None) -> Tensor:
        r"""Coefficients scaled to unit length at each node and head, ``[E, H]``; 0 where all of them are 0.

        The residual depends on the direction of ``t`` alone. Unit length keeps ``t_i u`` free of rounding where it
        matters: the only member of a node has :math:`t = \pm 1`, so its residual is exactly 0.
        """
        return unit_coefficient(self.coefficient, self.source, self.target, self.num_targets, fused=fused)

    def aggregate(self, table: Tensor) -> Tensor:
        """``sum_i t_i x_i`` of a source table, each head over its share of the channels: ``[S, D] -> [T, D]``."""
        rows = table.index_select(0, self.source).unflatten(1, (self.heads, -1))  # shape: [E, H, D / H]
        weighted = (rows * self.coefficient.unsqueeze(2)).flatten(1)
        return weighted.new_zeros(self.num_targets, table.shape[1]).index_add(0, self.target, weighted)

    def residual(self, table: Tensor) -> Tensor:
        r"""What :meth:`aggregate` makes invisible of each member, ``[S, D] -> [E, D]``.

        .. math:: z_i = x_i - t_i\, \frac{\sum_j t_j x_j}{\sum_j t_j^2}, \qquad \sum_i t_i z_i = 0.

        All zero coefficients at a node project nothing away: there ``z = x``.
        """
        t = self.unit_coefficient().to(table.dtype).unsqueeze(2)
        rows = table.index_select(0, self.source).unflatten(1, (self.heads, -1))  # shape: [E, H, D / H]
        kept = rows.new_zeros(self.num_targets, *rows.shape[1:]).index_add(0, self.target, t * rows)
        return (rows - t * kept.index_select(0, self.target)).flatten(1)

    def source_table(self, source: Tensor, target: Tensor | None) -> Tensor:
        """The table that ``self.source`` indexes, from the features of both node sets.

        Args:
            source: Features of the source nodes, ``[S, F]``.
            target: Features of the target nodes, ``[T, F']``: the same tensor where source and target nodes are the
                same, ``None`` where the target nodes have none.
        """
        if self.messages is not None:
            return self.messages
        if self.num_roots and target is not source:
            assert target is not None, "a root member needs features of the target nodes"
            return torch.cat([source, target])
        return source
