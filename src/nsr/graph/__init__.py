"""Graph aggregation: the null-space branch for any PyTorch Geometric model."""

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
