import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nsr
from contracts.operator import NULL_TOLERANCE, Case, OperatorContract


def dense_of(group: Tensor, weight: Tensor, num_groups: int) -> Tensor:
    """The matrix of a segment, written down entry by entry."""
    if group.dim() == 2:
        return torch.stack([dense_of(g, w, num_groups) for g, w in zip(group, weight, strict=True)])
    matrix = torch.zeros(num_groups, len(group), dtype=weight.dtype)
    for i, (g, t) in enumerate(zip(group.tolist(), weight, strict=True)):
        matrix[g, i] = t
    return matrix


# unsorted; group 2 is empty, group 3 has one member, weights of both signs
GROUP = [4, 0, 1, 4, 0, 3, 1, 0, 4]
WEIGHT = [0.5, -1.0, 2.0, 0.25, 0.7, -0.3, 0.1, 1.5, 0.25]


class TestAdjoint(OperatorContract):
    def case(self, dtype: torch.dtype) -> Case:
        group, weight = torch.tensor(GROUP), torch.tensor(WEIGHT, dtype=dtype)
        return Case(nsr.Segment(group, weight, 5), dense_of(group, weight, 5), torch.randn(9, 3, dtype=dtype))


class TestCopy(OperatorContract):
    def case(self, dtype: torch.dtype) -> Case:
        group = torch.tensor(GROUP)
        weight = torch.rand(9, dtype=dtype) + 0.1
        weight = weight / torch.zeros(5, dtype=dtype).index_add(0, group, weight)[group]
        return Case(nsr.Segment(group, weight, 5, "copy"), dense_of(group, weight, 5), torch.randn(9, 3, dtype=dtype))


class TestBatched(OperatorContract):
    def case(self, dtype: torch.dtype) -> Case:
        group = torch.tensor([[0, 1, 0, 1], [1, 1, 0, 1]])
        weight = torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.3, 0.3, 2.0, -0.4]], dtype=dtype)
        return Case(nsr.Segment(group, weight, 2), dense_of(group, weight, 2), torch.randn(2, 4, 3, dtype=dtype))


class TestComposed(OperatorContract):
    """Composition is a segment like any other, with its own explicit lift."""

    def case(self, dtype: torch.dtype) -> Case:
        group, weight = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1.0, 2, -1, 0.5, 3, 1], dtype=dtype)
        first = nsr.Segment(group, weight, 3)
        second = nsr.Segment(torch.tensor([0, 0, 1]), torch.tensor([0.5, 2.0, 1.0], dtype=dtype), 2)
        dense = dense_of(second.group, second.weight, 2) @ dense_of(group, weight, 3)
        return Case(first.then(second), dense, torch.randn(6, 3, dtype=dtype))


@st.composite
def segments(draw: st.DrawFn) -> tuple[nsr.Segment, Tensor]:
    members = draw(st.integers(0, 30))
    groups = draw(st.integers(1, 8))
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    lifting = draw(st.sampled_from(["adjoint", "copy"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    group = torch.randint(0, groups, (*batch, members), generator=generator)
    weight = torch.rand(*batch, members, generator=generator, dtype=dtype) + 0.05
    if lifting == "adjoint":
        weight = weight * (torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1)
    else:
        total = torch.zeros(*batch, groups, dtype=dtype).scatter_add(-1, group, weight)
        weight = weight / total.gather(-1, group)
    x = torch.randn(*batch, members, 3, generator=generator, dtype=dtype) * draw(st.sampled_from([1.0, 1e-3, 1e3]))
    return nsr.Segment(group, weight, groups, lifting), x


@settings(max_examples=500)
@given(segments())
def test_any_segment_splits_exactly(case: tuple[nsr.Segment, Tensor]) -> None:
    op, x = case
    kept, lost = nsr.split(op, x)
    scale = float(x.abs().max()) if x.numel() else 1.0
    # a group's sum of absolute coefficients is how much rounding it can amplify
    gain = max(1.0, float(op._sum(op.weight.abs().unsqueeze(-1)).max()))
    assert torch.allclose(kept + lost, x, rtol=0, atol=4 * torch.finfo(x.dtype).eps * scale)
    null = op.apply(lost)
    assert null.numel() == 0 or null.abs().max() <= NULL_TOLERANCE[x.dtype] * scale * gain
    expected = dense_of(op.group, op.weight, op.num_groups) @ x if x.numel() else op.apply(x)
    torch.testing.assert_close(op.apply(x), expected, rtol=1e-4, atol=1e-5 * scale)


@settings(max_examples=200)
@given(segments(), st.integers(0, 2**31))
def test_members_may_come_in_any_order(case: tuple[nsr.Segment, Tensor], seed: int) -> None:
    op, x = case
    order = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(seed))
    shuffled = nsr.Segment(op.group[..., order], op.weight[..., order], op.num_groups, op.lifting)
    moved = shuffled.residual(x[..., order, :])
    torch.testing.assert_close(moved, op.residual(x)[..., order, :], rtol=1e-4, atol=1e-5 * float(x.abs().sum() + 1e-9))


def test_a_flat_segment_serves_any_batch() -> None:
    op = nsr.Segment(torch.tensor(GROUP), torch.tensor(WEIGHT), 5)
    x = torch.randn(2, 4, 9, 3)
    torch.testing.assert_close(op.residual(x)[1, 2], op.residual(x[1, 2]))


def test_int32_groups_equal_int64() -> None:
    x = torch.randn(9, 3)
    group = torch.tensor(GROUP)
    wide, narrow = (nsr.Segment(g, torch.tensor(WEIGHT), 5) for g in (group, group.int()))
    assert torch.equal(wide.residual(x), narrow.residual(x))


def test_singleton_copy_residual_is_exactly_zero() -> None:
    op = nsr.Segment(torch.tensor([0, 1]), torch.ones(2), 2, "copy")
    assert torch.equal(op.residual(torch.randn(2, 3)), torch.zeros(2, 3))


def test_half_precision_accumulates_in_fp32() -> None:
    op = nsr.Segment(torch.zeros(4096, dtype=torch.long), torch.full((4096,), 1 / 4096), 1, "copy")
    y = op.apply(torch.ones(4096, 1, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert float(y) == 1.0  # a running bf16 sum would stall far below


def test_weights_take_gradients() -> None:
    group, x = torch.tensor(GROUP), torch.randn(9, 2, dtype=torch.float64)

    def residual(weight: Tensor) -> Tensor:
        return nsr.Segment(group, weight, 5, validate=False).residual(x)

    assert torch.autograd.gradcheck(residual, (torch.tensor(WEIGHT, dtype=torch.float64, requires_grad=True),))


def test_copies_compose_into_a_copy_step_by_step() -> None:
    first = nsr.Segment(torch.tensor([0, 0, 1, 2]), torch.tensor([0.25, 0.75, 1.0, 1.0]), 3, "copy")
    second = nsr.Segment(torch.tensor([0, 1, 0]), torch.tensor([0.4, 1.0, 0.6]), 2, "copy")
    both = first.then(second)
    x, y = torch.randn(4, 3), torch.randn(2, 3)
    assert both.lifting == "copy"
    torch.testing.assert_close(both.apply(x), second.apply(first.apply(x)))
    torch.testing.assert_close(both.lift(y), first.lift(second.lift(y)))


def test_adjoints_compose_with_their_lifts() -> None:
    first = nsr.Segment(torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, 2.0, 3.0, -1.0]), 3)
    second = nsr.Segment(torch.tensor([0, 1, 0]), torch.tensor([0.4, 1.0, -0.6]), 2)
    y = torch.randn(2, 3)
    torch.testing.assert_close(first.then(second).lift(y), first.lift(second.lift(y)))


def test_a_group_of_zero_coefficients_lifts_to_zero_when_the_library_builds_it() -> None:
    op = nsr.Segment(torch.tensor([0, 0, 1]), torch.tensor([0.0, 0.0, 1.0]), 2, validate=False)
    x = torch.randn(3, 2)
    assert torch.equal(op.residual(x)[:2], x[:2])


def test_ten_million_members_in_linear_memory() -> None:
    members, groups = 10_000_000, 1_000_000
    group = torch.randint(0, groups, (members,))
    op = nsr.Segment(group, torch.rand(members) + 0.5, groups)
    z = op.residual(torch.randn(members, 1))
    assert op.apply(z).abs().max() <= 2e-6 * 4.0 * 30  # scale of x times members of the largest group


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 1], torch.ones(2), 2), "int64 or int32"),
        ((torch.tensor([0.0, 1.0]), torch.ones(2), 2), "int64 or int32"),
        ((torch.tensor([0, 1]), torch.ones(3), 2), "the same"),
        ((torch.zeros(2, 2, 2).long(), torch.ones(2, 2, 2), 1), "the same"),
        ((torch.tensor([0, 2]), torch.ones(2), 2), "run from 0 to 2"),
        ((torch.tensor([-1, 0]), torch.ones(2), 2), "run from -1"),
        ((torch.tensor([0, 0]), torch.tensor([1.0, float("nan")]), 1), "non-finite"),
        ((torch.tensor([0, 0]), torch.ones(2, dtype=torch.complex64), 1), "complex"),
        ((torch.tensor([0, 0]), torch.ones(2, dtype=torch.long), 1), "floating point"),
        ((torch.tensor([0, 0]), torch.ones(2), 1, "copy"), "sum to one"),
        ((torch.tensor([0, 0]), torch.zeros(2), 1), "all zero"),
        ((torch.tensor([0, 0]), torch.ones(2), 1, "mean"), "'adjoint', 'copy'"),
        ((torch.tensor([0, 0]), torch.ones(2), 1, torch.ones(2)), "sum to one"),
        ((torch.tensor([0, 0]), torch.ones(2), 1, torch.ones(3)), "shape"),
        ((torch.tensor([0, 0]), torch.ones(2, device="meta"), 1), "Mixed devices"),
        ((torch.tensor([0, 0]), torch.ones(2), -1), "num_groups"),
    ],
)
def test_bad_input_is_refused_with_the_reason(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nsr.Segment(*arguments)


def test_composition_that_does_not_fit_is_refused() -> None:
    op = nsr.Segment(torch.tensor([0, 1]), torch.ones(2), 2)
    with pytest.raises(ValueError, match="Cannot compose"):
        op.then(nsr.Segment(torch.tensor([0, 0, 0]), torch.ones(3), 1))
