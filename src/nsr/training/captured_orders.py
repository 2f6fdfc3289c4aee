"""Members sorted once in a captured step, however many operators read them.

:func:`nsr.kernels.member_order.member_order` keeps nothing that is sorted during a capture: the index has no values yet
and will have others at each replay. Within the one capture its order is as good as the index itself, so here it is
made by the first operator that asks for it, and the others read that.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from nsr.kernels import member_order as orders
from nsr.kernels.member_order import MemberOrder


@contextmanager
def shared_orders() -> Iterator[None]:
    """Around the capture of a step that makes its own index."""
    sort, made = orders._sort, dict[tuple, tuple[MemberOrder, Tensor, Tensor]]()

    def sort_once(row: Tensor, other: Tensor, num_rows: int) -> MemberOrder:
        if row.is_inference() or other.is_inference():  # no counter says whether somebody wrote to it
            return sort(row, other, num_rows)
        key = (*orders._identity(row), *orders._identity(other), num_rows)
        if key not in made:
            made[key] = (sort(row, other, num_rows), row, other)  # while it is held, its place in memory is no other's
        return made[key][0]

    orders._sort = sort_once
    try:
        yield
    finally:
        orders._sort = sort
