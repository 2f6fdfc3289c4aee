"""The sums over members in C++, see ``native/members.cpp``: what both operators need to call it."""

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nsr.kernels.native import load_library, pointers, struct_of_numbers, struct_of_pointers, threads

_SOURCE = Path(__file__).parent / "native" / "members.cpp"
_BLOCK = 128  # members that a thread takes at once
_LANES = 16  # a row, and each head's share of it, is whole vectors


def obstacle(width: int, heads: int) -> str | None:
    """Why the library cannot be used for rows of this width."""
    if width % (_LANES * heads):
        by_head = f" with {heads} heads" if heads > 1 else ""
        return f"width {width}{by_head}, and the fused kernels of a CPU take multiples of {_LANES} channels a head"
    return None if load_library(_SOURCE) is not None else "no C++ compiler that takes the kernels of a CPU"


class MemberGraph(NamedTuple):
    """Members as C++ reads them.

    Attributes:
        sources: Rows of the source tables.
        targets: Rows of the target tables.
        width: ``D``.
        source: Row of each member in the source tables, ``[E]``.
        target: Row of each member in the target tables, ``[E]``.
        coefficient: ``[E, H]``, fp32.
    """

    sources: int
    targets: int
    width: int
    source: Tensor
    target: Tensor
    coefficient: Tensor

    @classmethod
    def of(
        cls, sources: int, targets: int, width: int, source: Tensor, target: Tensor, coefficient: Tensor
    ) -> "MemberGraph":
        """Checked: an index beyond its table is an error, and in C++ it would be a crash.

        Raises:
            IndexError: An index names a row that is not there.
        """
        graph = cls(sources, targets, width, source.contiguous(), target.contiguous(), coefficient)
        if not _library().members_are_there(graph.sizes, graph.members):
            raise IndexError(
                f"source names rows {_span(source)} of {sources} and target rows {_span(target)} of {targets}; "
                "expected numbers from 0 to one less than there are rows."
            )
        return graph

    @property
    def sizes(self) -> ctypes.Array[Any]:
        """``Sizes`` in C++."""
        return struct_of_numbers(self.sources, self.targets, len(self.source), self.width, self.coefficient.shape[1])

    @property
    def members(self) -> ctypes.Array[Any]:
        """``Graph`` in C++."""
        return struct_of_pointers(self.source, self.target, self.coefficient)

    def call(self, function: str, *arguments: Any) -> None:
        """A function of the library: its threads and sizes, then the arguments; tensors are given by their address."""
        given = (pointers(x)[0] if isinstance(x, Tensor) else x for x in arguments)
        getattr(_library(), function)(threads(-(-len(self.source) // _BLOCK)), self.sizes, *given)


def _library() -> ctypes.CDLL:
    library = load_library(_SOURCE)
    assert library is not None, "ask for the obstacle first"
    return library


def _span(index: Tensor) -> str:
    return f"{int(index.min())} to {int(index.max())}" if len(index) else "of no member"
