"""Null-space residuals for PyTorch.

A linear many-to-one map ``A`` (a graph aggregation, a token merge, a pooling) makes two inputs equal exactly when
their difference lies in its null space. This library keeps ``A`` as it is, takes the invisible part
``Z = (I - U A) X`` of the members, encodes and gates it, and adds what the task finds useful.

Shape letters used throughout: ``B`` batch, ``N`` members (nodes, tokens), ``E`` edges, ``G`` groups, ``K`` members of
one group, ``D`` features, ``R`` code width, ``H`` heads.

Importing ``nsr`` costs torch and nothing heavier; the graph and token sides load when first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsr.branches import disabled, load, save
from nsr.operators import Check, Dense, Function, LinearOperator, Segment, check
from nsr.residual import Branch, NullSpaceResidual, split

if TYPE_CHECKING:
    from nsr import graph, tokens
    from nsr.graph.attach import attach, detach, sites

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "Check",
    "Dense",
    "Function",
    "LinearOperator",
    "NullSpaceResidual",
    "Segment",
    "__version__",
    "attach",
    "check",
    "detach",
    "disabled",
    "graph",
    "load",
    "save",
    "sites",
    "split",
    "tokens",
]

# Names that need an extra (torch_geometric, timm) are resolved when first used.
_LAZY_MODULES = {"graph", "tokens"}
_LAZY_NAMES = {"attach": "nsr.graph.attach", "detach": "nsr.graph.attach", "sites": "nsr.graph.attach"}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return import_module(f"nsr.{name}")
    if name in _LAZY_NAMES:
        return getattr(import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module 'nsr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
