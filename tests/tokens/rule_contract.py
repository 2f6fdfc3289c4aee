"""What every matching rule must satisfy. A rule inherits all of it by giving its plan and its literal reference."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsr.tokens import MergePlan
from tokens.reference import Groups, weights

CASES = 1000

# An inherited test runs on several classes, which hypothesis takes for several executors; ours hold no state.
inherited = settings(suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])


@dataclass(frozen=True)
class Tokens:
    """One batch to merge. ``grid`` is that of the patches."""

    metric: Tensor
    size: Tensor
    num_prefix: int
    grid: tuple[int, int]

    @property
    def num_patches(self) -> int:
        return self.metric.shape[1] - self.num_prefix

    def sample(self, index: int) -> "Tokens":
        return Tokens(self.metric[index : index + 1], self.size[index : index + 1], self.num_prefix, self.grid)


def make_tokens(
    seed: int, *, exact: bool, batch: int = 2, grid: tuple[int, int] | None = None, num_prefix: int | None = None
) -> Tokens:
    """Random tokens and sizes. ``exact``: corners of a cube, whose cosines are exact in any format and often equal."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    if grid is None:
        rows = integer(1, 4)
        grid = (rows, integer(1, 20 // rows))
    num_prefix = integer(0, 3) if num_prefix is None else num_prefix
    shape = (batch, num_prefix + grid[0] * grid[1], 4)
    metric = torch.randn(shape, generator=generator)
    if exact:
        metric = torch.where(metric > 0, 1.0, -1.0)
    size = torch.randint(1, 5, shape[:2], generator=generator).float()
    return Tokens(metric, size, num_prefix, grid)


class RuleContract:
    """Inherit, override ``plan`` and ``reference``, and every test below runs on your rule."""

    takes_padding = False
    size_weighted = True

    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        raise NotImplementedError

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        """The new tokens of one image, whose metric is ``[N, D]``; ``tokens`` holds what else there is to know."""
        raise NotImplementedError

    def plan_or_identity(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan:
        plan = self.plan(tokens, valid)
        if plan is not None:
            return plan
        identity = MergePlan.identity(*tokens.metric.shape[:2])
        return identity if valid is None else MergePlan(identity.group, valid.float(), identity.num_groups, 0, valid)

    def assert_equals_reference(self, tokens: Tokens) -> None:
        plan = self.plan_or_identity(tokens)
        for b in range(tokens.metric.shape[0]):
            groups = self.reference(tokens.metric[b], tokens)
            size = tokens.size[b].tolist() if self.size_weighted else [1.0] * tokens.size.shape[1]
            weight = weights(groups, size)
            for new, group in enumerate(groups):
                for token in group:
                    assert int(plan.group[b, token]) == new
                    assert float(plan.weight[b, token]) == pytest.approx(weight[token], rel=1e-6)
            real = plan.num_groups if plan.valid is None else int(plan.valid[b].sum())
            assert real == len(groups)

    @pytest.mark.parametrize("exact", [True, False], ids=["with-ties", "without"])
    def test_equals_its_literal_reference(self, exact: bool) -> None:
        for seed in range(CASES // 2):
            self.assert_equals_reference(make_tokens(seed, exact=exact, batch=1))

    @pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2)])
    @pytest.mark.parametrize("num_prefix", [0, 1, 2, 5])
    def test_very_few_tokens(self, grid: tuple[int, int], num_prefix: int) -> None:
        self.assert_equals_reference(make_tokens(0, exact=False, grid=grid, num_prefix=num_prefix))

    def test_all_tokens_identical(self) -> None:
        tokens = make_tokens(0, exact=True, grid=(3, 4), num_prefix=1)
        same = Tokens(torch.ones_like(tokens.metric), tokens.size, 1, tokens.grid)
        self.assert_equals_reference(same)

    @inherited
    @given(seed=st.integers(0, 10**6), exact=st.booleans())
    def test_invariants(self, seed: int, exact: bool) -> None:
        tokens = make_tokens(seed, exact=exact, batch=3)
        plan = self.plan_or_identity(tokens)
        _assert_invariants(plan, tokens.num_prefix)
        assert torch.equal(plan.merged_size(tokens.size).sum(1), tokens.size.sum(1))

    @inherited
    @given(seed=st.integers(0, 10**6))
    def test_two_merges_compose(self, seed: int) -> None:
        tokens = make_tokens(seed, exact=False, batch=3)
        first = self.plan_or_identity(tokens)
        grid = (1, first.num_groups - tokens.num_prefix)
        merged = Tokens(first.merge(tokens.metric), first.merged_size(tokens.size), tokens.num_prefix, grid)
        second = self.plan_or_identity(merged, first.valid)
        whole = first.then(second)
        _assert_invariants(whole, tokens.num_prefix)
        x = torch.randn(*tokens.metric.shape[:2], 3)
        stepwise = second.merge(first.merge(x))
        torch.testing.assert_close(whole.merge(x), stepwise)
        assert torch.equal(whole.unmerge(stepwise), first.unmerge(second.unmerge(stepwise)))
        size = second.merged_size(first.merged_size(tokens.size))
        assert torch.equal(whole.merged_size(tokens.size), size)
        assert torch.equal(size.sum(1), tokens.size.sum(1))

    @inherited
    @given(seed=st.integers(0, 10**6), exact=st.booleans())
    def test_a_sample_does_not_depend_on_its_batch(self, seed: int, exact: bool) -> None:
        tokens = make_tokens(seed, exact=exact, batch=3)
        order = torch.tensor([2, 0, 1])
        plan = self.plan_or_identity(tokens)
        shuffled = Tokens(tokens.metric[order], tokens.size[order], tokens.num_prefix, tokens.grid)
        moved = self.plan_or_identity(shuffled)
        assert torch.equal(moved.group, plan.group[order])
        assert torch.equal(moved.weight, plan.weight[order])
        for b in range(3):
            _assert_same_merge(self.plan_or_identity(tokens.sample(b)), plan, b)

    def test_nan_in_one_image_touches_no_other(self) -> None:
        for seed in range(50):
            tokens = make_tokens(seed, exact=False, batch=3)
            clean = self.plan_or_identity(tokens)
            metric = tokens.metric.clone()
            metric[1, seed % metric.shape[1] :] = torch.nan
            plan = self.plan_or_identity(Tokens(metric, tokens.size, tokens.num_prefix, tokens.grid))
            _assert_invariants(plan, tokens.num_prefix)
            for b in (0, 2):
                _assert_same_merge(clean, plan, b, of=b)
                x = torch.where(torch.isnan(metric), torch.nan, 1.0)
                assert torch.isfinite(plan.unmerge(plan.merge(x))[b]).all()

    def test_padding_changes_nothing(self) -> None:
        for seed in range(50):
            tokens = make_tokens(seed, exact=False, batch=2)
            short = 1 + seed % tokens.metric.shape[1]
            valid = torch.ones(tokens.metric.shape[:2], dtype=torch.bool)
            if not self.takes_padding:
                with pytest.raises(ValueError, match="mask"):
                    self.plan(tokens, valid)
                return
            valid[0, max(short, tokens.num_prefix + 1) :] = False
            length = int(valid[0].sum())
            plan = self.plan_or_identity(tokens, valid)
            cut = Tokens(tokens.metric[:1, :length], tokens.size[:1, :length], tokens.num_prefix, (1, 1))
            _assert_same_merge(self.plan_or_identity(cut), plan, 0)
            _assert_same_merge(self.plan_or_identity(tokens.sample(1)), plan, 1)
            _assert_invariants(plan, tokens.num_prefix)
            torch.testing.assert_close(plan.merged_size(tokens.size)[0].sum(), tokens.size[0, :length].sum())
            other = tokens.metric.clone()
            other[0, length:] = 100.0
            again = self.plan_or_identity(Tokens(other, tokens.size, tokens.num_prefix, tokens.grid), valid)
            assert torch.equal(again.group, plan.group)
            assert torch.equal(again.weight, plan.weight)

    def test_matching_is_in_fp32_and_takes_no_gradient(self) -> None:
        tokens = make_tokens(3, exact=False, grid=(4, 5), num_prefix=1)
        plan = self.plan_or_identity(tokens)
        leaf = tokens.metric.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_autocast = self.plan_or_identity(Tokens(leaf, tokens.size, 1, tokens.grid))
        assert torch.equal(under_autocast.group, plan.group)
        assert under_autocast.weight.dtype == torch.float32
        assert not under_autocast.weight.requires_grad


def _assert_same_merge(one: MergePlan, many: MergePlan, index: int, of: int = 0) -> None:
    """Sample ``of`` of ``one`` merges like sample ``index`` of ``many``, which may be longer by padding."""
    length = one.group.shape[1]
    assert torch.equal(one.group[of], many.group[index, :length])
    assert torch.equal(one.weight[of], many.weight[index, :length])
    count = one.counts()[of]
    assert torch.equal(count[count > 0], many.counts()[index][many.counts()[index] > 0])


def _assert_invariants(plan: MergePlan, num_prefix: int) -> None:
    batch, length = plan.group.shape
    assert int(plan.group.min()) >= 0
    assert int(plan.group.max()) < plan.num_groups
    real = plan.counts() > 0
    if plan.valid is None:
        assert real.all()
    else:
        assert torch.equal(real, plan.valid)
        assert not plan.valid.all(), "a mask without padding costs a masked attention"
    sums = torch.zeros(batch, plan.num_groups).scatter_add(1, plan.group, plan.weight)
    torch.testing.assert_close(sums, real.float())
    assert torch.equal(plan.group[:, :num_prefix], torch.arange(num_prefix).expand(batch, -1))
    assert not plan.members_of_merged()[:, :num_prefix].any()
    assert int(plan.members_of_merged().sum(1).max()) <= plan.max_merged

    x = torch.randn(batch, length, 5)
    z = plan.as_segment().residual(x)
    assert float(plan.merge(z).abs().max()) <= 2e-6
    contributes = plan.weight > 0
    constant = plan.unmerge(torch.randn(batch, plan.num_groups, 5))
    torch.testing.assert_close(plan.unmerge(plan.merge(constant))[contributes], constant[contributes])
