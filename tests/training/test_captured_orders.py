"""An index is sorted once while a step is captured, and again when it has changed or the capture is over."""

import torch

from nsr.kernels import member_order
from nsr.training.captured_orders import shared_orders


def test_an_index_is_sorted_once() -> None:
    row, other = torch.tensor([2, 0, 1, 0]), torch.arange(4)
    with shared_orders():
        first = member_order._sort(row, other, 3)
        assert member_order._sort(row, other, 3) is first
        assert member_order._sort(other, row, 4) is not first
        row[0] = 1
        second = member_order._sort(row, other, 3)
        assert second.row.tolist() == [0, 0, 1, 1]
    assert member_order._sort(row, other, 3) is not second


def test_an_index_in_inference_mode_is_sorted_each_time() -> None:
    with shared_orders(), torch.inference_mode():
        row, other = torch.tensor([1, 0]), torch.arange(2)
        first = member_order._sort(row, other, 2)
        row.fill_(0)
        assert first.row.tolist() == [0, 1]
        assert member_order._sort(row, other, 2).row.tolist() == [0, 0]
