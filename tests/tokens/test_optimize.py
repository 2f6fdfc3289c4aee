"""A model prepared for one shape computes what the model computes, and refuses everything else."""

import pytest
import timm
import torch

from nsr.tokens import MPM, MergedViT, TokenResidual, ToMe
from nsr.tokens.optimize import optimize


def small(merger: ToMe | MPM) -> MergedViT:
    backbone = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=2, embed_dim=24, num_heads=2)
    return MergedViT(backbone, merger, TokenResidual(code=8)).eval()


def test_it_equals_the_model() -> None:
    vit, image = small(ToMe(r=3)), torch.randn(2, 3, 64, 64)
    fast = optimize(vit, 2, 64, compiled=False)
    with torch.no_grad():
        assert torch.equal(fast(image), vit(image))


def test_another_shape_is_refused() -> None:
    fast = optimize(small(ToMe(r=3)), 2, (64, 64), compiled=False)
    with pytest.raises(ValueError, match="was optimised for"):
        fast(torch.randn(3, 3, 64, 64))


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        optimize(small(ToMe(r=3)).train(), 2, 64)


def test_capture_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs the model on a GPU"):
        optimize(small(ToMe(r=3)), 2, 64, capture=True)


def test_image_dependent_counts_run_uncaptured() -> None:
    vit, image = small(MPM(blocks=(0,))), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(optimize(vit, 2, 64, compiled=False)(image), vit(image))
