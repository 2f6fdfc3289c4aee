"""Token merging: matching rules, the null-space branch, and a timm ViT that merges."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsr.tokens.branch import SpatialDecoder, TokenBranch, TokenResidual, write_back
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule
from nsr.tokens.tome import ToMe, tome_plan

if TYPE_CHECKING:
    from nsr.tokens.segmenter import Segmenter
    from nsr.tokens.vit import MergedViT

__all__ = [
    "MergePlan",
    "MergeRule",
    "MergedViT",
    "Segmenter",
    "SpatialDecoder",
    "ToMe",
    "TokenBranch",
    "TokenResidual",
    "tome_plan",
    "write_back",
]

# The rules and the branch need torch alone; what needs timm is loaded when first named.
_LAZY = {"MergedViT": "nsr.tokens.vit", "Segmenter": "nsr.tokens.segmenter"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nsr.tokens' has no attribute {name!r}")
