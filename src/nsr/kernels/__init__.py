"""Fast paths behind the operators and branches; each has a plain PyTorch twin that is its reference."""

from nsr.kernels.direction import segment_direction
from nsr.kernels.gated_sum import gated_residual_sum
from nsr.kernels.paths import path_for

__all__ = ["gated_residual_sum", "path_for", "segment_direction"]
