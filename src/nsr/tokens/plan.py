"""Who merges with whom and with what weights: the one thing that every matching rule returns.

::

    old tokens   0   1   2   3   4   5            group   0  1  2  1  3  2      new position of each old token
                 │   ├───│───┘   │   │            weight  1  ½  ½  ½  1  ½      sums to one in each group
                 │   │   ├───────│───┘
    new tokens   0   1   2       3                merge: y_g = Σ t_i x_i,   unmerge: x_i = y_g(i)   (one gather)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsr.kernels.tokens import GroupLayout, merge
from nsr.operators import Segment


@dataclass(frozen=True)
class MergePlan:
    r"""A merge of ``N`` tokens into ``G``, the same way for every feature.

    .. math:: y_g = \sum_{i \in g} t_i x_i, \qquad \sum_{i \in g} t_i = 1.

    Prefix tokens (CLS, distillation, registers) are part of the sequence and keep their places. Samples of a batch may
    end up with different numbers of tokens; the shorter ones are then padded at the end. A token that was padding
    already has weight 0: it contributes to no group, and its own group is a padded one wherever its sample has one.

    Nothing here reads a value, so a plan with fixed counts traces under ``torch.compile(fullgraph=True)`` and exports.

    Args:
        group: New position of each old token, ``[B, N]``, int64.
        weight: Its share ``t_i`` in that group, ``[B, N]``; 0 for padding, and for padding alone.
        num_groups: ``G``, padding included.
        max_merged: An upper bound, known without reading values, on the tokens of one sample that lie in groups of
            two or more. It is what lets the branch encode those alone at a static shape.
        valid: Which new tokens are real, ``[B, G]``; ``None`` if all are.
        size: Sizes of the new tokens, ``[B, G]``, where the rule has added them up; see :meth:`merged_size`.
        layout: The groups laid out for the kernels, where they are used.

    Example:
        >>> import torch
        >>> plan = MergePlan(torch.tensor([[0, 1, 1]]), torch.tensor([[1.0, 0.5, 0.5]]), num_groups=2, max_merged=2)
        >>> merged = plan.merge(torch.tensor([[[1.0], [2.0], [4.0]]]))
        >>> merged.flatten().tolist(), plan.unmerge(merged).flatten().tolist()
        ([1.0, 3.0], [1.0, 3.0, 3.0])
    """

    group: Tensor  # shape: [B, N]
    weight: Tensor  # shape: [B, N]
    num_groups: int
    max_merged: int
    valid: Tensor | None = None  # shape: [B, G]
    size: Tensor | None = None  # shape: [B, G]
    layout: GroupLayout | None = None

    @classmethod
    def identity(cls, batch: int, tokens: int, device: torch.device | str = "cpu") -> "MergePlan":
        """The plan that merges nothing; the neutral element of :meth:`then`."""
        group = torch.arange(tokens, device=device).expand(batch, tokens)
        return cls(group, torch.ones(batch, tokens, device=device), tokens, max_merged=0)

    def as_segment(self) -> Segment:
        """The plan as an operator with the copy lift, whose residual is ``z_i = x_i - y_g(i)``."""
        return Segment(self.group, self.weight, self.num_groups, lifting="copy", validate=False)

    def merge(self, x: Tensor) -> Tensor:
        """``y_g = Σ t_i x_i``, summed in at least fp32: ``[B, N, D] -> [B, G, D]``. Padding becomes 0."""
        if self.layout is None or x.dtype == torch.float64:  # the kernels sum in fp32
            return self.as_segment().apply(x)
        return merge(x, self.layout)

    def unmerge(self, y: Tensor) -> Tensor:
        """Copy each group to its members, one gather: ``[B, G, D] -> [B, N, D]``."""
        return self.as_segment().gather(y)

    def merged_size(self, size: Tensor) -> Tensor:
        """Sizes add: ``[B, N] -> [B, G]``. Padding has size 0."""
        return self._sum(size * (self.weight > 0))

    def route(self, token: Tensor) -> Tensor:
        """New position of tokens given by old position: ``[B, K] -> [B, K]``, int64."""
        return self.group.gather(1, token)

    def then(self, after: "MergePlan") -> "MergePlan":
        """The plan that equals this one followed by ``after``."""
        if self.group.shape[0] != after.group.shape[0] or self.num_groups != after.group.shape[1]:
            raise ValueError(
                f"Cannot compose: this plan makes {self.num_groups} tokens for a batch of {self.group.shape[0]}, the "
                f"next one takes {after.group.shape[1]} for a batch of {after.group.shape[0]}. They must be equal."
            )
        return MergePlan(
            group=after.route(self.group),
            weight=self.weight * after.weight.gather(1, self.group),
            num_groups=after.num_groups,
            # every token may lie behind the tokens that merge next
            max_merged=self.group.shape[1],
            valid=after.valid,
        )

    def counts(self) -> Tensor:
        """Real members of each group, ``[B, G]``, int64: 1 for a singleton, 0 for padding."""
        return self._sum((self.weight > 0).long())

    def members_of_merged(self) -> Tensor:
        """Which tokens lie in a group of two or more, ``[B, N]``, bool: those that have a residual."""
        return (self.counts().gather(1, self.group) > 1) & (self.weight > 0)

    def _sum(self, value: Tensor) -> Tensor:
        # shape: [B, N] -> [B, G]
        return value.new_zeros(value.shape[0], self.num_groups).scatter_add(1, self.group, value)
