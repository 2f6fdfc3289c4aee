import pytest
import torch
from torch import Tensor

from nsr.tokens import DTEM, DecoupledEmbedding, MergePlan, dtem_soft_merge, tome_plan
from nsr.tokens.dtem import soft_top_r
from tokens import reference
from tokens.reference import Groups
from tokens.rule_contract import RuleContract, Tokens, make_tokens


class TestDTEM(RuleContract):
    """At evaluation it is ToMe with its own metric."""

    def plan(self, tokens: Tokens, valid: Tensor | None = None) -> MergePlan | None:
        return DTEM(r=3).plan(
            tokens.metric, layer=0, depth=12, size=tokens.size, num_prefix=tokens.num_prefix, valid=valid
        )

    def reference(self, metric: Tensor, tokens: Tokens) -> Groups:
        return reference.tome(metric, 3, tokens.num_prefix)


def soft_reference(metric: Tensor, x: Tensor, size: Tensor, r: int, tau: float, num_prefix: int):
    """The relaxed matching of one image with its joint softmax over pairs, before anything leaves the sequence."""
    a, b = reference.even_and_odd(len(metric), num_prefix)
    unit = torch.nn.functional.normalize(metric, dim=-1)
    scores = unit[a] @ unit[b].T / tau
    share = torch.zeros_like(scores)
    for _ in range(r):
        pair = scores.flatten().softmax(0).view_as(scores)
        share = share + pair
        scores = scores + torch.log1p(-pair.sum(1, keepdim=True).clamp(max=1 - 1e-6)) / tau
    row = share.sum(1, keepdim=True)
    share = share * (row.clamp(max=1 - 1e-6) / row)
    # what the hard matching merges leaves, and takes its rest to its hard partner
    groups = reference.tome(metric, r, num_prefix)
    staying = [group[0] for group in groups if group[0] in a]
    for j, group in enumerate(groups[len(groups) - len(b) :]):
        for source in group[1:]:
            i = a.index(source)
            share[i, j] += 1 - share[i].sum()
    tokens, sizes = [x[i] for i in range(num_prefix)], [size[i] for i in range(num_prefix)]
    for token in staying:
        tokens.append(x[token])
        sizes.append(size[token] * (1 - share[a.index(token)].sum()))
    for j, token in enumerate(b):
        new = size[token] + sum(share[i, j] * size[source] for i, source in enumerate(a))
        moved = size[token] * x[token] + sum(share[i, j] * size[source] * x[source] for i, source in enumerate(a))
        tokens.append(moved / new)
        sizes.append(new)
    return torch.stack(tokens), torch.stack(sizes)


def test_soft_merge_equals_its_literal_reference():
    merged = 0
    for seed in range(200):
        tokens = make_tokens(seed, exact=False, batch=2)
        plan = tome_plan(tokens.metric, 3, size=tokens.size, num_prefix=tokens.num_prefix)
        if plan is None:
            continue
        x = torch.randn(*tokens.metric.shape[:2], 3)
        got = dtem_soft_merge(plan, tokens.metric, x, tokens.size, temperature=0.2, num_prefix=tokens.num_prefix)
        for b in range(2):
            r = tokens.metric.shape[1] - plan.num_groups
            expected = soft_reference(tokens.metric[b], x[b], tokens.size[b], r, 0.2, tokens.num_prefix)
            torch.testing.assert_close(got.tokens[b], expected[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(got.size[b], expected[1], rtol=1e-4, atol=1e-4)
        merged += 1
    assert merged > 150


def test_soft_sizes_are_positive_and_sum_to_the_patches():
    x = torch.randn(2, 20, 6)
    size = torch.ones(2, 20)
    metric = x
    for _ in range(3):
        plan = tome_plan(metric, 4)
        x, size = dtem_soft_merge(plan, metric, x, size, temperature=0.1)
        metric = x
        torch.testing.assert_close(size.sum(1), torch.full((2,), 20.0))
        assert (size > 0).all()
    assert x.shape == (2, 8, 6)


def test_at_zero_temperature_it_is_the_hard_merge():
    x, metric, size = torch.randn(2, 15, 6), torch.randn(2, 15, 8), torch.randint(1, 4, (2, 15)).float()
    plan = tome_plan(metric, 4, size=size)
    soft = dtem_soft_merge(plan, metric, x, size, temperature=1e-4)
    torch.testing.assert_close(soft.tokens, plan.merge(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(soft.size, plan.merged_size(size), rtol=1e-4, atol=1e-4)


def test_soft_top_r_chooses_r():
    logits = torch.stack([torch.randperm(12) for _ in range(3)]) / 4
    chosen = soft_top_r(logits / 0.05, 5, 0.05)
    assert (chosen >= 0).all()
    assert (chosen <= 1).all()
    torch.testing.assert_close(chosen.sum(1), torch.full((3,), 5.0), rtol=0.05, atol=0)
    assert torch.equal(chosen.topk(5).indices.sort().values, logits.topk(5).indices.sort().values)


def test_training_moves_the_embedding_and_leaves_the_backbone_alone():
    rule = DTEM(r=3, width=4)
    embedding = rule.embedding(6)
    assert sum(p.numel() for p in embedding.parameters()) == 6 * 4 + 4
    tokens = torch.randn(2, 11, 6, requires_grad=True)
    metric = embedding(tokens)
    plan = rule.plan(metric, layer=0, depth=12)
    soft = rule.soft_merge(plan, metric, torch.randn(2, 11, 6), torch.ones(2, 11))
    (soft.tokens.square().sum() + soft.size.log().sum()).backward()
    assert tokens.grad is None
    assert embedding.linear.weight.grad.abs().max() > 0
    assert torch.isfinite(embedding.linear.weight.grad).all()


def test_soft_merge_under_autocast_is_that_of_fp32():
    metric, x = torch.randn(2, 11, 4), torch.randn(2, 11, 6)
    plan = tome_plan(metric, 3)
    expected = dtem_soft_merge(plan, metric, x, torch.ones(2, 11), temperature=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dtem_soft_merge(plan, metric, x, torch.ones(2, 11), temperature=0.1)
    assert torch.equal(got.tokens, expected.tokens)


@pytest.mark.parametrize("settings", [{"r": -1}, {"r": 3, "width": 0}, {"r": 3, "temperature": 0.0}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=list(settings)[-1]):
        DTEM(**settings)


def test_embedding_alone():
    assert DecoupledEmbedding(192)(torch.randn(1, 3, 192)).shape == (1, 3, 64)
