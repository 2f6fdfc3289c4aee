"""Members sorted once a graph, and the cache that must never answer for another graph."""

import pytest
import torch

from nsr.kernels import member_order as module
from nsr.kernels.member_order import member_order


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    module._cache.clear()


def test_order() -> None:
    row, other = torch.tensor([4, 1, 4, 0, 1, 4]), torch.tensor([5, 4, 3, 2, 1, 0])
    order = member_order(row, other, 6)
    assert order.row.tolist() == [0, 1, 1, 4, 4, 4]
    assert order.other.tolist() == [2, 4, 1, 5, 3, 0]
    assert order.member.tolist() == [3, 1, 4, 0, 2, 5]
    assert order.start.tolist() == [0, 1, 3, 3, 3, 6, 6]
    assert order.rank.tolist() == [0, 1, 1, 2, 2, 2]
    assert order.ranked[:3].tolist() == [0, 1, 4]
    torch.testing.assert_close(order.scale, torch.tensor([1, 2, 1, 1, 3, 1]).float().rsqrt())


def test_found_again_through_other_views() -> None:
    edge_index = torch.randint(5, (2, 20))
    first = member_order(edge_index[1], edge_index[0], 5)
    assert member_order(edge_index[1], edge_index[0], 5) is first
    assert member_order(edge_index[0], edge_index[1], 5) is not first
    assert member_order(edge_index[1], edge_index[0], 6) is not first
    assert member_order(edge_index[1, :10], edge_index[0, :10], 5).row.shape == (10,)


def test_a_write_is_noticed() -> None:
    edge_index = torch.zeros(2, 3, dtype=torch.int64)
    assert member_order(edge_index[1], edge_index[0], 2).row.tolist() == [0, 0, 0]
    edge_index[1, 0] = 1
    assert member_order(edge_index[1], edge_index[0], 2).row.tolist() == [0, 0, 1]


def test_forgotten_with_the_graph() -> None:
    for value in range(30):  # the allocator gives each new index the memory of the one before
        row = torch.full((4,), value)
        assert member_order(row, row, 40).row.tolist() == [value] * 4
        del row
    assert len(module._cache) == 1, "only the last one is left, and it goes when the next one comes"


def test_bounded() -> None:
    kept = [torch.full((2,), value) for value in range(module._CAPACITY + 5)]
    for row in kept:
        member_order(row, row, 100)
    assert len(module._cache) <= module._CAPACITY


def test_inference_tensors_are_sorted_each_time() -> None:
    with torch.inference_mode():
        row = torch.tensor([1, 0])
        assert member_order(row, row, 2) is not member_order(row, row, 2)


def test_what_a_captured_graph_reads_is_not_evicted() -> None:
    first = torch.tensor([1, 0])
    order = member_order(first, first, 2)
    module._captured.add(next(reversed(module._cache)))  # as finding it during a capture does
    kept = [torch.full((2,), value) for value in range(module._CAPACITY + 5)]
    for row in kept:
        member_order(row, row, 100)
    assert member_order(first, first, 2) is order
    assert len(module._cache) <= module._CAPACITY
    del first
    member_order(torch.tensor([0]), torch.tensor([0]), 1)
    assert not module._captured


def test_sorted_once_in_a_capture() -> None:
    row, other = torch.tensor([2, 0, 1, 0]), torch.arange(4)
    with module.one_capture():
        first = member_order(row, other, 3)
        assert member_order(row, other, 3) is first
        assert member_order(other, row, 4) is not first
        row[0] = 1
        second = member_order(row, other, 3)
        assert second.row.tolist() == [0, 0, 1, 1]
    assert not module._cache
    assert member_order(row, other, 3) is not second


def test_sorted_before_a_capture_is_found_in_it() -> None:
    row, other = torch.tensor([2, 0, 1, 0]), torch.arange(4)
    before = member_order(row, other, 3)
    with module.one_capture():
        assert member_order(row, other, 3) is before
