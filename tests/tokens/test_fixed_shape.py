"""A model prepared for one shape computes what the model computes, and refuses everything else."""

import pytest
import timm
import torch

from nsr.tokens import MPM, MergedViT, Segmenter, TokenResidual, ToMe
from nsr.tokens.fixed_shape import _at_full_length, optimize


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


def test_mpm_at_full_length_reads_no_value_and_gives_the_same() -> None:
    """What a graph captures: static shapes all through, the modules of the model, its result."""
    model, image = Segmenter(small(MPM(blocks=(0, 1))), 5).eval(), torch.randn(2, 3, 64, 64)
    twin = _at_full_length(model)
    assert [id(p) for p in twin.parameters()] == [id(p) for p in model.parameters()]
    assert not model.vit.merger.keep_length  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(twin(image), model(image))
        exported = torch.export.export(twin, (image,)).module()
        torch.testing.assert_close(exported(image.flip(3)), model(image.flip(3)))


def test_a_model_without_mpm_is_its_own_twin() -> None:
    model = small(ToMe(r=3))
    assert _at_full_length(model) is model


@pytest.mark.gpu
@pytest.mark.parametrize("merger", [ToMe(r=3), MPM(blocks=(0, 1))], ids=["tome", "mpm"])
def test_captured_equals_the_model(merger: ToMe | MPM) -> None:
    model = small(merger).cuda()
    fast = optimize(model, 2, 64, compiled=False)
    for _ in range(3):
        image = torch.randn(2, 3, 64, 64, device="cuda")
        with torch.no_grad():
            torch.testing.assert_close(fast(image), model(image), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [224, 384], ids=["few tokens", "many tokens"])
def test_captured_in_half_precision_matches_beside_attention(size: int) -> None:
    """The graph has two branches at every merge; the model itself runs one after the other."""
    torch.manual_seed(0)
    backbone = timm.create_model("deit_tiny_patch16_224", img_size=size, depth=4, num_classes=0)
    model = Segmenter(MergedViT(backbone, ToMe(r=29), TokenResidual()), 5).eval().requires_grad_(False)
    for parameter in (*model.vit.branches.parameters(), *model.vit.spatial.parameters()):  # type: ignore[union-attr]
        parameter.normal_(std=0.3)
    model = model.cuda().bfloat16()
    fast = optimize(model, 4, size, compiled=False)
    for _ in range(5):
        image = torch.randn(4, 3, size, size, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = model(image)
        difference = (fast(image) - expected).float().norm() / expected.float().norm()
        assert difference <= 0.02
