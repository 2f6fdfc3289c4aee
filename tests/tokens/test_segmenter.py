"""The segmenter: parameters, executed products, restored grid, sliding windows, training, local weights."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from nsr.tokens import DTEM, MPM, MergedViT, PiToMe, Segmenter, TokenResidual, ToMe, budget, load_pretrained
from nsr.tokens.budget import ViTShape
from nsr.tokens.pairs import count_pairs
from nsr.tokens.segmenter import window_starts
from tokens.vits import images, make, train_a_little


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("rule", "img_size", "classes", "printed"),
    [
        (None, (224, 224), 21, 5_528_853),
        (ToMe(r=29), (224, 224), 21, 6_048_373),
        (PiToMe(keep=0.752), (512, 512), 150, 6_278_358),
        (MPM((0, 2)), (512, 1024), 19, 5_988_563),
    ],
    ids=["full-voc", "tome-voc", "pitome-ade20k", "mpm-cityscapes"],
)
def test_parameters_are_the_papers(rule, img_size, classes, printed):
    backbone = timm.create_model("deit_tiny_patch16_224", pretrained=False)
    vit = MergedViT(backbone, rule, TokenResidual() if rule else None, img_size=img_size)
    assert parameters(Segmenter(vit, classes)) == printed


SMALL = ViTShape((4, 6), 5, dim=48, depth=4, heads=3, patch=16)


@pytest.mark.parametrize(
    "rule",
    [None, ToMe(r=3), ToMe(r=100), PiToMe(keep=0.7), PiToMe(0.8, proportional=False), MPM((0, 1, 3))],
    ids=lambda rule: str(rule),
)
@pytest.mark.parametrize(
    "residual",
    [
        None,
        TokenResidual(),
        TokenResidual(spatial=False),
        TokenResidual(feature=False),
        TokenResidual(source="raw"),
        TokenResidual(spatial=False, post_merge_only=True),
        TokenResidual(code=16, hidden=8),
    ],
    ids=["original", "nsr", "feature", "spatial", "raw-source", "post-merge", "narrow"],
)
def test_executed_products_equal_torchs_own_count(rule, residual):
    if rule is None and residual:
        rule = ToMe(r=1)
    model = make()
    segmenter = Segmenter(MergedViT(model, rule, residual), 5).eval()
    image = images(model, batch=1)
    pairs = count_pairs(model, image, rule.blocks)[0] if isinstance(rule, MPM) else None
    events = budget.merge_events(SMALL, rule, pairs) if rule else []
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        segmenter(image)
    # torch counts a multiply-accumulate twice
    assert counter.get_total_flops() == 2 * budget.executed_flops(SMALL, events, residual)
    if residual in (None, TokenResidual()):
        nsr = budget.nsr_parameters(48, len(events)) if residual else 0
        assert parameters(segmenter) == budget.backbone_parameters(SMALL) + nsr


@pytest.mark.parametrize(
    ("rule", "shape", "counted", "executed"),
    [
        (ToMe(r=29), ViTShape((14, 14), 21), 0.093, 0.044),
        (PiToMe(keep=0.754), ViTShape((14, 14), 21), 0.086, 0.043),
        (ToMe(r=124), ViTShape((32, 64), 19), 0.101, 0.007),
    ],
    ids=["tome-voc-3.4x", "pitome-voc-3.4x", "tome-cityscapes-1.8x"],
)
def test_executed_residual_costs_half_of_the_papers_count_or_less(rule, shape, counted, executed):
    """The write-back is a gather, and only members of merged groups are encoded."""
    events = budget.merge_events(shape, rule)
    in_paper = budget.nsr_flops(shape, events) / budget.backbone_flops(shape, events)
    base = budget.executed_flops(shape, events, None)
    assert round(in_paper, 3) == counted
    assert round(budget.executed_flops(shape, events, TokenResidual()) / base - 1, 3) == executed


def test_real_deit_tiny_executes_what_the_budget_says():
    rule, shape = ToMe(r=29), ViTShape((14, 14), 21)
    backbone = timm.create_model("deit_tiny_patch16_224", pretrained=False)
    segmenter = Segmenter(MergedViT(backbone, rule, TokenResidual()), 21).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        logits = segmenter(torch.randn(1, 3, 224, 224))
    assert logits.shape == (1, 21, 224, 224)
    assert counter.get_total_flops() == 2 * budget.executed_flops(
        shape, budget.merge_events(shape, rule), TokenResidual()
    )


def test_logits_have_the_images_resolution_and_its_orientation():
    """A head that reads one feature must show that feature's own restored map, row by row."""
    model = make()
    segmenter = Segmenter(MergedViT(model, ToMe(r=3)), 2).eval()
    segmenter.norm = torch.nn.Identity()
    torch.nn.init.zeros_(segmenter.head.weight)
    segmenter.head.weight.data[1, 7] = 1.0
    image = images(model)
    features = segmenter.vit.forward_features(image)[:, 1:]
    assert segmenter(image).shape == (2, 2, 64, 96)
    assert torch.equal(segmenter.patch_logits(image)[:, 1].flatten(1), features[..., 7])


def test_the_backbones_own_classifier_is_gone():
    model = make("deit-distilled")
    segmenter = Segmenter(MergedViT(model, ToMe(r=3)), 4)
    assert not [name for name in segmenter.state_dict() if name.startswith("vit.backbone.head")]


def test_window_starts_cover_the_image_once_and_stay_inside():
    assert window_starts(1024, 512, 341) == [0, 341, 512]
    assert window_starts(2048, 1024, 682) == [0, 682, 1024]
    assert window_starts(512, 512, 341) == [0]
    for length in range(8, 40):
        starts = window_starts(length, 8, 5)
        covered = {pixel for start in starts for pixel in range(start, start + 8)}
        assert covered == set(range(length))
        assert len(set(starts)) == len(starts)


def test_sliding_window_averages_overlaps():
    model = make()
    segmenter = Segmenter(MergedViT(model, ToMe(r=3)), 3).eval()
    image = torch.randn(2, 3, 96, 160)
    with torch.no_grad():
        logits = segmenter.sliding_window(image, (64, 96), (43, 64), batch=3)
        total, count = torch.zeros(2, 3, 96, 160), torch.zeros(96, 160)
        for top in (0, 32):  # written out by hand: 43 would leave the image, so 32
            for left in (0, 64):
                total[..., top : top + 64, left : left + 96] += segmenter(image[..., top : top + 64, left : left + 96])
                count[top : top + 64, left : left + 96] += 1
    torch.testing.assert_close(logits, total / count, rtol=0, atol=1e-5)
    one = segmenter.sliding_window(image[..., :64, :96], (64, 96), (43, 64))
    torch.testing.assert_close(one, segmenter(image[..., :64, :96]))


def test_a_few_steps_of_training_with_a_frozen_backbone_lower_the_loss():
    model = make()
    segmenter = Segmenter(MergedViT(model, ToMe(r=6), TokenResidual()), 2)
    segmenter.vit.freeze_backbone()
    before = {name: p.clone() for name, p in segmenter.vit.backbone.named_parameters()}
    light = torch.randint(0, 2, (4, 1, 4, 6)).repeat_interleave(16, dim=2).repeat_interleave(16, dim=3)
    image, target = images(model, batch=4) + 2.0 * light, light[:, 0]
    learning = [p for p in segmenter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(segmenter(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(before[name], p) for name, p in segmenter.vit.backbone.named_parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: Segmenter(s.vit, 0), "at least one class"),
        (lambda s: s(torch.zeros(1, 3, 60, 96)), "takes 64 × 96"),
        (
            lambda s: s.sliding_window(torch.zeros(1, 3, 32, 96), (64, 96), (32, 32)),
            "32 pixels where the window has 64",
        ),
        (lambda s: s.sliding_window(torch.zeros(1, 3, 128, 96), (64, 96), (65, 32)), "leaves gaps"),
    ],
)
def test_bad_input_says_what_to_change(call, message):
    with pytest.raises(ValueError, match=message):
        call(Segmenter(MergedViT(make(), ToMe(r=3)), 3))


def test_mpm_counts_pairs_whatever_the_batch():
    model = make()
    image = images(model, batch=5)
    together = count_pairs(model, image, (0, 1, 3))
    assert together == count_pairs(model, image, (0, 1, 3), batch=1)
    assert all(len(pairs) == 3 and pairs[0] > 0 for pairs in together)


def test_local_weights_are_loaded_and_resized(tmp_path):
    model = make()
    save_file({name: t.half().contiguous() for name, t in model.state_dict().items()}, tmp_path / "w.safetensors")
    same = make(num_classes=0)
    load_pretrained(same, tmp_path / "w.safetensors")
    assert torch.equal(same.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight.half().float())
    square = make("vit")
    save_file({name: t.contiguous() for name, t in square.state_dict().items()}, tmp_path / "square.safetensors")
    wide = make("vit", img_size=(64, 128))
    load_pretrained(wide, tmp_path / "square.safetensors")
    square.set_input_size(img_size=(64, 128))
    torch.testing.assert_close(wide.pos_embed, square.pos_embed)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(tmp_path):
    deep, model = make(depth=5), make()
    save_file(deep.state_dict(), tmp_path / "deep.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors here")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for file, message in (
        ("deep.safetensors", r"blocks\.4\..*missing, extra or of another shape"),
        ("broken.safetensors", "not a readable safetensors file"),
        ("absent.safetensors", "There is no checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pretrained(model, tmp_path / file)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.data
def test_deit_tiny_from_a_local_file(data_dir):
    backbone = timm.create_model("deit_tiny_patch16_224", pretrained=False)
    load_pretrained(backbone, data_dir / "deit_tiny" / "deit_tiny_patch16_224.fp16.safetensors")
    assert backbone.cls_token.abs().mean() > 0.05  # trained, where the initial value is about 1e-6
    image = torch.randn(1, 3, 224, 224)
    backbone.eval()
    merged = MergedViT(backbone, ToMe(r=2)).eval()
    with torch.no_grad():
        full, close = backbone(image), merged(image)
    assert torch.nn.functional.cosine_similarity(full, close).item() > 0.9  # two tokens a block hardly matter


def test_trained_branches_move_the_logits():
    model = make()
    segmenter = Segmenter(MergedViT(model, PiToMe(keep=0.7), TokenResidual()), 3).eval()
    image = images(model)
    before = segmenter(image)
    train_a_little(segmenter)
    assert (segmenter(image) - before).abs().max() > 0.01


def test_windows_are_summed_in_fp32():
    segmenter = Segmenter(MergedViT(make(), ToMe(r=3)), 3).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert segmenter(torch.randn(1, 3, 64, 96)).dtype == torch.bfloat16
        assert segmenter.sliding_window(torch.randn(1, 3, 96, 160), (64, 96), (43, 64)).dtype == torch.float32


@pytest.mark.parametrize("merger", [None, ToMe(r=2)])
def test_a_padded_image_has_its_logits_where_its_pixels_are(merger):
    model = make(dynamic_img_size=True, dynamic_img_pad=True)
    segmenter = Segmenter(MergedViT(model, merger), 3).eval()
    image = torch.randn(1, 3, 65, 87, generator=torch.Generator().manual_seed(4))
    padded = torch.nn.functional.pad(image, (0, 96 - 87, 0, 80 - 65))
    out = segmenter(image)
    assert out.shape[-2:] == (65, 87)
    assert torch.equal(out, segmenter(padded)[:, :, :65, :87])


@pytest.mark.parametrize("family", ["deit", "vit-no-class-token", "deit-distilled"])
def test_every_parameter_of_a_segmenter_is_trained(family):
    segmenter = Segmenter(MergedViT(make(family), ToMe(r=2), TokenResidual()), 3)
    segmenter(images(segmenter.vit.backbone)).sum().backward()
    assert [name for name, p in segmenter.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("rule", [ToMe(r=2), DTEM(r=2)], ids=str)
def test_what_is_added_is_of_the_backbones_kind(rule):
    backbone = make().bfloat16()
    segmenter = Segmenter(MergedViT(backbone, rule, TokenResidual()), 3).eval()
    assert {p.dtype for p in segmenter.parameters()} == {torch.bfloat16}
    assert segmenter(images(backbone).bfloat16()).dtype == torch.bfloat16
    on_meta = Segmenter(MergedViT(make().to("meta"), rule, TokenResidual()), 3)
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}


def test_counting_pairs_leaves_every_module_in_its_mode():
    model = make().train()
    model.blocks.eval()
    count_pairs(model, images(model), (0, 1))
    assert model.training
    assert not any(module.training for module in model.blocks.modules())
