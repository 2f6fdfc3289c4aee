import pytest
import torch
from torch import Tensor

import nsr
from nsr.tokens import MergePlan, SpatialDecoder, TokenBranch, TokenResidual, mpm_plan, tome_plan, write_back
from tokens import reference


def trained(dim: int = 6, dtype: torch.dtype = torch.float32, **settings) -> TokenBranch:
    """A branch in which nothing is zero."""
    branch = TokenBranch(dim, TokenResidual(code=5, hidden=4, **settings)).to(dtype)
    for parameter in branch.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return branch


def groups_of(plan: MergePlan, sample: int) -> reference.Groups:
    """The real members of each new token, as the reference writes them."""
    real = plan.weight[sample] > 0
    return [((plan.group[sample] == g) & real).nonzero().flatten().tolist() for g in range(plan.num_groups)]


def run(branch: TokenBranch, plan: MergePlan, x: Tensor) -> tuple[Tensor | None, Tensor]:
    return branch(plan, x, plan.merge(x))


@pytest.mark.parametrize("r", [1, 3, 6])
def test_equals_its_literal_reference(r):
    x = torch.randn(2, 13, 6)
    size = torch.randint(1, 5, (2, 13)).float()
    branch, plan = trained(), tome_plan(x, r, size=size)
    update, codes = run(branch, plan, x)
    for b in range(2):
        groups = groups_of(plan, b)
        expected = reference.branch_codes(branch, x[b], groups, reference.weights(groups, size[b].tolist()))
        torch.testing.assert_close(codes[b], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(update[b], expected[1], rtol=1e-5, atol=1e-6)


def test_gradients_equal_those_of_the_reference():
    x = torch.randn(1, 9, 6, dtype=torch.float64, requires_grad=True)
    branch = trained(dtype=torch.float64)
    plan = tome_plan(x, 3)
    plan = MergePlan(plan.group, plan.weight.double(), plan.num_groups, plan.max_merged)
    update, codes = run(branch, plan, x)
    groups = groups_of(plan, 0)
    weight = dict(enumerate(plan.weight[0].tolist()))
    want_codes, want_update = reference.branch_codes(branch, x[0], groups, weight)
    parameters = [x, *branch.parameters()]
    probe_update, probe_codes = torch.randn_like(update), torch.randn_like(codes)
    got = torch.autograd.grad((update * probe_update).sum() + (codes * probe_codes).sum(), parameters)
    want = torch.autograd.grad((want_update * probe_update[0]).sum() + (want_codes * probe_codes[0]).sum(), parameters)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_parameters_are_those_of_the_paper():
    def count(module: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(TokenBranch(192)) == 46_112
    assert count(SpatialDecoder(192)) == 12_288
    assert count(TokenBranch(192, TokenResidual(post_merge_only=True, spatial=False))) == 46_112
    assert count(TokenBranch(192, TokenResidual(feature=False))) == 46_112 - 12_288


def test_untrained_it_changes_nothing():
    x = torch.randn(2, 12, 16)
    plan = tome_plan(x, 4)
    y = plan.merge(x)
    branch = TokenBranch(16)
    update, codes = branch(plan, x, y)
    assert torch.equal(y + update, y)
    assert codes.abs().max() > 0
    assert (SpatialDecoder(16)(write_back(codes, torch.zeros(2, 3, dtype=torch.long))) == 0).all()
    assert 0.015 < branch.encoder.weight.std().item() < 0.025
    assert (branch.gate_in.bias == 0).all()
    assert (branch.gate_out.bias == 0).all()


def test_singletons_and_padding_have_code_zero_and_finite_gradients():
    x = torch.randn(3, 12, 6)
    x[0, 4:] = x[0, 4]  # identical members: no residual, and the norm at zero
    x.requires_grad_()
    first = mpm_plan(x)
    assert first.valid is not None
    merged = first.merge(x)
    second = mpm_plan(merged, valid=first.valid)
    branch = trained()
    update, codes = branch(second, merged, second.merge(merged))
    alone = ~second.members_of_merged()
    assert (codes[alone] == 0).all()
    assert (update[second.counts() < 2] == 0).all()
    assert not alone.all()
    update.square().sum().add(codes.square().sum()).backward()
    assert torch.isfinite(x.grad).all()
    assert all(torch.isfinite(parameter.grad).all() for parameter in branch.parameters())


def test_a_plan_without_a_merge_is_served():
    x = torch.randn(2, 5, 6)
    update, codes = run(trained(), MergePlan.identity(2, 5), x)
    assert (update == 0).all()
    assert (codes == 0).all()


def test_codes_do_not_depend_on_the_batch():
    x = torch.randn(4, 12, 6)
    branch = trained()
    plan = mpm_plan(x)
    _, codes = run(branch, plan, x)
    for b in range(4):
        _, alone = run(branch, mpm_plan(x[b : b + 1]), x[b : b + 1])
        torch.testing.assert_close(alone[0], codes[b], rtol=1e-5, atol=1e-6)


def test_write_back_equals_the_dense_product():
    num_prefix, patches = 2, 18
    x = torch.randn(2, num_prefix + patches, 6)
    token_of_patch = (num_prefix + torch.arange(patches)).expand(2, -1)
    covers = torch.eye(num_prefix + patches)[num_prefix:].expand(2, -1, -1)  # shape: [B, N0, N]
    branch = trained()
    spatial = dense = torch.zeros(2, patches, 5)
    for r in (5, 4, 2):
        plan = tome_plan(x, r, num_prefix=num_prefix)
        _, codes = run(branch, plan, x)
        spatial = spatial + write_back(codes, token_of_patch)
        dense = dense + covers @ codes
        token_of_patch = plan.route(token_of_patch)
        covers = covers @ torch.nn.functional.one_hot(plan.group, plan.num_groups).float()
        x = plan.merge(x)
    torch.testing.assert_close(spatial, dense)
    assert (spatial.abs().sum(-1) > 0).any()


def test_controls():
    x = torch.randn(2, 12, 6)
    plan = tome_plan(x, 4)
    y = plan.merge(x)
    moved = x + plan.unmerge(torch.randn_like(y))  # other groups, the same residuals

    def change(branch: TokenBranch, input: Tensor) -> float:
        """How much the input of the encoder matters: with the gate held open, codes are linear in it."""
        torch.nn.init.zeros_(branch.gate_in.weight)
        return (run(branch, plan, input)[1] - run(branch, plan, x)[1]).abs().max().item()

    assert change(trained(), moved) < 1e-5
    assert change(trained(source="raw"), moved) > 0.1
    within = plan.unmerge(y)  # every member replaced by its group
    assert change(trained(post_merge_only=True, spatial=False), within) < 1e-5
    assert change(trained(), within) > 0.1
    # raw source keeps the mask of singletons
    codes = run(trained(source="raw"), plan, x)[1]
    assert (codes[~plan.members_of_merged()] == 0).all()


def test_post_merge_codes_are_equal_within_a_group():
    x = torch.randn(2, 12, 6)
    plan = tome_plan(x, 4)
    _, codes = run(trained(post_merge_only=True, spatial=False), plan, x)
    mask = plan.members_of_merged().unsqueeze(-1)
    torch.testing.assert_close(plan.unmerge(plan.merge(codes)) * mask, codes)


def test_without_feature_path_there_is_no_update():
    x = torch.randn(1, 8, 6)
    update, codes = run(trained(feature=False), tome_plan(x, 2), x)
    assert update is None
    assert codes.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_in_fp32_inside(dtype):
    x = torch.randn(2, 12, 6)
    plan = tome_plan(x, 4)
    y = plan.merge(x)
    branch = trained()
    expected = branch(plan, x, y)
    with torch.autocast("cpu", dtype=dtype):
        got = branch(plan, x, y)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    # a model cast as a whole: its weights are rounded, its arithmetic is not
    update, codes = branch.to(dtype)(plan, x.to(dtype), y.to(dtype))
    assert update.dtype == dtype
    assert codes.dtype == torch.float32
    torch.testing.assert_close(codes, expected[1], rtol=0.1, atol=0.1)


def test_branches_save_and_load(tmp_path):
    def model() -> torch.nn.Module:
        return torch.nn.ModuleDict({"branch": trained(), "spatial": SpatialDecoder(6, TokenResidual(code=5))})

    source, target = model(), model()
    torch.nn.init.normal_(source["spatial"].decoder.weight)
    nsr.save(source, tmp_path / "branches.safetensors")
    nsr.load(target, tmp_path / "branches.safetensors")
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value)
    other = torch.nn.ModuleDict({"branch": trained(source="raw"), "spatial": SpatialDecoder(6, TokenResidual(code=5))})
    with pytest.raises(ValueError, match="another branch at 'branch'"):
        nsr.load(other, tmp_path / "branches.safetensors")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"code": 0}, "code"),
        ({"hidden": -1}, "hidden"),
        ({"source": "noise"}, "'residual' or 'raw'"),
        ({"feature": False, "spatial": False}, "no path"),
        ({"post_merge_only": True}, "spatial=False"),
        ({"post_merge_only": True, "spatial": False, "source": "raw"}, "source"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TokenResidual(**settings)


def test_a_spatial_decoder_without_spatial_path_is_refused():
    with pytest.raises(ValueError, match="spatial=True"):
        SpatialDecoder(6, TokenResidual(spatial=False))


def test_compiles_to_one_graph_with_a_trained_branch():
    branch = trained()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        plan = tome_plan(x, 4)
        y = plan.merge(x)
        update, codes = branch(plan, x, y)
        return y + update, codes

    x = torch.randn(2, 12, 6, requires_grad=True)
    expected = step(x)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    (want_grad,) = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), x)
    (got_grad,) = torch.autograd.grad(got[0].square().sum() + got[1].sum(), x)
    for a, b in zip((*got, got_grad), (*expected, want_grad), strict=True):
        torch.testing.assert_close(a, b)
