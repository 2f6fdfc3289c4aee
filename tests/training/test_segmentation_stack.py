"""A stack of segmenters computes, learns and resumes as its models do one by one."""

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch._dynamo.utils import counters

from nsr.data.segmentation.resident import load_resident
from nsr.data.segmentation.shapes import shapes
from nsr.tokens import MPM, MergedViT, PiToMe, Segmenter, TokenResidual, ToMe
from nsr.training import segmentation_stack
from nsr.training.pixel_loss import pixel_cross_entropy
from nsr.training.segmentation import SegmentationProtocol, SegmentationTrainer, train
from nsr.training.segmentation_feed import EpochDraws, ResidentFeed
from nsr.training.segmentation_stack import SegmenterStack

RESIDUALS = (
    None,
    TokenResidual(),
    TokenResidual(spatial=False),
    TokenResidual(feature=False),
    TokenResidual(source="raw"),
    TokenResidual(spatial=False, post_merge_only=True),
)
PROTOCOL = SegmentationProtocol(epochs=3, batch=4, lr=1e-3, precision="fp32", seed=5)


def models(rule, residuals, **changes) -> list[Segmenter]:
    made = []
    for seed, residual in enumerate(residuals):
        torch.manual_seed(seed)
        backbone = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=0, **changes
        )
        made.append(Segmenter(MergedViT(backbone, rule, residual), 5))
        for parameter in made[-1].parameters():  # decoders at zero would hide the branches
            torch.nn.init.normal_(parameter, std=0.2)
    return made


def trainer(model, protocol=PROTOCOL, capture=False, device="cpu") -> SegmentationTrainer:
    data = load_resident(shapes("train", 14), device)
    feed = ResidentFeed(data, EpochDraws(data.sizes, (32, 32), protocol.batch, protocol.seed))
    return SegmentationTrainer(model, feed, protocol, capture=capture)


RULES = {"none": None, "tome": ToMe(r=3), "pitome": PiToMe(keep=0.7), "mpm": MPM((0, 2), keep_length=True)}


@pytest.mark.parametrize("rule", [*RULES.values(), MPM((0, 2))], ids=[*RULES, "mpm-shortened"])
def test_logits_and_gradients_are_those_of_the_models(rule) -> None:
    alone = models(rule, RESIDUALS if rule else (None, None))
    stack = SegmenterStack(copy.deepcopy(alone))
    image, labels = torch.randn(3, 3, 32, 32), torch.randint(0, 5, (3, 32, 32))
    logits = stack.patch_logits(image)
    expected = torch.cat([model.patch_logits(image) for model in alone])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)

    for part in (logits, expected):
        pixel_cross_entropy(part, labels).sum().backward()
    for name, parameter in stack.named_parameters():
        grads = [dict(model.named_parameters()).get(name, torch.zeros(())).grad for model in alone]
        grad = torch.stack([torch.zeros_like(parameter[0]) if own is None else own for own in grads])
        scale = grad.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(parameter.grad / scale, grad / scale, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
def test_compiled_once_for_stacks_of_any_size(monkeypatch) -> None:
    """As on a GPU; the compiler says nothing that would be an error here."""
    monkeypatch.setattr(segmentation_stack, "_compiles", lambda x: True)
    compiled = []
    for rule, residuals in ((ToMe(r=3), RESIDUALS[:2]), (ToMe(r=4), RESIDUALS[:3])):
        alone = models(rule, residuals)
        stack = SegmenterStack(copy.deepcopy(alone))
        image = torch.randn(3, 3, 32, 32)
        logits = stack.patch_logits(image)
        expected = torch.cat([model.patch_logits(image) for model in alone])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        for part in (logits, expected):
            part.square().sum().backward()
        weight = "vit.backbone.blocks.0.mlp.fc1.weight"
        expected_grad = torch.stack([model.get_parameter(weight).grad for model in alone])
        torch.testing.assert_close(stack.weights[weight].grad, expected_grad, rtol=1e-3, atol=1e-4)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[1] > 0


def test_trains_as_one_by_one() -> None:
    alone = models(ToMe(r=3), RESIDUALS[:2])
    stacked = copy.deepcopy(alone)
    together = trainer(SegmenterStack(stacked))
    train([together])
    for index, (one, other) in enumerate(zip(alone, stacked, strict=True)):
        by_itself = trainer(one)
        train([by_itself])
        assert together.mean_losses()[index] == pytest.approx(by_itself.mean_losses()[0], rel=1e-4)
        for name, value in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=1e-4, msg=name)


def test_frozen_backbones_stay() -> None:
    stacked = models(ToMe(r=3), RESIDUALS[1:3])
    for model in stacked:
        model.vit.freeze_backbone()
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in stacked]
    train([trainer(SegmenterStack(stacked))])
    for model, old in zip(stacked, before, strict=True):
        moved = {name for name, value in model.state_dict().items() if not torch.equal(value, old[name])}
        assert {"head.weight", "vit.branches.0.encoder.weight"} <= moved
        assert not any(name.startswith("vit.backbone") for name in moved)


def test_resumes_to_the_bit() -> None:
    whole, half, resumed = (models(ToMe(r=3), RESIDUALS[:3]) for _ in range(3))
    train([trainer(SegmenterStack(whole))])
    states = {}
    train([trainer(SegmenterStack(half))], after_epoch=lambda at: states.update({at.epoch: copy.deepcopy(at.state())}))
    again = trainer(SegmenterStack(resumed))
    again.load_state(states[2], 2)
    train([again])
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one.state_dict()[name], value) for name, value in other.state_dict().items())


def test_what_it_does_not_compute_is_refused() -> None:
    with pytest.raises(AssertionError, match="nothing but norms, attention and MLP"):
        SegmenterStack(models(None, (None, None), init_values=0.1))
    with pytest.raises(AssertionError, match="one rule"):
        SegmenterStack([*models(ToMe(r=3), (None,)), *models(ToMe(r=4), (None,))])
    with pytest.raises(AssertionError, match="another one's gradients overflow"):
        trainer(SegmenterStack(models(None, (None, None))), SegmentationProtocol(3, 4, precision="fp16"))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_captured_stack_equals_captured_models(rule) -> None:
    """Losses rather than weights: Adam blows the noise of vanishing gradients up to full steps."""
    protocol = SegmentationProtocol(4, 4, lr=1e-3, precision="fp32")
    alone = models(rule, RESIDUALS if rule else (None, None))
    stacked = [model.cuda() for model in copy.deepcopy(alone)]
    found: list[list[float]] = []
    train(
        [trainer(SegmenterStack(stacked), protocol, capture=True, device="cuda")],
        watch=lambda progress: found.append(progress.losses),
        every=0,
    )
    expected: list[list[float]] = []
    train(
        [trainer(model.cuda(), protocol, capture=True, device="cuda") for model in alone],
        watch=lambda progress: expected.append(progress.losses),
        every=0,
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=5e-3, atol=0)
