"""The fused gated residual sum: kernels that keep a member's whole row on chip, and others for heads and width."""

from torch import Tensor

from nsr.kernels import gated_sum_narrow, gated_sum_wide
from nsr.kernels.gated_sum_tables import Gradients, Tables


def forward(tables: Tables, source: Tensor, target: Tensor, coefficient: Tensor, precision: str) -> Tensor:
    """As :func:`nsr.kernels.gated_sum_plain.forward`."""
    launch = gated_sum_narrow.forward if _is_narrow(tables) else gated_sum_wide.forward
    return launch(tables, source, target, coefficient, precision)


def backward(
    grad: Tensor,
    tables: Tables,
    source: Tensor,
    target: Tensor,
    coefficient: Tensor,
    needs_coefficient: bool,
    precision: str,
    deterministic: bool,
) -> Gradients:
    """As :func:`nsr.kernels.gated_sum_plain.backward`.

    The gradients of the source tables are added atomically in the same pass, or with ``deterministic`` in a second pass
    over the members sorted by source.
    """
    launch = gated_sum_narrow.backward if _is_narrow(tables) else gated_sum_wide.backward
    return launch(grad, tables, source, target, coefficient, needs_coefficient, precision, deterministic)


def _is_narrow(tables: Tables) -> bool:
    return tables.messages.shape[2] <= gated_sum_narrow.MAX_WIDTH and tables.mean_gate.shape[2] == 1
