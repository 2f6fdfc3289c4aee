"""The token kernels against their plain twins: ``token_checks.py DEVICE SEED [CHECK ...]``.

On a CPU the kernels run under Triton's interpreter. ``TRITON_INTERPRET`` must be set before Triton is imported, so
:mod:`test_token_kernels` runs this file as a program of its own. Every check draws fresh inputs from the seed.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial

os.environ["TRITON_INTERPRET"] = "1" if sys.argv[1] == "cpu" else "0"

import timm
import torch
from torch import Tensor
from torch.nn import functional

from nsr.kernels import tokens as kernels
from nsr.kernels.tokens import linear
from nsr.tokens import MPM, MergedViT, MergePlan, PiToMe, TokenBranch, TokenResidual, ToMe, host
from nsr.tokens.attention import biased_attention_reference, sized_attention
from nsr.tokens.branch import EventCodes, spread_codes
from nsr.tokens.matching import descending
from nsr.tokens.mpm import mpm_plan, nearest_other
from nsr.tokens.pitome import pitome_energy, pitome_plan
from nsr.tokens.rule import MergeRule
from nsr.tokens.similarity import compared, grid_cosine, grid_features
from nsr.tokens.tome import tome_plan

DTYPES = (torch.float32, torch.bfloat16)


def signs(*shape: int) -> Tensor:
    """Features of ±1 in 16 channels: lengths and cosines are exact in fp32, and ties are everywhere."""
    return torch.randint(0, 2, (*shape, 16)) * 2.0 - 1.0


def metrics(batch: int, length: int) -> list[Tensor]:
    drawn = [torch.randn(batch, length, width).to(kind) for kind in DTYPES for width in (24, 64)]
    broken = torch.randn(batch, length, 16)
    broken[0, length // 2] = torch.nan
    return [*drawn, signs(batch, length), torch.zeros(batch, length, 16), broken]


def same_plan(fast: MergePlan | None, plain: MergePlan | None) -> None:
    assert (fast is None) == (plain is None)
    if fast is None or plain is None:
        return
    assert fast.layout is not None
    assert plain.layout is None
    assert torch.equal(fast.group, plain.group)
    assert fast.num_groups == plain.num_groups
    assert fast.max_merged == plain.max_merged
    torch.testing.assert_close(fast.weight, plain.weight, rtol=1e-6, atol=0)
    if plain.size is not None:
        assert fast.size is not None
        assert torch.equal(fast.size, plain.size)
    if plain.valid is not None:
        assert fast.valid is not None
        assert torch.equal(fast.valid, plain.valid)


def both(make: Callable[[], MergePlan | None]) -> None:
    with kernels.token_kernels(True):
        fast = make()
    with kernels.token_kernels(False):
        same_plan(fast, make())


def check_tome() -> None:
    for length, r, prefix in (
        (2, 1, 1),
        (9, 4, 0),
        (71, 20, 1),
        (135, 67, 1),
        (257, 100, 1),
        (300, 90, 1),
        (40, 10, 3),
        (12, 40, 5),
    ):
        size = torch.randint(1, 9, (2, length)).float()
        for metric in metrics(2, length):
            both(partial(tome_plan, metric, r, size=size, num_prefix=prefix))


def check_pitome() -> None:
    for length, r, prefix in ((3, 1, 1), (70, 17, 1), (41, 19, 2)):
        for protect in (False, True):
            for metric in metrics(2, length)[:4]:
                both(partial(pitome_plan, metric, r, margin=0.4, protect=protect, num_prefix=prefix))
    x = torch.randn(2, 70, 32)
    x[1, 3] = torch.nan
    terms = kernels.split_features(x.unsqueeze(1))
    assert torch.equal(kernels.energy(terms, 0.6), pitome_energy(x, 0.6))


def check_features() -> None:
    for kind in DTYPES:
        for width in (16, 64, 192, 200):
            keys = torch.randn(2, 37, 3, width).transpose(1, 2) * torch.rand(37, 1)
            # the interpreter cuts numbers off where a GPU rounds, so there the mean stays in fp32
            keys = keys.to(kind if keys.is_cuda else torch.float32)
            keys[0, :, 5] = 0.0
            high, low = kernels.split_features(keys).double().unbind(2)
            expected = grid_features(compared(keys))
            bits = kernels.low_bits(width)
            assert torch.equal(high * 2**bits + low, expected.double())
            assert high.abs().max() <= 2**11
            assert low.abs().max() <= 2 ** (bits - 1)
            x = torch.cat([keys[:, 0], keys[:, 0] + 1e-3 * torch.randn_like(keys[:, 0])], dim=1)
            features = grid_features(x)
            best, _ = kernels.best_match(kernels.split_features(x.unsqueeze(1)), None, None, 0, 37, 37, 37, 1, False)
            assert torch.equal(best, grid_cosine(features[:, :37], features[:, 37:]).amax(-1))

    # so many that other tiles are taken
    features = torch.randn(40, 110, 16)
    terms = kernels.split_features(features.unsqueeze(1))
    best, partner = kernels.best_match(terms, None, None, 0, 55, 55, 55, 1, False)
    expected = grid_cosine(*grid_features(features).split(55, dim=1)).max(-1)
    assert torch.equal(best, expected.values)
    assert torch.equal(partner, expected.indices)


def check_mpm() -> None:
    for length, prefix in ((2, 1), (3, 1), (77, 1), (40, 0)):
        valid = torch.arange(length) < torch.tensor([[length], [max(prefix + 1, length - 7)]])
        for metric in (torch.randn(2, length, 40), signs(2, length), torch.randn(2, length, 40).bfloat16()):
            both(partial(mpm_plan, metric, num_prefix=prefix))
            both(partial(mpm_plan, metric, num_prefix=prefix, valid=valid))
    x = torch.randn(1, 1, 8)
    with kernels.token_kernels(True):
        assert torch.equal(nearest_other(x, None), torch.zeros(1, 1, dtype=torch.int64))


def check_descending() -> None:
    for score in (
        torch.randn(3, 77),
        torch.randint(-2, 3, (3, 130)).float() * 0.0,
        torch.randint(0, 5, (2, 9)).float(),
    ):
        score[0, 1] = torch.nan
        score[-1, 0] = -0.0
        with kernels.token_kernels(False):
            assert torch.equal(kernels.descending(score), descending(score))


def random_branch(dim: int, settings: TokenResidual) -> TokenBranch:
    branch = TokenBranch(dim, settings).requires_grad_(False)
    for parameter in branch.parameters():
        parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else 0.3))
    return branch


def plans(x: Tensor) -> list[MergePlan]:
    batch, length, _ = x.shape
    size = torch.randint(1, 9, (batch, length)).float()
    one_group = tome_plan(torch.ones(batch, length, 16), length // 3, size=size)
    found = [tome_plan(x, length // 4, size=size), one_group, mpm_plan(x)]
    padded = mpm_plan(x, valid=torch.arange(length).expand(batch, -1) < length - 5)
    assert all(plan is not None for plan in (*found, padded))
    return [*found, padded]  # type: ignore[list-item]


CONTROLS = ({"source": "raw"}, {"post_merge_only": True, "spatial": False})


def check_merge() -> None:
    cases = {
        (100, 64): [TokenResidual()],
        (33, 24): [
            TokenResidual(code=20, hidden=9),
            TokenResidual(feature=False),
            *(TokenResidual(**c) for c in CONTROLS),
        ],
    }
    for (length, width), all_settings in cases.items():
        x = torch.randn(2, length, width)
        for settings in all_settings:
            branch = random_branch(width, settings)
            with kernels.token_kernels(True):
                fast_plans = plans(x)
            for fast in fast_plans:
                plain = MergePlan(fast.group, fast.weight, fast.num_groups, fast.max_merged, fast.valid)
                torch.testing.assert_close(fast.merge(x), plain.merge(x), rtol=1e-5, atol=1e-6)
                # more than the kernels can do
                torch.testing.assert_close(fast.merge(x.double()), plain.merge(x.double()), rtol=1e-14, atol=1e-14)
                tokens, codes = branch.merge(fast, x)
                expected, expected_codes = branch.merge(plain, x)
                torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(codes, expected_codes, rtol=1e-4, atol=1e-5)
                half_tokens, half_codes = branch.merge(fast, x.bfloat16())
                assert half_tokens.dtype == half_codes.dtype == torch.bfloat16
                assert (half_codes - expected_codes).norm() <= 0.03 * expected_codes.norm()


def check_merge_gradient() -> None:
    x = torch.randn(2, 40, 24)
    with kernels.token_kernels(True):
        fast = tome_plan(x, 15)
    with kernels.token_kernels(False):
        plain = tome_plan(x, 15)
    assert fast is not None
    assert plain is not None
    weight = torch.randn(2, fast.num_groups, 24)
    grads = []
    for plan in (fast, plain):
        leaf = x.clone().requires_grad_()
        (plan.merge(leaf) * weight).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def check_residual_gradient() -> None:
    controls = (TokenResidual(code=20, hidden=9, **control) for control in CONTROLS)
    for settings in (TokenResidual(hidden=9), TokenResidual(code=20, feature=False), *controls):
        x = torch.randn(2, 45, 40)
        branch = random_branch(40, settings).requires_grad_()
        with kernels.token_kernels(True):
            fast_plans = plans(x)
        for fast in fast_plans:
            plain = MergePlan(fast.group, fast.weight, fast.num_groups, fast.max_merged, fast.valid)
            to_tokens, to_codes = torch.randn(2, fast.num_groups, 40), torch.randn(2, 45, settings.code)
            grads = []
            for plan in (fast, plain):
                leaf = x.clone().requires_grad_()
                tokens, codes = branch.merge(plan, leaf)
                loss = (tokens * to_tokens).sum() + (codes * to_codes).sum()
                grads.append(torch.autograd.grad(loss, [leaf, *branch.parameters()]))
            for mine, expected in zip(*grads, strict=True):
                assert (mine - expected).norm() <= 1e-5 * expected.norm()


def check_stacked_branches() -> None:
    """Branches of several models in one call are those of each in a call of its own, gradients too."""
    all_settings = [TokenResidual(code=20, hidden=9, **kind) for kind in ({}, *CONTROLS)]
    branches = [random_branch(40, settings) for settings in all_settings]
    stacked = [torch.stack(parts).requires_grad_() for parts in zip(*(b.weights() for b in branches), strict=True)]
    sources = [settings.encoded for settings in all_settings]
    for kind, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        x = torch.randn(6, 45, 40).to(kind).requires_grad_()
        with kernels.token_kernels(True):
            merged, *_, padded = plans(x.detach().float())
        for plan in (merged, padded):
            assert plan.layout is not None
            tokens, codes = kernels.merge_residual(
                x, plan.layout, kernels.BranchWeights(*stacked), plan.max_merged, sources
            )
            loss = (tokens.float() * torch.linspace(-1, 1, 40)).sum() + codes.float().square().sum()
            whole = torch.autograd.grad(loss, [x, *stacked])
            for model, branch in enumerate(branches):
                share = slice(2 * model, 2 * model + 2)
                own = x[share].detach().requires_grad_()
                branch.requires_grad_()
                part = dataclasses.replace(
                    plan, layout=kernels.GroupLayout(*(t[share].contiguous() for t in plan.layout))
                )
                own_tokens, own_codes = branch.merge(part, own)
                assert torch.equal(tokens[share], own_tokens)
                assert torch.equal(codes[share], own_codes)
                loss = (own_tokens.float() * torch.linspace(-1, 1, 40)).sum() + own_codes.float().square().sum()
                grads = torch.autograd.grad(loss, [own, *branch.weights()])
                for mine, expected in zip([whole[0][share], *(g[model] for g in whole[1:])], grads, strict=True):
                    assert (mine.float() - expected.float()).norm() <= bound * expected.float().norm()


def check_spread() -> None:
    length, events = 70, []
    for r in (20, 11, 9):
        with kernels.token_kernels(True):
            plan = tome_plan(torch.randn(2, length, 16), r, num_prefix=2)
        assert plan is not None
        events.append(EventCodes(torch.randn(2, length, 20, requires_grad=True), plan))
        length -= r
    plain = [event._replace(plan=dataclasses.replace(event.plan, layout=None)) for event in events]
    fast, expected = spread_codes(events, 2), spread_codes(plain, 2)
    torch.testing.assert_close(fast, expected)
    weight = torch.randn_like(fast)
    leaves = [event.codes for event in events]
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in (fast, expected)]
    torch.testing.assert_close(*grads)


def check_unmerge() -> None:
    length, plans, token = 70, [], torch.arange(2, 70).expand(2, -1)
    for r in (20, 11, 9):
        with kernels.token_kernels(True):
            plan = tome_plan(torch.randn(2, length, 16), r, num_prefix=2)
        assert plan is not None
        plans.append(plan)
        token = plan.route(token)
        length -= r
    for kind in DTYPES:
        x = torch.randn(2, length, 24).to(kind).requires_grad_()
        fast = kernels.unmerge(x, [plan.layout for plan in plans], 2)  # type: ignore[misc]
        expected = x.gather(1, token.unsqueeze(-1).expand(-1, -1, 24))
        assert torch.equal(fast, expected)
        weight = torch.randn_like(fast)
        grads = [torch.autograd.grad((out * weight).sum(), x)[0] for out in (fast, expected)]
        assert (grads[0] - grads[1]).norm() <= (1e-6 if kind == torch.float32 else 0.02) * grads[1].norm()


def check_restore() -> None:
    """Both ways back to the patches at once are one after the other."""
    length, events = 70, []
    for r in (20, 11, 9):
        with kernels.token_kernels(True):
            plan = tome_plan(torch.randn(2, length, 16), r, num_prefix=2)
        assert plan is not None
        events.append(EventCodes(torch.randn(2, length, 20).bfloat16(), plan))
        length -= r
    x, decoder = torch.randn(2, length, 24).bfloat16(), torch.randn(24, 20).bfloat16()
    layouts = [event.plan.layout for event in events]
    fast = kernels.restore(x, [event.codes for event in events], layouts, decoder, 2)  # type: ignore[misc, arg-type]
    decoded = (spread_codes(events, 2).float() @ decoder.float().T).bfloat16()
    expected = kernels.unmerge(x, layouts, 2) + decoded  # type: ignore[arg-type]
    assert (fast.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def check_attention() -> None:
    attention_equals_its_reference(torch.float32, 1e-5)


def check_half_attention() -> None:
    attention_equals_its_reference(torch.bfloat16, 0.02)


def attention_equals_its_reference(kind: torch.dtype, bound: float) -> None:
    for length, width in ((5, 24), (70, 64), (130, 24)):
        qkv = torch.randn(2, length, 3, 2, width)
        to_out = torch.randn(2, length, 2, width)
        weight = torch.rand(2, length) + 0.1
        weight[0, length // 2 :] = 0.0
        for given in (weight, None):
            exact, fast = qkv.double().requires_grad_(), qkv.to(kind).requires_grad_()
            bias = None if given is None else given.log()
            expected = biased_attention_reference(*exact.permute(2, 0, 3, 1, 4).unbind(0), bias).transpose(1, 2)
            out = kernels.attention(fast, given)
            assert torch.equal(out, kernels.attention(fast.detach(), given))
            assert (out - expected).norm() <= bound * expected.norm()
            (grad,), (exact_grad,) = (
                torch.autograd.grad(o, leaf, to_out.to(o.dtype)) for o, leaf in ((out, fast), (expected, exact))
            )
            assert (grad - exact_grad).norm() <= bound * exact_grad.norm()
        if kind == torch.float32:
            counted_attention(qkv, weight, to_out)


def counted_attention(qkv: Tensor, weight: Tensor, to_out: Tensor) -> None:
    """Behind its count a sample is as if it ended there, and gets 0."""
    weight = weight.flip(0)  # the longer one has real keys at its end
    counts = torch.tensor([qkv.shape[1], max(1, qkv.shape[1] // 3)], dtype=torch.int32)
    leaf = qkv.clone().requires_grad_()
    out = kernels.attention(leaf, weight, counts)
    grad = torch.autograd.grad(out, leaf, to_out)[0]
    for sample, count in enumerate(counts.tolist()):
        cut = (slice(sample, sample + 1), slice(0, count))
        alone = qkv[cut].clone().requires_grad_()
        expected = kernels.attention(alone, weight[cut])
        torch.testing.assert_close(out[cut], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            grad[cut], torch.autograd.grad(expected, alone, to_out[cut])[0], rtol=1e-4, atol=1e-5
        )
        assert not out[sample, count:].any()
        assert not grad[sample, count:].any()


def check_beside() -> None:
    """Attention with the matching beside it is one after the other."""
    length, heads, width, prefix = 70, 3, 16, 1
    proj, bias = torch.randn(40, heads * width).bfloat16() / 7, torch.randn(40).bfloat16()
    x = torch.randn(2, length, 40).bfloat16()
    for size in (None, torch.randint(1, 9, (2, length)).float()):
        qkv = torch.randn(2, length, 3, heads, width).bfloat16()
        with kernels.token_kernels(True):
            attended = functional.linear(
                sized_attention(qkv, size, None).flatten(2).double(), proj.double(), bias.double()
            )
            plan = tome_plan(qkv[:, :, 1].transpose(1, 2), 20, size=size, num_prefix=prefix)
            assert plan is not None
            out, layout = kernels.attend_beside(x, qkv, size, proj, bias, kernels.Matching(20, prefix, size))
            assert (out - (x + attended)).abs().max() <= 2**-7 * (x + attended).abs().max()
            expected = plan.layout
            assert expected is not None
            empty = layout.member < 0
            assert torch.equal(empty, expected.member < 0)
            for mine, other in zip(layout, expected, strict=True):
                assert torch.equal(mine, other) or torch.equal(mine[~empty], other[~empty])


def check_linear() -> None:
    """Layers with their norm, activation and addition are one after the other, rounded as often."""
    for rows, width, many in ((37, 24, 8192), (70, 40, 8192), (33, 80, 8192), (150, 16, 64), (150, 80, 64)):
        linear._MANY = many  # so that few rows are cut as many are
        layers = [torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)]
        norm, first, second = (layer.requires_grad_(False) for layer in layers)
        norm.weight.normal_()
        x = torch.randn(1, rows, width) + 2.0
        for kind, bound in ((torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)):
            given = x.to(kind)
            for gelu in (False, True):
                expected = first(norm(given.float()))
                expected = functional.gelu(expected) if gelu else expected
                args = (norm.weight.to(kind), norm.bias.to(kind), norm.eps, first.weight.to(kind), first.bias.to(kind))
                hidden = kernels.norm_linear(given, *args, gelu)
                assert hidden.dtype == kind
                assert (hidden - expected).norm() <= bound * expected.norm()
            expected = given.float() + second(hidden.float())
            out = kernels.linear_add(given, hidden, second.weight.to(kind), second.bias.to(kind))
            assert out.dtype == kind
            assert (out - expected).norm() <= bound * expected.norm()


@torch.no_grad()
def check_half_block() -> None:
    """A whole block in half precision: the plan is that of its own keys, the values are those of the plain layers."""
    block = timm.create_model("deit_tiny_patch16_224", depth=1, embed_dim=48).blocks[0].eval().bfloat16()
    x, size = torch.randn(2, 45, 48).bfloat16(), torch.randint(1, 9, (2, 45)).float()
    with kernels.token_kernels(True):
        fast = host.attention_half(block, x, size, None, kernels.Matching(12, 1, size))
        plan = tome_plan(fast.keys, 12, size=size)
        fast_out = host.mlp_half(block, fast.x)
    with kernels.token_kernels(False):
        plain = host.attention_half(block, x, size, None)
        plain_out = host.mlp_half(block, fast.x)
    assert plan is not None
    assert fast.layout is not None
    assert torch.equal(fast.layout.group, plan.group)
    for mine, expected in ((fast.x, plain.x), (fast.keys, plain.keys), (fast_out, plain_out)):
        assert (mine.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def check_tome_model() -> None:
    model_equals_its_plain_twin(ToMe(r=5))


def check_pitome_model() -> None:
    model_equals_its_plain_twin(PiToMe(keep=0.7))


def check_mpm_model() -> None:
    model_equals_its_plain_twin(MPM(blocks=(0, 1)))


def check_traced_model() -> None:
    """A compiler takes the model whole, kernels and all, with gradient in fp32 and without in bf16."""
    for merger in (ToMe(r=5), PiToMe(keep=0.7), MPM(blocks=(0, 1), keep_length=True)):
        for kind, learns in ((torch.float32, True), (torch.bfloat16, False)):
            vit = small_model(merger).to(kind).requires_grad_(learns)
            image = torch.randn(2, 3, 96, 96, dtype=kind)
            torch.compiler.reset()
            torch.set_default_device(None)  # which torch 2.11 cannot trace
            with kernels.token_kernels(True):
                traced = torch.compile(vit.forward_patches, backend="eager", fullgraph=True)
                torch.testing.assert_close(traced(image), vit.forward_patches(image))
            torch.set_default_device(image.device)


def small_model(merger: MergeRule) -> MergedViT:
    """Two blocks and a branch that does something."""
    backbone = timm.create_model("deit_tiny_patch16_224", img_size=96, depth=2, embed_dim=32, num_heads=2)
    vit = MergedViT(backbone, merger, TokenResidual(code=16)).eval().requires_grad_(False)
    for parameter in (*vit.branches.parameters(), *vit.spatial.parameters()):  # type: ignore[union-attr]
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return vit


def model_equals_its_plain_twin(merger: MergeRule) -> None:
    vit = small_model(merger)
    image = torch.randn(2, 3, 96, 96)
    with kernels.token_kernels(False):
        expected = vit.forward_features(image)
    with kernels.token_kernels(True):
        torch.testing.assert_close(vit.forward_features(image), expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    torch.set_default_device(sys.argv[1])
    torch.manual_seed(int(sys.argv[2]))
    checks = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
    for name in sys.argv[3:] or checks:
        checks[name]()
        print(f"{name} passed", flush=True)
