import pytest
import torch
from torch import Tensor

from nsr.tokens import MPM, MergePlan, mpm_plan
from tokens import reference
from tokens.reference import Groups
from tokens.rule_contract import RuleContract, Tokens


class TestMPM(RuleContract):
    takes_padding = True
    size_weighted = False

    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        return MPM(blocks=(3,)).plan(
            tokens.metric, layer=3, depth=12, size=tokens.size, num_prefix=tokens.num_prefix, valid=valid
        )

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        return reference.mpm(metric, tokens.num_prefix)


def test_twice_merged_is_a_mean_of_means():
    x = torch.tensor([[[0.0, 0], [1, 0.02], [1, 0], [1, 0.5], [1, 0.55]]])
    first = mpm_plan(x)
    assert first.group.tolist() == [[0, 1, 1, 2, 2]]
    second = mpm_plan(first.merge(x))
    assert first.then(second).weight.tolist() == [[1, 0.25, 0.25, 0.25, 0.25]]


def test_shorter_samples_are_padded_at_the_end():
    many_pairs = torch.tensor([[0.0, 0], [1, 0], [1, 0.01], [0, 1], [0.01, 1]])
    one_pair = torch.tensor([[0.0, 0], [1, 0], [1, 0.01], [1, 0.1], [1, 0.3]])
    plan = mpm_plan(torch.stack([many_pairs, one_pair]))
    assert plan.num_groups == 4
    assert plan.valid.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert plan.merge(torch.ones(2, 5, 1))[0].flatten().tolist() == [1, 1, 1, 0]
    # merging again: padding goes to padding and contributes nothing
    again = mpm_plan(plan.merge(torch.stack([many_pairs, one_pair])), valid=plan.valid)
    assert again.weight[0, 3] == 0
    assert again.counts().sum(1).tolist() == plan.valid.sum(1).tolist()


def test_no_pair_at_all_is_no_failure():
    # a NaN-free batch always has a pair; all padding but one token has none
    valid = torch.tensor([[True, True, False, False]])
    plan = mpm_plan(torch.randn(1, 4, 3), valid=valid)
    assert plan.num_groups == 2
    assert plan.max_merged == 0
    assert mpm_plan(torch.randn(2, 2, 3)) is None


def test_acts_on_its_schedule_alone():
    rule = MPM(blocks=[0, 4])
    assert rule.layers(12) == (0, 4)
    assert rule.merge_count(4, 100, 12) is None
    assert rule.merge_count(5, 100, 12) == 0
    assert rule.plan(torch.randn(1, 5, 3), layer=5, depth=12) is None


def test_a_schedule_that_names_block_12_of_12_is_refused():
    with pytest.raises(ValueError, match=r"names block 12, but the ViT has 12 blocks.*between 0 and 11"):
        MPM(blocks=(0, 12)).layers(12)


@pytest.mark.parametrize("blocks", [(), (4, 0), (0, 0), (-1,), (0.5,)])
def test_a_bad_schedule_is_refused(blocks):
    with pytest.raises(ValueError, match="blocks"):
        MPM(blocks=blocks)
