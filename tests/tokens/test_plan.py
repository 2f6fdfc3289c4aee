from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import nsr
from contracts.operator import Case, OperatorContract
from nsr.tokens import MergePlan, PiToMe, ToMe, tome_plan
from nsr.tokens.merged_part import merged_part


def dense(plan: MergePlan) -> Tensor:
    """The matrix of a plan, entry by entry: ``[B, G, N]``."""
    batch, length = plan.group.shape
    matrix = torch.zeros(batch, plan.num_groups, length, dtype=plan.weight.dtype)
    for b in range(batch):
        for i in range(length):
            matrix[b, plan.group[b, i], i] = plan.weight[b, i]
    return matrix


def padded_plan() -> MergePlan:
    """Sample 0: two pairs, two tokens of padding. Sample 1: a triple. Both behind one prefix token."""
    return MergePlan(
        group=torch.tensor([[0, 1, 2, 1, 2, 3, 3], [0, 1, 1, 2, 1, 3, 4]]),
        weight=torch.tensor([[1, 0.25, 0.5, 0.75, 0.5, 0, 0], [1, 0.25, 0.25, 1, 0.5, 1, 1]]),
        num_groups=5,
        max_merged=4,
        valid=torch.tensor([[True, True, True, False, False], [True] * 5]),
    )


class TestAsOperator(OperatorContract):
    """A plan is an operator like any other."""

    def case(self, dtype: torch.dtype) -> Case:
        x = torch.randn(2, 12, 3, dtype=dtype)
        plan = tome_plan(x, 4, size=torch.randint(1, 4, (2, 12)).float())
        plan = MergePlan(plan.group, plan.weight.to(dtype), plan.num_groups, plan.max_merged)
        # in double precision the weights have to sum to one in double precision
        total = torch.zeros(2, 8, dtype=dtype).scatter_add(1, plan.group, plan.weight).gather(1, plan.group)
        plan = MergePlan(plan.group, plan.weight / total, plan.num_groups, plan.max_merged)
        return Case(plan.as_segment(), dense(plan), x)


def test_padding_contributes_nothing():
    plan = padded_plan()
    x = torch.randn(2, 7, 3)
    y = plan.merge(x)
    torch.testing.assert_close(y, dense(plan) @ x)
    assert (y[0, 3:] == 0).all()
    assert plan.counts().tolist() == [[1, 2, 2, 0, 0], [1, 3, 1, 1, 1]]
    assert plan.merged_size(torch.full((2, 7), 2.0)).tolist() == [[2, 4, 4, 0, 0], [2, 6, 2, 2, 2]]
    assert plan.members_of_merged().tolist() == [
        [False, True, True, True, True, False, False],
        [False, True, True, False, True, False, False],
    ]


def test_identity_is_neutral():
    plan = padded_plan()
    before = MergePlan.identity(2, 7).then(plan)
    after = plan.then(MergePlan.identity(2, 5))
    for composed in (before, after):
        assert torch.equal(composed.group, plan.group)
        assert torch.equal(composed.weight, plan.weight)
    x = torch.randn(2, 7, 3)
    assert torch.equal(MergePlan.identity(2, 7).merge(x), x)


def test_half_precision_is_summed_in_fp32():
    x = torch.randn(1, 4096, 2).bfloat16()
    group = torch.zeros(1, 4096, dtype=torch.long)
    plan = MergePlan(group, torch.full((1, 4096), 1 / 4096), 1, max_merged=4096)
    assert plan.merge(x).dtype == torch.bfloat16
    torch.testing.assert_close(plan.merge(x), x.float().mean(1, keepdim=True).bfloat16())


def test_route_follows_tokens():
    plan = padded_plan()
    assert plan.route(torch.tensor([[4, 1], [6, 6]])).tolist() == [[2, 1], [4, 4]]


def test_plans_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="this plan makes 5 tokens for a batch of 2, the next one takes 7"):
        padded_plan().then(padded_plan())
    with pytest.raises(ValueError, match=r"expected \[2, 7, D\]"):
        padded_plan().merge(torch.randn(2, 6, 3))


@given(seed=st.integers(0, 10**6))
def test_the_merged_part_is_the_plan_without_its_singletons(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 14, 3, generator=generator)
    plan = tome_plan(x, 1 + seed % 6) if seed % 7 else padded_plan()
    x = x[:, : plan.group.shape[1]]
    part = merged_part(plan)
    members, groups = plan.members_of_merged(), plan.counts() > 1
    assert torch.equal(part.members.filled.sum(1), members.sum(1))
    assert torch.equal(part.groups.filled.sum(1), groups.sum(1))
    # members, merged within the part, are the merged groups of the whole; everything else is exactly 0
    merged = part.groups.spread(part.plan.merge(part.members.take(x)))
    torch.testing.assert_close(merged, plan.merge(x) * groups.unsqueeze(-1))
    assert torch.equal(part.members.spread(part.members.take(x)), x * members.unsqueeze(-1))
    # unfilled slots carry nothing out, whatever they hold
    noisy = torch.where(part.members.filled.unsqueeze(-1), part.members.take(x), torch.nan)
    assert torch.equal(part.members.spread(noisy), x * members.unsqueeze(-1))


class MergeTwice(torch.nn.Module):
    """Two events of a rule: all that a plan does, with fixed shapes."""

    def __init__(self, rule: nsr.tokens.MergeRule, layers: tuple[int, int]) -> None:
        super().__init__()
        self.rule, self.layers = rule, layers

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = torch.ones_like(x[..., 0])
        first = self.rule.plan(x, layer=self.layers[0], depth=12, size=size)
        y, size = first.merge(x), first.merged_size(size)
        second = self.rule.plan(y, layer=self.layers[1], depth=12, size=size)
        whole = first.then(second)
        return whole.unmerge(second.merge(y)), second.merged_size(size), whole.group


STATIC = [(ToMe(r=4), (0, 1)), (PiToMe(keep=0.75), (5, 6))]


@pytest.mark.parametrize(("rule", "layers"), STATIC, ids=["tome", "pitome"])
def test_fixed_counts_compile_to_one_graph(rule, layers):
    model = MergeTwice(rule, layers)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x = torch.randn(2, 17, 5, generator=torch.Generator().manual_seed(seed))
        for got, expected in zip(compiled(x), model(x), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("rule", "layers"), STATIC, ids=["tome", "pitome"])
def test_fixed_counts_export_and_run_in_onnxruntime(rule, layers, tmp_path):
    model = MergeTwice(rule, layers).eval()
    inputs = [torch.randn(2, 17, 4) for _ in range(5)]
    exported = torch.export.export(model, (inputs[0],))
    onnx = in_onnxruntime(model, inputs[0], tmp_path)
    for x in inputs:
        expected = model(x)
        for got, want in zip(exported.module()(x), expected, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(onnx(x), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_onnxruntime_breaks_ties_the_same_way(tmp_path):
    class Groups(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tome_plan(x, 4).group

    # corners of a cube: cosines are exact, and most of them equal
    inputs = [torch.where(torch.randn(2, 17, 4) > 0, 1.0, -1.0) for _ in range(20)]
    onnx = in_onnxruntime(Groups(), inputs[0], tmp_path)
    for x in inputs:
        assert torch.equal(onnx(x)[0], tome_plan(x, 4).group)


def in_onnxruntime(model: torch.nn.Module, x: Tensor, folder: Path) -> Callable[[Tensor], list[Tensor]]:
    path = str(folder / "model.onnx")
    torch.onnx.export(model.eval(), (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: [torch.from_numpy(output) for output in session.run(None, {name: x.numpy()})]
