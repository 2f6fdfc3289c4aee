"""What was lost, and what is kept of it: the split, the branch every host shares, and the whole method by hand."""

from nsr.residual.branch import Branch
from nsr.residual.null_space import NullSpaceResidual
from nsr.residual.split import split

__all__ = ["Branch", "NullSpaceResidual", "split"]
