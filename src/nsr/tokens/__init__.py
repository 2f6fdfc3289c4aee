"""Token merging: matching rules, the null-space branch, and a timm ViT that merges."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nsr.tokens.algm import ALGM, algm_global_plan, algm_local_plan
from nsr.tokens.branch import SpatialDecoder, TokenBranch, TokenResidual, write_back
from nsr.tokens.dtem import DTEM, DecoupledEmbedding, dtem_soft_merge
from nsr.tokens.mpm import MPM, mpm_plan
from nsr.tokens.pitome import PiToMe, pitome_plan
from nsr.tokens.plan import MergePlan
from nsr.tokens.rule import MergeRule
from nsr.tokens.tome import ToMe, tome_plan

if TYPE_CHECKING:
    from nsr.tokens.fixed_shape import optimize
    from nsr.tokens.segmenter import Segmenter
    from nsr.tokens.segmenter_file import load_segmenter, save_segmenter
    from nsr.tokens.vit import MergedViT
    from nsr.tokens.weights import load_pretrained

__all__ = [
    "ALGM",
    "DTEM",
    "MPM",
    "DecoupledEmbedding",
    "MergePlan",
    "MergeRule",
    "MergedViT",
    "PiToMe",
    "Segmenter",
    "SpatialDecoder",
    "ToMe",
    "TokenBranch",
    "TokenResidual",
    "algm_global_plan",
    "algm_local_plan",
    "dtem_soft_merge",
    "load_pretrained",
    "load_segmenter",
    "mpm_plan",
    "optimize",
    "pitome_plan",
    "save_segmenter",
    "tome_plan",
    "write_back",
]

# The rules and the branch need torch alone; what needs timm is loaded when first named.
_LAZY = {
    "optimize": "nsr.tokens.fixed_shape",
    "MergedViT": "nsr.tokens.vit",
    "Segmenter": "nsr.tokens.segmenter",
    "load_pretrained": "nsr.tokens.weights",
    "load_segmenter": "nsr.tokens.segmenter_file",
    "save_segmenter": "nsr.tokens.segmenter_file",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'nsr.tokens' has no attribute {name!r}")
