"""What the gated residual sum reads, and the gradients of it."""

from typing import NamedTuple

from torch import Tensor


class Tables(NamedTuple):
    """The floating-point arguments of the gated residual sum but its coefficients, each with a replica axis."""

    messages: Tensor  # shape: [R, S, D]
    source_gate: Tensor  # shape: [R, S, D]
    target_gate: Tensor  # shape: [R, T, D]
    mean: Tensor  # shape: [R, T, D]
    mean_gate: Tensor  # shape: [R, T, H, D]
    weight: Tensor  # shape: [R, D, D]
    bias: Tensor  # shape: [R, D]

    def widened(self) -> "Tables":
        """The same in fp32, each row behind the one before."""
        return Tables(*(table.float().contiguous() for table in self))

    def replica(self, index: int) -> "Tables":
        """The tables of one replica, without the axis, each row behind the one before: a CPU gathers those faster."""
        return Tables(*(table[index].contiguous() for table in self))


class Gradients(NamedTuple):
    """Gradients of the gated residual sum."""

    tables: Tables
    coefficient: Tensor | None  # shape: [E, H]; None where not asked for
