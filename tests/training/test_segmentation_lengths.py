"""Lengths that are bet on change the work, never what is learned."""

import copy
from functools import cache

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from nsr.data.segmentation.resident import load_resident
from nsr.data.segmentation.shapes import shapes
from nsr.tokens import MPM, MergedViT, Segmenter, TokenResidual, mpm_plan
from nsr.training.segmentation import SegmentationProtocol, SegmentationTrainer, train
from nsr.training.segmentation_feed import EpochDraws, ResidentFeed
from nsr.training.segmentation_lengths import TrialLengths, shortened
from nsr.training.segmentation_stack import SegmenterStack

PROTOCOL = SegmentationProtocol(epochs=4, batch=4, lr=1e-3, precision="fp32", seed=5)
RESIDUALS = (None, TokenResidual(), TokenResidual(source="raw"))


def trainer(device: str = "cpu", capture: bool = False) -> SegmentationTrainer:
    made = []
    for residual in RESIDUALS:
        torch.manual_seed(0)
        backbone = VisionTransformer(img_size=32, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=0)
        made.append(Segmenter(MergedViT(backbone, MPM((0, 1, 2), keep_length=True), residual), 5).to(device))
    data = load_resident(shapes("train", 14), device)
    feed = ResidentFeed(data, EpochDraws(data.sizes, (32, 32), PROTOCOL.batch, PROTOCOL.seed))
    return SegmentationTrainer(SegmenterStack(made), feed, PROTOCOL, capture=capture)


def weights(trained: SegmentationTrainer) -> dict[str, torch.Tensor]:
    return {f"{i}.{n}": v for i, model in enumerate(trained.models) for n, v in model.state_dict().items()}


@cache
def at_full_length(device: str) -> dict[str, torch.Tensor]:
    plain = trainer(device, capture=device == "cuda")
    plain.lengths.review = lambda: False
    train([plain])
    return weights(plain)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_trains_as_at_full_length(device) -> None:
    shorter = trainer(device, capture=device == "cuda")
    train([shorter])
    assert 0 < shorter.lengths.bound[2] < shorter.lengths.bound[0] < 65
    assert all(bound % 8 == 0 for bound in shorter.lengths.bound)
    for name, value in weights(shorter).items():
        atol = 1e-4 if device == "cpu" else 2e-3  # two steps' worth: Adam follows the sign of what is almost zero
        torch.testing.assert_close(value, at_full_length(device)[name], rtol=0, atol=atol, msg=name)


def test_an_epoch_that_outgrows_its_lengths_is_repeated() -> None:
    unlucky = trainer()
    counted = []

    def after_epoch(at: SegmentationTrainer) -> None:
        counted.append(at.epoch)
        if len(counted) == 2:
            at.lengths.bound = [64, 16, 8]

    train([unlucky], after_epoch=after_epoch)
    assert counted == [1, 2, 2, 3, 4]
    assert unlucky.lengths.bound[1] > 16
    for name, value in weights(unlucky).items():
        torch.testing.assert_close(value, at_full_length("cpu")[name], rtol=0, atol=1e-4, msg=name)


def test_resumes_to_the_bit_with_the_same_lengths() -> None:
    whole, again, states = trainer(), trainer(), {}
    train([whole], after_epoch=lambda at: states.update({at.epoch: copy.deepcopy(at.state())}))
    again.load_state(states[2], 2)
    assert any(again.lengths.bound)
    train([again])
    for name, value in weights(again).items():
        assert torch.equal(value, weights(whole)[name]), name


def test_a_shortened_plan_merges_the_same() -> None:
    tokens = torch.randn(4, 33, 8)
    plan = mpm_plan(tokens, keep_length=True)
    assert plan is not None
    assert plan.valid is not None
    longest = int(plan.valid.sum(1).max())
    short = shortened(plan, longest)
    assert short.num_groups == longest < 33
    torch.testing.assert_close(short.merge(tokens), plan.merge(tokens)[:, :longest])
    assert torch.equal(short.valid, plan.valid[:, :longest])
    assert shortened(plan, 40) is plan


def test_a_lost_bet_leaves_room_for_what_was_seen() -> None:
    plan = mpm_plan(torch.randn(4, 33, 8), keep_length=True)
    lengths = TrialLengths(2, torch.device("cpu"))
    assert lengths.cut(plan, 1) is plan
    longest = int(plan.valid.sum(1).max())
    assert lengths.longest.tolist() == [0, longest]
    assert not lengths.review()
    assert lengths.bound[0] == 0
    assert longest < lengths.bound[1] <= longest * 1.06 + 10
    lengths.bound[1] = longest - 1
    assert lengths.cut(plan, 1).num_groups == longest - 1
    assert lengths.review()
    assert lengths.bound[1] > longest
