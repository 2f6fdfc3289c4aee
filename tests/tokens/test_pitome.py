from fractions import Fraction

import pytest
import torch
from torch import Tensor

from nsr.tokens import MergePlan, PiToMe, pitome_plan
from nsr.tokens.matching import unit
from nsr.tokens.pitome import pitome_energy, pitome_merge_count
from tokens import reference
from tokens.reference import Groups
from tokens.rule_contract import CASES, RuleContract, Tokens, make_tokens


class TestMatchingAll(RuleContract):
    """Blocks 0 to 5. The margin of -1 makes the energy a sum of cosines, so that exact cosines tie exactly."""

    protect = False
    margin = -1.0

    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        if valid is not None:
            return PiToMe(keep=0.7).plan(tokens.metric, layer=0, depth=12, valid=valid)
        return pitome_plan(
            tokens.metric,
            pitome_merge_count(tokens.num_patches, 700),
            margin=self.margin,
            protect=self.protect,
            size=tokens.size,
            num_prefix=tokens.num_prefix,
        )

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        r = tokens.num_patches * 3 // 10
        return reference.pitome(metric, r, self.margin, self.protect, tokens.num_prefix)


class TestProtecting(TestMatchingAll):
    """Blocks 6 to 11."""

    protect = True


@pytest.mark.parametrize("layer", [0, 5, 6, 11])
def test_every_block_has_its_margin_and_its_mode(layer):
    for seed in range(CASES // 10):
        tokens = make_tokens(seed, exact=False, batch=1)
        plan = PiToMe(keep=0.5).plan(tokens.metric, layer=layer, depth=12, num_prefix=tokens.num_prefix)
        groups = reference.pitome(
            tokens.metric[0], tokens.num_patches // 2, 0.75 - 0.75 * layer / 12, layer >= 6, tokens.num_prefix
        )
        got = torch.arange(tokens.metric.shape[1])[None] if plan is None else plan.group
        assert {tuple(sorted(group)) for group in groups} == _as_sets(got[0])


def _as_sets(group: Tensor) -> set[tuple[int, ...]]:
    return {tuple((group == new).nonzero().flatten().tolist()) for new in group.unique()}


def test_counts_are_exact():
    assert pitome_merge_count(450, 540) == 207
    assert PiToMe(keep=0.54).merge_count(0, 450, 12) == 207
    for thousandths in range(500, 1000):
        rule = PiToMe(keep=thousandths / 1000)
        for patches in (1, 2, 99, 196, 450, 1000, 2048):
            exact = patches * (1 - Fraction(thousandths, 1000))
            assert rule.merge_count(0, patches, 12) == exact.numerator // exact.denominator


def test_energy_is_the_mean_of_elus():
    features = unit(torch.randn(2, 7, 3))
    cosines = features.double() @ features.double().mT
    expected = torch.nn.functional.elu(cosines - 0.3).mean(-1)
    torch.testing.assert_close(pitome_energy(features, 0.3).double(), expected, rtol=0, atol=1e-6)


def test_a_lone_token_is_protected():
    # six copies of one direction and one token of its own: the latter has the least energy and never takes part
    x = torch.tensor([[1.0, 0]] * 7 + [[0, 1.0]])[None]
    plan = PiToMe(keep=0.6).plan(x, layer=11, depth=12)
    assert int(plan.counts()[0, plan.group[0, 7]]) == 1
    # prefix, protected in energy order, then the targets
    assert plan.group[0, 0] == 0
    assert plan.group[0, 7] == plan.num_groups - 3


@pytest.mark.parametrize("keep", [0.499, 1.0, -1, float("nan")])
def test_a_keep_ratio_out_of_range_is_refused(keep):
    with pytest.raises(ValueError, match=r"keep must lie in \[0.5, 1\)"):
        PiToMe(keep=keep)


def test_a_keep_ratio_between_thousandths_is_refused():
    with pytest.raises(ValueError, match=r"multiple of 0.001.*0\.75"):
        PiToMe(keep=0.7501)


def test_more_than_half_is_refused():
    with pytest.raises(ValueError, match="half of the 4 patch tokens"):
        pitome_plan(torch.randn(1, 5, 2), 3, margin=0.5, protect=False)
