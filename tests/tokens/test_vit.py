"""MergedViT against the untouched timm model, against timm's own masked attention, and through torch's machinery."""

import pytest
import timm
import torch

import nsr
from nsr.tokens import ALGM, DTEM, MPM, MergedViT, MergePlan, MergeRule, PiToMe, TokenResidual, ToMe, tome_plan
from nsr.tokens.vit import merge_sites
from tokens.vits import FAMILIES, images, make, train_a_little

RULES = {
    "tome": ToMe(r=3),
    "pitome": PiToMe(keep=0.8),
    "pitome-plain-attention": PiToMe(keep=0.8, proportional=False),
    "mpm": MPM((0, 2)),
    "algm": ALGM(threshold=-0.2, local_layer=0, global_layer=2),
    "dtem": DTEM(r=3, temperature=0.2),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@every_family
@pytest.mark.parametrize("merger", [None, ToMe(r=0)], ids=["no-merger", "r=0"])
def test_nothing_merged_is_the_untouched_model_to_the_bit(family, merger):
    model = make(family)
    vit, image = MergedViT(model, merger), images(model)
    assert torch.equal(vit.forward_features(image), model.forward_features(image))
    assert torch.equal(vit(image), model(image))
    for ours, theirs in zip(
        vit.forward_intermediates(image, intermediates_only=True, norm=True),
        model.forward_intermediates(image, intermediates_only=True, norm=True),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@every_family
def test_training_mode_keeps_drop_path_and_dropout(family):
    model = make(family, drop_path_rate=0.5, proj_drop_rate=0.2).train()
    vit, image = MergedViT(model, ToMe(r=0)), images(model)
    torch.manual_seed(7)
    ours = vit(image)
    torch.manual_seed(7)
    assert torch.equal(ours[0], model(image)[0])


def literal(model, image, r):
    """ToMe by timm's own masked attention, one image after another: slow, and nothing of MergedViT in it."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(image)))
    prefix = model.num_prefix_tokens
    size = torch.ones(x.shape[:2], dtype=x.dtype)
    total = MergePlan.identity(*x.shape[:2])
    for block in model.blocks:
        attn = block.attn
        bias = size.log()[:, None, None, :].expand(-1, attn.num_heads, x.shape[1], -1)
        hidden = block.norm1(x)
        keys = attn.qkv(hidden).unflatten(-1, (3, attn.num_heads, -1))[:, :, 1]  # shape: [B, N, H, d_h]
        x = x + block.drop_path1(block.ls1(attn(hidden, attn_mask=bias)))
        plan = tome_plan(attn.k_norm(keys).mean(dim=2), r, size=size, num_prefix=prefix)
        if plan is not None:
            x, size, total = plan.merge(x), plan.merged_size(size), total.then(plan)
        x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return total.unmerge(model.norm(x))


@every_family
@pytest.mark.parametrize("r", [1, 3, 100])
def test_merged_features_equal_the_literal_loop(family, r):
    model = make(family).double()
    image = images(model).double()
    ours = MergedViT(model, ToMe(r=r)).forward_features(image)
    # log sizes pass through float32
    torch.testing.assert_close(ours, literal(model, image, r), rtol=0, atol=1e-6)


@every_family
@every_rule
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_untrained_residual_is_the_merged_baseline_to_the_bit(family, rule, training):
    model = make(family)
    image = images(model)
    with_nsr, base = MergedViT(model, rule, TokenResidual()).train(training), MergedViT(model, rule).train(training)
    base.embeddings.load_state_dict(with_nsr.embeddings.state_dict())
    assert torch.equal(with_nsr.forward_features(image), base.forward_features(image))


def test_trained_residual_changes_the_output_and_disabled_takes_it_back():
    model = make()
    image = images(model)
    base = MergedViT(model, ToMe(r=3)).forward_features(image)
    vit = MergedViT(model, ToMe(r=3), TokenResidual())
    train_a_little(vit)
    assert (vit.forward_features(image) - base).abs().max() > 0.1
    with nsr.disabled(vit):
        assert torch.equal(vit.forward_features(image), base)


@pytest.mark.parametrize(("feature", "spatial"), [(True, False), (False, True), (True, True)])
def test_each_path_reaches_the_output_alone(feature, spatial):
    model = make()
    image = images(model)
    vit = MergedViT(model, ToMe(r=3), TokenResidual(feature=feature, spatial=spatial))
    train_a_little(vit)
    base = MergedViT(model, ToMe(r=3)).forward_features(image)
    moved = (vit.forward_features(image) - base).abs()
    assert moved[:, 1:].max() > 0.05
    # the class token hears of the feature path through attention, and of the spatial path never
    assert (moved[:, 0].max() > 1e-4) == feature


def test_spatial_path_separates_patches_that_merged():
    """Copy-based unmerging makes the members of a group equal; the spatial path is what tells them apart again."""
    model = make()
    image = images(model)
    vit = MergedViT(model, ToMe(r=3), TokenResidual(feature=False))
    equal_before = pairwise_equal(vit.forward_features(image)[:, 1:])
    train_a_little(vit)
    assert equal_before.sum() > equal_before.shape[0] * equal_before.shape[1]
    assert pairwise_equal(vit.forward_features(image)[:, 1:]).sum() < equal_before.sum()


def pairwise_equal(x):
    return (x[:, :, None] == x[:, None]).all(dim=-1)


@every_rule
def test_sizes_sum_to_the_patches_at_every_block(rule):
    model = make()
    vit, image = MergedViT(model, rule).eval(), images(model)
    state, merged = vit.start(image), False
    for block in range(vit.depth):
        state = vit.step(block, state, (4, 6))
        if state.size is None:
            continue
        merged = merged or state.x.shape[1] < 25
        assert torch.equal(state.size[:, 1:].sum(dim=1), torch.full((2,), 24.0))
        assert torch.equal(state.size[:, 0], torch.ones(2))
        covered = torch.zeros_like(state.size).scatter_add(1, state.token_of_patch, torch.ones(2, 24))
        assert torch.equal(covered[:, 1:], state.size[:, 1:])
    assert merged


@every_rule
def test_a_sample_does_not_depend_on_its_batch(rule):
    model = make()
    vit = MergedViT(model, rule, TokenResidual()).eval()
    train_a_little(vit)
    image = images(model, batch=3)
    together = vit.forward_features(image)
    torch.testing.assert_close(together[1:2], vit.forward_features(image[1:2]), rtol=0, atol=2e-5)
    poisoned = image.clone()
    poisoned[0] = float("nan")
    after = vit.forward_features(poisoned)
    assert after[0].isnan().any()
    torch.testing.assert_close(after[1:], together[1:], rtol=0, atol=2e-5)


@every_rule
def test_activation_checkpointing_gives_the_same_gradients(rule):
    model = make(drop_path_rate=0.3)
    vit = MergedViT(model, rule, TokenResidual()).train()
    train_a_little(vit)
    image = images(model)

    def gradients(enable):
        model.set_grad_checkpointing(enable)
        vit.zero_grad()
        torch.manual_seed(5)
        vit.forward_features(image).square().sum().backward()
        return {name: p.grad.clone() for name, p in vit.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deit", "vit-qk-norm"])
@every_rule
def test_autocast_follows_full_precision(rule, family, dtype):
    model = make(family)
    vit, without = MergedViT(model, rule, TokenResidual()).eval(), MergedViT(model, rule).eval()
    without.embeddings.load_state_dict(vit.embeddings.state_dict())
    image = images(model)
    full = vit.forward_features(image)
    with torch.autocast("cpu", dtype=dtype):
        half, base = vit.forward_features(image), without.forward_features(image)
    assert torch.equal(half, base)
    assert half.isfinite().all()
    # a nearly tied match may fall the other way at half precision, so the typical difference is what is compared
    assert (half.float() - full).abs().median() < 0.05 * full.abs().median()


@every_rule
def test_a_model_cast_to_bfloat16_runs(rule):
    model = make()
    vit = MergedViT(model, rule, TokenResidual()).eval()
    train_a_little(vit)
    full = vit.forward_features(images(model))
    half = vit.bfloat16().forward_features(images(model).bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).abs().median() < 0.2 * full.abs().median()


@every_rule
def test_every_new_parameter_receives_a_gradient(rule):
    model = make()
    vit = MergedViT(model, rule, TokenResidual()).train()
    train_a_little(vit)
    vit.forward_features(images(model)).square().sum().backward()
    for name, parameter in vit.named_parameters():
        if not name.startswith("backbone."):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_frozen_backbone_leaves_the_branches_to_train():
    vit = MergedViT(make(), ToMe(r=3), TokenResidual())
    vit.freeze_backbone()
    learning = {name for name, p in vit.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in vit.named_parameters() if not name.startswith("backbone.")}
    vit.forward_features(images(vit.backbone)).sum().backward()
    assert all(p.grad is None for p in vit.backbone.parameters())


def test_branches_alone_are_saved_and_loaded(tmp_path):
    model = make()
    image = images(model)
    vit = MergedViT(model, ToMe(r=3), TokenResidual())
    train_a_little(vit)
    nsr.save(vit, tmp_path / "branch.safetensors")
    other = MergedViT(make(), ToMe(r=3), TokenResidual())
    nsr.load(other, tmp_path / "branch.safetensors")
    assert torch.equal(other.forward_features(image), vit.forward_features(image))
    with pytest.raises(ValueError, match="same selection of sites"):
        nsr.load(MergedViT(make(depth=3), ToMe(r=3), TokenResidual()), tmp_path / "branch.safetensors")


def test_backbone_keys_stay_as_they_were():
    model = make()
    before = set(model.state_dict())
    vit = MergedViT(model, ToMe(r=3), TokenResidual())
    assert {name.removeprefix("backbone.") for name in vit.state_dict() if name.startswith("backbone.")} == before


def test_intermediates_are_what_the_model_would_give_ending_there():
    model = make()
    image = images(model)
    vit = MergedViT(model, ToMe(r=3), TokenResidual())
    train_a_little(vit)
    final, taken = vit.forward_intermediates(image, [1, 3], norm=True, return_prefix_tokens=True, output_fmt="NLC")
    assert torch.equal(final, vit.forward_features(image))
    assert torch.equal(torch.cat([taken[1][1], taken[1][0]], dim=1), final)
    short = MergedViT(make(), ToMe(r=3), TokenResidual())
    short.load_state_dict(vit.state_dict())
    short.backbone.blocks = short.backbone.blocks[:2]
    assert torch.equal(torch.cat([taken[0][1], taken[0][0]], dim=1), short.forward_features(image))
    maps = vit.forward_intermediates(image, 2, intermediates_only=True, stop_early=True)
    assert [tuple(m.shape) for m in maps] == [(2, 48, 4, 6)] * 2
    assert torch.equal(maps[1].flatten(2).mT, vit.restore(run(vit, image), norm=False)[:, 1:])


def run(vit, image):
    state = vit.start(image)
    for block in range(vit.depth):
        state = vit.step(block, state, (4, 6))
    return state


def test_position_embeddings_are_resized_once():
    model = make("vit")
    reference = make("vit", dynamic_img_size=True)
    reference.load_state_dict(model.state_dict())
    image = torch.randn(1, 3, 64, 128)
    vit = MergedViT(model, ToMe(r=0), img_size=(64, 128))
    assert vit.backbone.patch_embed.grid_size == (4, 8)
    torch.testing.assert_close(vit.forward_features(image), reference.forward_features(image), rtol=0, atol=1e-5)


def test_dynamic_images_merge_too():
    model = make("vit", dynamic_img_size=True)
    vit = MergedViT(model, ToMe(r=2), TokenResidual())
    assert vit.forward_features(torch.randn(1, 3, 48, 80)).shape == (1, 1 + 15, 48)


def test_observer_sees_every_event():
    model = make()
    vit, image = MergedViT(model, ToMe(r=4)), images(model)
    seen = []
    state = vit.start(image)
    for block in range(vit.depth):
        state = vit.step(block, state, (4, 6), lambda b, x, plan: seen.append((b, x.shape[1], plan.num_groups)))
    assert seen == [(0, 25, 21), (1, 21, 17), (2, 17, 13), (3, 13, 9)]


def test_dtem_trains_softly_and_evaluates_hard():
    model = make()
    image = images(model)
    vit = MergedViT(model, DTEM(r=3))
    assert not torch.allclose(vit.train().forward_features(image), vit.eval().forward_features(image), atol=1e-3)
    cold = MergedViT(model, DTEM(r=3, temperature=1e-5))
    cold.embeddings.load_state_dict(vit.embeddings.state_dict())
    torch.testing.assert_close(cold.train().forward_features(image), vit.forward_features(image), rtol=0, atol=1e-3)


def test_sites_are_the_blocks_that_merge():
    assert merge_sites(ToMe(r=29), 12, 196) == list(range(11))  # the paper's 3.4x on VOC has eleven
    assert merge_sites(ToMe(r=0), 12, 196) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", "windows need every token"),
        ("eva02_tiny_patch14_224", "rotary position tables"),
        ("vit_small_patch16_36x1_224", None),
        ("resnet18", "not a timm VisionTransformer"),
    ],
)
def test_models_are_served_or_refused_by_name(name, reason):
    arguments = {"embed_dim": 48, "num_heads": 3, "depth": 2} if name.startswith("vit") else {}
    model = timm.create_model(name, pretrained=False, **arguments)
    if reason is None:
        MergedViT(model, ToMe(r=3))
    else:
        with pytest.raises(ValueError, match=rf"{type(model).__name__}.*{reason}"):
            MergedViT(model, ToMe(r=3))


def test_foreign_blocks_and_attentions_are_refused_by_name():
    from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock

    for block in (ParallelScalingBlock, ResPostBlock):
        with pytest.raises(ValueError, match=rf"Block 0 of VisionTransformer is a {block.__name__}"):
            MergedViT(make(block_fn=block), ToMe(r=3))
    with pytest.raises(ValueError, match=r"attends with DiffAttention"):
        MergedViT(make("vit", attn_layer="diff", num_heads=2), ToMe(r=3))
    with pytest.raises(ValueError, match=r"patch_drop_rate=0\.5"):
        MergedViT(make(patch_drop_rate=0.5), ToMe(r=3))


class EveryOther(MergeRule):
    """A user's own rule is all it takes: merge each patch with its right neighbour, before block 1."""

    where, metric, proportional = "before_block", "tokens", False

    def layers(self, depth):
        return (1,)

    def merge_count(self, layer, num_patches, depth):
        return num_patches // 2

    def plan(self, metric, *, num_prefix, **rest):
        patches = torch.arange(metric.shape[1] - num_prefix) // 2 + num_prefix
        group = torch.cat([torch.arange(num_prefix), patches]).expand(metric.shape[0], -1)
        weight = torch.cat([torch.ones(num_prefix), torch.full(patches.shape, 0.5)]).expand(metric.shape[0], -1)
        return MergePlan(group, weight, num_prefix + len(patches) // 2, max_merged=len(patches))


def test_a_rule_of_ones_own():
    model = make()
    vit = MergedViT(model, EveryOther(), TokenResidual())
    train_a_little(vit)
    features = vit.forward_features(images(model))
    assert list(vit.branches) == ["1"]
    assert features.shape == (2, 25, 48)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MergedViT(make(), "tome"), "Unknown merger 'tome'"),
        (lambda: MergedViT(make(), None, TokenResidual()), "needs a merger"),
        (lambda: MergedViT(make(), ToMe(r=0), TokenResidual()), "merges nothing"),
        (lambda: MergedViT(make(depth=12), MPM((3, 12))), "block 12, but the ViT has 12 blocks"),
        (lambda: MergedViT(make(), PiToMe(keep=0.4)), r"\[0.5, 1\), got 0.4"),
        (lambda: MergedViT(make(), PiToMe(keep=1.0)), r"\[0.5, 1\), got 1.0"),
        (lambda: MergedViT(make(), ToMe(r=3), img_size=(64, 100)), "no multiple of the patch 16 × 16; 64 × 96 is"),
        (lambda: MergedViT(make(), ToMe(r=3))(torch.zeros(1, 3, 64, 100)), r"takes 64 × 96.*img_size=\(64, 96\)"),
        (lambda: MergedViT(make(), ToMe(r=3))(torch.zeros(3, 64, 96)), r"\[B, C, H, W\]"),
        (
            lambda: MergedViT(make(dynamic_img_size=True), ToMe(r=3))(torch.zeros(1, 3, 60, 96)),
            "60 × 96, no multiple of the patch 16 × 16",
        ),
        (
            lambda: MergedViT(make("vit", depth=6, dynamic_img_size=True), ToMe(r=8), TokenResidual())(
                torch.zeros(1, 3, 256, 256)
            ),
            "has no residual branch",
        ),
        (
            lambda: MergedViT(make(), ToMe(r=3)).forward_intermediates(torch.zeros(1, 3, 64, 96), output_fmt="X"),
            "'NCHW'",
        ),
    ],
)
def test_bad_input_says_what_to_change(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_hooks_that_do_not_run_are_spoken_of():
    model = make()
    model.blocks[0].register_forward_hook(lambda *_: None)
    MergedViT(model, ToMe(r=0))(images(model))  # nothing merges, the blocks are called
    with pytest.warns(UserWarning, match=r"blocks\[0\] has forward hooks, which do not run where tokens merge"):
        MergedViT(model, ToMe(r=2))(images(model))


def test_a_block_that_merges_nothing_is_called_whole():
    model, called = make(), []
    model.blocks[0].register_forward_hook(lambda *_: called.append(0))
    MergedViT(model, ToMe(r=0))(images(model))
    assert called == [0]
