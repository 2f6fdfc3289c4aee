import pytest
import torch
from torch import Tensor

from nsr.tokens import ALGM, MergePlan, algm_global_plan, algm_local_plan
from tokens import reference
from tokens.reference import Groups
from tokens.rule_contract import RuleContract, Tokens

# cosines of cube corners are multiples of a half, and window means multiples of a twelfth: no threshold here is met
# by rounding alone
LOCAL, GLOBAL = 0.2, 0.4


class TestLocal(RuleContract):
    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        rule = ALGM(threshold=LOCAL)
        return rule.plan(
            tokens.metric,
            layer=0,
            depth=12,
            size=tokens.size,
            num_prefix=tokens.num_prefix,
            valid=valid,
            grid=tokens.grid,
        )

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        return reference.algm_local(metric, tokens.grid, LOCAL, tokens.num_prefix)

    def test_two_merges_compose(self) -> None:
        """Windows exist in the unmerged grid alone; what follows them is the global stage."""
        x = torch.randn(3, 1 + 12, 4)
        first = algm_local_plan(x, (4, 3), 0.0)
        second = algm_global_plan(first.merge(x), 0.5, valid=first.valid, size=first.merged_size(torch.ones(3, 13)))
        whole = first.then(second)
        torch.testing.assert_close(whole.merge(x), second.merge(first.merge(x)))
        assert first.num_groups < 13
        assert second.num_groups < first.num_groups


class TestGlobal(RuleContract):
    takes_padding = True

    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        return ALGM(threshold=GLOBAL).plan(
            tokens.metric, layer=4, depth=12, size=tokens.size, num_prefix=tokens.num_prefix, valid=valid
        )

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        return reference.algm_global(metric, GLOBAL, tokens.num_prefix)


def test_windows_of_a_grid_that_is_neither_square_nor_even():
    x = torch.eye(1 + 15)
    x[[1, 2, 6, 7]] = x[1].clone()  # the first window of a 3 x 5 grid
    plan = algm_local_plan(x[None], (3, 5), 0.9)
    assert plan.num_groups == 13
    assert plan.group[0].tolist() == [0, 1, 1, 2, 3, 4, 1, 1, 5, 6, 7, 8, 9, 10, 11, 12]
    assert plan.weight[0, [1, 2, 6, 7]].tolist() == [0.25] * 4


def test_the_published_count_is_that_of_the_batch():
    x = torch.randn(2, 17, 4)
    x[1] = torch.eye(17, 4) + torch.arange(17)[:, None] * torch.tensor([0.0, 0.1, -0.1, 0.05])
    for make in (
        lambda x, batch_min: algm_global_plan(x, 0.8, batch_min=batch_min),
        lambda x, batch_min: algm_local_plan(x, (4, 4), -0.1, batch_min=batch_min),
    ):
        own, reduced = make(x, False), make(x, True)
        merged = (own.counts() > 1).sum(1)
        assert own.valid is not None
        assert merged.min() > 0
        assert reduced.valid is None
        assert reduced.num_groups == own.num_groups
        # the sample with the fewest merges as it did
        fewest = int(own.counts().gt(0).sum(1).argmax())
        assert torch.equal(reduced.group[fewest], own.group[fewest])


def test_stages_and_their_blocks():
    rule = ALGM()
    assert rule.layers(12) == (0, 4)
    assert rule.merge_count(0, 196, 12) is None
    assert rule.merge_count(1, 196, 12) == 0
    assert rule.plan(torch.randn(1, 5, 4), layer=1, depth=12) is None
    with pytest.raises(ValueError, match="names block 4, but the ViT has 4 blocks"):
        rule.layers(4)


@pytest.mark.parametrize("grid", [None, (2, 3)])
def test_a_grid_that_does_not_match_is_refused(grid):
    with pytest.raises(ValueError, match="grid"):
        ALGM().plan(torch.randn(1, 5, 4), layer=0, depth=12, grid=grid)


@pytest.mark.parametrize(
    "settings",
    [{"threshold": 1.5}, {"local_layer": 4}, {"global_layer": -1}, {"batch_reduce": "max"}, {"local_layer": 0.5}],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ALGM(**settings)
