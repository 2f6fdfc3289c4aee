"""Fast paths behind the operators and branches; each has a plain PyTorch twin that is its reference."""

from nsr.kernels.gated_sum import gated_residual_sum
from nsr.kernels.paths import path_for
from nsr.kernels.segment_sum import segment_sum
from nsr.kernels.unit_coefficient import unit_coefficient

__all__ = ["gated_residual_sum", "path_for", "segment_sum", "unit_coefficient"]
