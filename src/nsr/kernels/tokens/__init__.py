"""Fast paths of token merging: matching, merging with the branch behind it, attention with a bias a key.

Every function is an operator that ``torch.compile`` and CUDA graphs take whole; the plain code it replaces, in
:mod:`nsr.tokens`, is its reference. :func:`token_kernels` switches between the two.
"""

from nsr.kernels.tokens.attention import attention
from nsr.kernels.tokens.beside import Matching, attend_beside
from nsr.kernels.tokens.choice import needs_grad, token_kernels, use_kernels
from nsr.kernels.tokens.layout import GroupLayout, lay_out
from nsr.kernels.tokens.linear import WIDEST, linear_add, norm_linear
from nsr.kernels.tokens.match import best_match, descending, energy, energy_units, low_bits, split_features, tome_layout
from nsr.kernels.tokens.merge import merge
from nsr.kernels.tokens.residual import BranchWeights, Source, merge_residual
from nsr.kernels.tokens.spread import restore, spread, unmerge

__all__ = [
    "WIDEST",
    "BranchWeights",
    "GroupLayout",
    "Matching",
    "Source",
    "attend_beside",
    "attention",
    "best_match",
    "descending",
    "energy",
    "energy_units",
    "lay_out",
    "linear_add",
    "low_bits",
    "merge",
    "merge_residual",
    "needs_grad",
    "norm_linear",
    "restore",
    "split_features",
    "spread",
    "token_kernels",
    "tome_layout",
    "unmerge",
    "use_kernels",
]
