"""Disjoint groups: scatter, pooling, merging. Everything has a closed form, in time and memory linear in members."""

from dataclasses import InitVar, dataclass
from typing import Literal

import torch
from torch import Tensor

from nsr.operators.operator import LinearOperator, require_finite, require_real, require_same_device


@dataclass(frozen=True)
class Segment(LinearOperator):
    r"""Weighted sum over disjoint groups of members.

    .. math::
        (A x)_g = \sum_{i \in g} t_i x_i, \qquad (U y)_i = u_i\, y_{g(i)}, \qquad \sum_{i \in g} t_i u_i = 1.

    The lift coefficients :math:`u` are a choice:

    - ``"adjoint"``: :math:`u_i = t_i / \sum_{j \in g} t_j^2`, the orthogonal projection (graph aggregation);
    - ``"copy"``: :math:`u_i = 1`, copying a group back to its members; needs :math:`\sum t_i = 1` (token merging);
    - a tensor: any other :math:`u` with :math:`\sum t_i u_i = 1`, as composition makes it.

    A group without members gives 0 and lifts to nobody. Members may come in any order.

    Args:
        group: Group id of each member, ``[N]``, or ``[B, N]`` for a batch with its own groups per sample.
        weight: Coefficients ``t``, of the same shape, of either sign.
        num_groups: ``G``.
        lifting: The lift, see above.
        validate: Read and check the values once. The library passes ``False`` for what it built itself, which then
            costs no check and no synchronisation; a group whose coefficients are all zero then lifts to 0.

    Shapes:
        ``apply``: ``[..., N, D] -> [..., G, D]``; ``lift``: ``[..., G, D] -> [..., N, D]``; a batched ``group``
        fixes the leading shape, a flat one is shared by all.

    Example:
        >>> import torch, nsr
        >>> pool = nsr.Segment(torch.tensor([0, 0, 1]), torch.tensor([0.5, 0.5, 1.0]), 2)
        >>> pool.apply(torch.tensor([[1.0], [3.0], [5.0]])).tolist()
        [[2.0], [5.0]]
        >>> pool.residual(torch.tensor([[1.0], [3.0], [5.0]])).tolist()
        [[-1.0], [1.0], [0.0]]
    """

    group: Tensor  # shape: [..., N]
    weight: Tensor  # shape: [..., N]
    num_groups: int
    lifting: Literal["adjoint", "copy"] | Tensor = "adjoint"
    validate: InitVar[bool] = True

    def __post_init__(self, validate: bool) -> None:
        if validate:
            _validate(self)

    @property
    def feature_axis(self) -> int:
        """Features are last."""
        return -1

    def apply(self, x: Tensor) -> Tensor:
        """``y_g = sum_i t_i x_i``, accumulated in at least fp32."""
        self._require_shape("x", x, self.group.shape[-1], "members")
        wide = _wide(x.dtype)
        return self._sum(self.weight.to(wide).unsqueeze(-1) * x.to(wide)).to(x.dtype)

    def lift(self, y: Tensor) -> Tensor:
        """``x_i = u_i y_{g(i)}``."""
        self._require_shape("y", y, self.num_groups, "groups")
        if isinstance(self.lifting, str) and self.lifting == "copy":
            return self.gather(y)
        wide = _wide(y.dtype)
        return (self.lift_weight().to(wide).unsqueeze(-1) * self.gather(y).to(wide)).to(y.dtype)

    def lift_weight(self) -> Tensor:
        """The lift coefficients ``u``, shape ``[..., N]``; 0 in a group whose coefficients are all zero."""
        if isinstance(self.lifting, Tensor):
            return self.lifting
        if self.lifting == "copy":
            return torch.ones_like(self.weight)
        weight = self.weight.to(_wide(self.weight.dtype))
        energy = self.gather(self._sum(weight.square().unsqueeze(-1))).squeeze(-1)
        return torch.where(energy > 0, weight / energy.where(energy > 0, 1.0), 0.0)

    def gather(self, y: Tensor) -> Tensor:
        """``y_{g(i)}`` for each member: ``[..., G, D] -> [..., N, D]``."""
        if self.group.dim() == 1:
            return y.index_select(-2, self.group)
        return y.gather(-2, self.group.unsqueeze(-1).expand(*self.group.shape, y.shape[-1]))

    def counts(self) -> Tensor:
        """Members in each group, ``[..., G]``, int64."""
        ones = torch.ones_like(self.group, dtype=torch.int64)
        empty = ones.new_zeros(*self.group.shape[:-1], self.num_groups)
        return empty.scatter_add(-1, self.group.long(), ones)

    def then(self, after: "Segment") -> "Segment":
        """The segment that equals ``after`` applied to this one's output, lift included: ``u = u_after u_before``."""
        if after.group.shape[-1] != self.num_groups or after.group.shape[:-1] != self.group.shape[:-1]:
            raise ValueError(
                f"Cannot compose: this segment makes groups of shape {(*self.group.shape[:-1], self.num_groups)}, "
                f"the next one takes members of shape {tuple(after.group.shape)}. They must be equal."
            )
        index = self.group.long()
        lifting: Literal["copy"] | Tensor = "copy"
        if not (isinstance(self.lifting, str) and self.lifting == after.lifting == "copy"):
            lifting = self.lift_weight() * after.lift_weight().gather(-1, index)
        return Segment(
            after.group.gather(-1, index),
            self.weight * after.weight.gather(-1, index),
            after.num_groups,
            lifting,
            validate=False,
        )

    def null_rank(self, like: Tensor | None = None) -> int:
        """Members less the groups that any member reaches; summed over a batch."""
        reached = self._sum((self.weight != 0).to(torch.float32).unsqueeze(-1)).squeeze(-1) > 0
        return self.group.numel() - int(reached.sum())

    def _sum(self, x: Tensor) -> Tensor:
        # shape: [..., N, D] -> [..., G, D]
        if self.group.dim() == 1:
            out = x.new_zeros(*x.shape[:-2], self.num_groups, x.shape[-1])
            return out.index_add(-2, self.group, x)
        out = x.new_zeros(*self.group.shape[:-1], self.num_groups, x.shape[-1])
        return out.scatter_add(-2, self.group.long().unsqueeze(-1).expand_as(x), x)

    def _require_shape(self, name: str, value: Tensor, length: int, what: str) -> None:
        require_real(name, value)
        batch = self.group.shape[:-1]
        if value.dim() < 2 or value.shape[-2] != length or (batch and value.shape[:-2] != batch):
            lead = ", ".join(map(str, batch)) if batch else "..."
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; expected [{lead}, {length}, D] ({length} {what})."
                + (" Add a feature axis with x.unsqueeze(-1)." if value.dim() < 2 else "")
            )
        require_same_device(**{name: value, "group": self.group})


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: half precisions are summed in fp32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _validate(op: Segment) -> None:
    group, weight = op.group, op.weight
    if not isinstance(group, Tensor) or group.dtype not in (torch.int64, torch.int32):
        given = group.dtype if isinstance(group, Tensor) else type(group).__name__
        raise ValueError(f"group must be an int64 or int32 tensor of group ids, got {given}. Convert it with .long().")
    require_real("weight", weight)
    if group.dim() not in (1, 2) or group.shape != weight.shape:
        raise ValueError(
            f"group has shape {tuple(group.shape)} and weight {tuple(weight.shape)}; expected the same [N] or [B, N]."
        )
    require_same_device(group=group, weight=weight)
    require_finite("weight", weight)
    if not isinstance(op.num_groups, int) or op.num_groups < 0:
        raise ValueError(f"num_groups must be an int of at least 0, got {op.num_groups!r}.")
    if group.numel():
        low, high = int(group.min()), int(group.max())
        if low < 0 or high >= op.num_groups:
            raise ValueError(
                f"group ids run from {low} to {high}; expected 0 to {op.num_groups - 1} for num_groups={op.num_groups}."
            )
    _validate_lifting(op)


def _validate_lifting(op: Segment) -> None:
    wide = op.weight.to(torch.float64)
    occupied = op.counts() > 0
    if isinstance(op.lifting, Tensor):
        if op.lifting.shape != op.weight.shape:
            raise ValueError(
                f"lifting has shape {tuple(op.lifting.shape)}; expected that of weight, {tuple(op.weight.shape)}."
            )
        require_finite("lifting", op.lifting)
        require_same_device(weight=op.weight, lifting=op.lifting)
        sums = op._sum((wide * op.lifting.double()).unsqueeze(-1)).squeeze(-1)
        remedy = "the products weight * lifting must sum to one in each group"
    elif op.lifting == "copy":
        sums = op._sum(wide.unsqueeze(-1)).squeeze(-1)
        remedy = (
            "the copy lift needs weights that sum to one in each group: divide by the group's sum, or use 'adjoint'"
        )
    elif op.lifting == "adjoint":
        dead = occupied & (op._sum(wide.square().unsqueeze(-1)).squeeze(-1) == 0)
        if bool(dead.any()):
            first = dead.nonzero()[0].tolist()
            raise ValueError(
                f"{int(dead.sum())} groups have members whose coefficients are all zero (first: {first}); "
                "their projection is undefined. Drop those members or give them a weight."
            )
        return
    else:
        raise ValueError(f"lifting is {op.lifting!r}; expected 'adjoint', 'copy' or a tensor of lift coefficients.")
    error = ((sums - 1).abs() * occupied).max() if sums.numel() else sums.sum()
    if float(error) > 1e3 * torch.finfo(op.weight.dtype).eps:
        worst = ((sums - 1).abs() * occupied).flatten().argmax()
        raise ValueError(f"A group's sum is {float(sums.flatten()[worst]):.6g}, expected 1: {remedy}.")
