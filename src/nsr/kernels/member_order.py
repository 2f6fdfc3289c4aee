"""Members sorted by the row they belong to: made once for a graph, forgotten with it.

The fused kernels read members row by row. A full-batch graph is sorted on its first use and found again as long as its
index lives and nobody wrote to it; a mini-batch's order goes with the mini-batch. A captured step that makes its own
index sorts it once a replay, however many operators read it: see :func:`one_capture`.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class MemberOrder(NamedTuple):
    """The members of each row, one row after the other."""

    row: Tensor  # shape: [E], int32, ascending
    other: Tensor  # shape: [E], int32, the other end of each member
    member: Tensor  # shape: [E], int32, its place in the caller's order
    start: Tensor  # shape: [rows + 1], int32, where each row begins
    rank: Tensor  # shape: [E], int32, number of rows with members before this member's
    ranked: Tensor  # shape: [rows], int32, the rows with members, ascending; what follows them is arbitrary
    scale: Tensor  # shape: [rows], fp32, K^{-1/2}, 1 for an empty row

    @property
    def walk(self) -> tuple[Tensor, ...]:
        """What a kernel that sums over rows reads, in the order in which it takes it."""
        return self.row, self.other, self.member, self.rank, self.ranked

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """The same without the place in the caller's order, for kernels whose coefficients are sorted."""
        return self.row, self.other, self.rank, self.ranked


class _Entry(NamedTuple):
    storages: tuple[StorageWeakRef, ...]
    order: MemberOrder


# Orders that a captured CUDA graph reads: it may replay at any time, so they stay as long as their index lives.
_captured: set[tuple] = set()
# A storage's address is no one else's while a weak reference to it is held, so a key that is found is never stale.
_cache: OrderedDict[tuple, _Entry] = OrderedDict()
_CAPACITY = 64
# Orders made within one capture. Their indices are held, so that no other comes to lie where they lay.
_made: dict[tuple, tuple[MemberOrder, Tensor, Tensor]] | None = None
_origin = 0  # of the index that an operator is called with, see nsr.kernels.index_origin


def member_order(row: Tensor, other: Tensor, num_rows: int) -> MemberOrder:
    """Members sorted by ``row``, from the cache where the same index, unchanged, was sorted before.

    "The same" is the same storage, place in it, shape and version counter, and within a compiled graph the same origin:
    an in-place write is noticed, and a copy is another graph. Inference tensors have no counter and are sorted each
    time. What is sorted while a CUDA graph is captured has no values yet and is kept for that capture at most; what was
    sorted before is found.
    """
    if row.is_inference() or other.is_inference():
        return _sort(row, other, num_rows)
    key = (*_identity(row), *_identity(other), num_rows, _origin)
    capturing = row.is_cuda and torch.cuda.is_current_stream_capturing()
    if key in _cache:
        _cache.move_to_end(key)
        if capturing:
            _captured.add(key)
        return _cache[key].order
    if _made is not None:
        if key not in _made:
            _made[key] = (_sort(row, other, num_rows), row, other)
        return _made[key][0]
    order = _sort(row, other, num_rows)
    if not capturing:
        _drop_dead()
        _cache[key] = _Entry((_storage(row), _storage(other)), order)
    return order


@contextmanager
def one_capture() -> Iterator[None]:
    """Around the capture of a step: an index that is made in it is sorted by the first operator that asks for it."""
    global _made
    before, _made = _made, {}
    try:
        yield
    finally:
        _made = before


@contextmanager
def from_origin(number: int) -> Iterator[None]:
    """Around an operator's work on an index whose origin has this number."""
    global _origin
    before, _origin = _origin, number
    try:
        yield
    finally:
        _origin = before


def _sort(row: Tensor, other: Tensor, num_rows: int) -> MemberOrder:
    ordered, member = torch.sort(row.to(torch.int32), stable=True)
    rows = torch.arange(num_rows + 1, dtype=torch.int32, device=row.device)
    start = torch.searchsorted(ordered, rows, out_int32=True)
    scale = start.diff().clamp_(min=1).to(torch.float32).rsqrt_()
    begins = torch.cat([ordered.new_zeros(min(1, ordered.shape[0])), (ordered.diff() != 0).to(torch.int32)])
    rank = begins.cumsum(0, dtype=torch.int32)
    ranked = torch.empty_like(rows[1:]).scatter_(0, rank.long(), ordered)
    return MemberOrder(ordered, other.to(torch.int32)[member], member.to(torch.int32), start, rank, ranked, scale)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _identity(tensor: Tensor) -> tuple:
    return (
        tensor.untyped_storage()._cdata,
        tensor._version,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _drop_dead() -> None:
    """Forget the orders of indices that are gone, and the longest unused ones beyond the capacity."""
    for key in [key for key, entry in _cache.items() if any(ref.expired() for ref in entry.storages)]:
        del _cache[key]
        _captured.discard(key)
    for key in [key for key in _cache if key not in _captured][: max(0, len(_cache) - _CAPACITY + 1)]:
        del _cache[key]
