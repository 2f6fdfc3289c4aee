import pytest
import torch
from torch import Tensor

from nsr.tokens import MergePlan, ToMe, tome_plan
from tokens import reference
from tokens.reference import Groups
from tokens.rule_contract import RuleContract, Tokens


class TestToMe(RuleContract):
    r = 4

    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        rule = ToMe(r=self.r)
        return rule.plan(tokens.metric, layer=0, depth=12, size=tokens.size, num_prefix=tokens.num_prefix, valid=valid)

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        return reference.tome(metric, self.r, tokens.num_prefix)


class TestMoreThanThereAre(TestToMe):
    r = 1000


def test_counts_follow_the_formula_and_no_merge_is_no_event():
    rule = ToMe(r=29)
    assert [rule.merge_count(layer, patches, 12) for layer, patches in enumerate((196, 60, 57, 2, 1))] == [
        29, 29, 28, 1, 0,
    ]  # fmt: skip
    x = torch.randn(2, 9, 4)
    assert tome_plan(x, 0) is None
    assert tome_plan(x[:, :2], 5) is None
    assert tome_plan(x, 3).num_groups == 6


def test_order_is_unmerged_even_positions_then_odd_ones():
    # positions 2 and 3 are alike, everything else is orthogonal; CLS is 0
    x = torch.eye(6)[None].clone()
    x[0, 2] = x[0, 3]
    plan = tome_plan(x, 1)
    assert plan.group.tolist() == [[0, 2, 3, 3, 1, 4]]
    assert plan.weight.tolist() == [[1, 1, 0.5, 0.5, 1, 1]]


def test_several_sources_share_a_target():
    x = torch.ones(1, 7, 2)
    plan = tome_plan(x, 3, size=torch.tensor([[1.0, 1, 1, 5, 2, 5, 4]]))
    assert plan.group.tolist() == [[0, 1, 1, 2, 1, 3, 1]]
    assert plan.weight.tolist() == [[1, 1 / 8, 1 / 8, 1, 2 / 8, 1, 4 / 8]]


@pytest.mark.parametrize("r", [-1, 2.5, True])
def test_a_bad_r_is_refused(r):
    with pytest.raises(ValueError, match="r must be an integer of at least 0"):
        ToMe(r=r)
