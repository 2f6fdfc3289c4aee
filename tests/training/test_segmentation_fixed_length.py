"""MPM at a fixed length is MPM: what is trained where steps are captured."""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from nsr.tokens import MPM, MergedViT, Segmenter, TokenResidual, mpm_plan


def test_plans_are_equal() -> None:
    tokens = torch.randn(6, 21, 8)
    plan, fixed = mpm_plan(tokens), mpm_plan(tokens, keep_length=True)
    assert plan is not None
    assert torch.equal(fixed.group, plan.group)
    assert torch.equal(fixed.weight, plan.weight)
    assert fixed.num_groups == 21
    assert fixed.valid is not None
    counts = (plan.counts() > 0).sum(1)
    assert torch.equal(fixed.valid.sum(1), counts)
    assert len(counts.unique()) > 1  # samples of different length took part
    again, fixed_again = (
        mpm_plan(plan.merge(tokens), valid=plan.valid),
        mpm_plan(fixed.merge(tokens), valid=fixed.valid, keep_length=True),
    )
    assert again is not None
    merged = again.merge(plan.merge(tokens))
    torch.testing.assert_close(fixed_again.merge(fixed.merge(tokens))[:, : again.num_groups], merged)


@pytest.mark.parametrize("residual", [None, TokenResidual()])
def test_the_segmenter_computes_and_learns_the_same(residual) -> None:
    models = []
    for rule in (MPM((0, 1, 3)), MPM((0, 1, 3), keep_length=True)):
        torch.manual_seed(0)
        backbone = VisionTransformer(img_size=48, patch_size=8, embed_dim=32, depth=4, num_heads=2, num_classes=0)
        model = Segmenter(MergedViT(backbone, rule, residual), 3)
        for parameter in model.parameters():  # decoders at zero would hide the branch
            torch.nn.init.normal_(parameter, std=0.2)
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    image = torch.randn(3, 3, 48, 48)
    logits = [model(image) for model in models]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    weight = torch.randn_like(logits[0])
    for out in logits:
        (out * weight).sum().backward()
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in models), strict=True):
        if one.grad is None:
            assert other.grad is None, name
        else:
            scale = one.grad.abs().max().clamp(min=1)
            torch.testing.assert_close(other.grad / scale, one.grad / scale, rtol=1e-3, atol=1e-4, msg=name)
