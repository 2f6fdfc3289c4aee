"""The models of a segmentation experiment: one backbone and head, and what is added to them."""

import copy
from functools import cache
from pathlib import Path

import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from nsr.experiments.segmentation_task import SegmentationTask
from nsr.tokens import MergedViT, MergeRule, Segmenter, TokenResidual
from nsr.tokens.weights import load_pretrained

# What each variant adds to the merged backbone.
VARIANTS: dict[str, TokenResidual | None] = {
    "original": None,
    "nsr": TokenResidual(),
    "feature": TokenResidual(spatial=False),
    "spatial": TokenResidual(feature=False),
    "post-merge": TokenResidual(spatial=False, post_merge_only=True),
    "raw-source": TokenResidual(source="raw"),
    "adapter": TokenResidual(),
}
WEIGHTS = Path("deit_tiny") / "deit_tiny_patch16_224.fp16.safetensors"
_ADDED = ("vit.branches.", "vit.spatial.")


def make_backbone(task: SegmentationTask, folder: Path) -> VisionTransformer:
    """The task's ViT: DeiT-Tiny with ImageNet's weights, its position embeddings resized, or a small one from scratch.

    Args:
        task: Says which.
        folder: Where the data is; DeiT's weights are in ``deit_tiny`` there.
    """
    shape = task.shape
    if not task.pretrained:
        return VisionTransformer(
            img_size=task.window,
            patch_size=shape.patch,
            embed_dim=shape.dim,
            depth=shape.depth,
            num_heads=shape.heads,
            num_classes=0,
        )
    path = folder / WEIGHTS
    if not path.is_file():
        raise ValueError(
            f"DeiT-Tiny's weights are not at {path}. Save timm's deit_tiny_patch16_224.fb_in1k there as safetensors: "
            "it is model.safetensors of huggingface.co/timm/deit_tiny_patch16_224.fb_in1k."
        )
    return copy.deepcopy(_deit_tiny(task.window, path))


@cache
def _deit_tiny(window: tuple[int, int], path: Path) -> VisionTransformer:
    """Built and read once a process, which makes dozens of them in a sweep; for copies alone."""
    with torch.random.fork_rng(devices=[]):  # whoever comes first draws no other weights than those who come later
        backbone = timm.create_model("deit_tiny_patch16_224", img_size=window, num_classes=0)
    assert isinstance(backbone, VisionTransformer)
    load_pretrained(backbone, path)
    return backbone


def shared_weights(task: SegmentationTask, seed: int, folder: Path) -> dict[str, Tensor]:
    """Backbone and head that all compared models of a seed start from. The global random stream is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Segmenter(MergedViT(make_backbone(task, folder), None), task.shape.classes).state_dict()


def make_segmenter(
    task: SegmentationTask, rule: MergeRule | None, variant: str, shared: dict[str, Tensor], seed: int, folder: Path
) -> Segmenter:
    """A model with the shared weights copied into it, its branches initialised from ``seed``.

    The variant ``adapter`` is ``nsr`` with its backbone frozen.
    """
    if variant not in VARIANTS:
        raise ValueError(f"Unknown variant {variant!r}; expected {', '.join(VARIANTS)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Segmenter(MergedViT(make_backbone(task, folder), rule, VARIANTS[variant]), task.shape.classes)
    missing, unexpected = model.load_state_dict(shared, strict=False)
    assert not unexpected, unexpected
    assert all(name.startswith(_ADDED) for name in missing), missing
    if variant == "adapter":
        model.vit.freeze_backbone()
    return model
