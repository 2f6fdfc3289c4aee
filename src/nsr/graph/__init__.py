"""Graph aggregation: the null-space branch for any PyTorch Geometric model."""

import warnings

with warnings.catch_warnings():
    # torch_geometric 2.8 scripts functions on import, which torch 2.13 calls deprecated: nothing a user could mend
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
    import torch_geometric.nn  # noqa: F401

from nsr.graph.attach import attach, detach, sites
from nsr.graph.branch import GraphResidual
from nsr.graph.coefficients import coefficients
from nsr.graph.diagnostic import accuracy_by_score, null_space_scores
from nsr.graph.members import Members
from nsr.graph.models import GraphLayer, GraphModel, matched_width
from nsr.graph.sites import Site, Sites

__all__ = [
    "GraphLayer",
    "GraphModel",
    "GraphResidual",
    "Members",
    "Site",
    "Sites",
    "accuracy_by_score",
    "attach",
    "coefficients",
    "detach",
    "matched_width",
    "null_space_scores",
    "sites",
]
