"""Tree-NeighborsMatch without repeated work: which states differ, and which of them each layer reads and makes.

Far fewer states differ than a batch of trees has nodes. Let leaves have height 0 and the root height ``d``; after ``l``
layers

* a node of height ``h <= l`` below the root knows its leaves: one state for each node of each *different* tree, because
  edges run upwards and nothing below the root depends on the query;
* a node of height ``h > l`` below the root has seen blanks alone: one state for all of them;
* a root with ``l < d`` has seen its query alone: ``L`` states;
* what comes out of layer ``d + 1`` depends on heights ``h >= l - 1`` alone.

So layer ``l`` makes heights ``l - 1`` and ``l``, one blank node and ``L`` roots; the last two layers make one root for
each (tree, query) pair. BatchNorm looks at every node: there no height is left behind.

A layer reads rows and makes rows, which stand in this order::

    heights, lowest first (tree after tree, left to right) | blank | roots

Which rows the roots of pairs read depends on the batch; everything else is known beforehand, and there a row is read at
most once as a node's own state and once as a child, but for the blank one.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nsr.graph.models import Backbone

# Of a node and of its children, where these are inner nodes, where they are leaves, and of a leaf.
_COEFFICIENTS: dict[Backbone, tuple[tuple[float, float], ...]] = {
    "gcn": ((1 / 3, 1 / 3), (1 / 3, 3**-0.5), (1.0, 0.0)),  # (deg deg)^{-1/2}: a leaf has itself alone, others three
    "sage": ((1 / 3, 1 / 3), (1 / 3, 1 / 3), (1.0, 0.0)),
    "gin": ((1.0, 1.0), (1.0, 1.0), (1.0, 0.0)),
}
_INNER, _ABOVE_LEAVES, _LEAF = range(3)

Name = int | Literal["blank", "root"]  # an integer is a height


@dataclass(frozen=True)
class LayerPlan:
    """What one layer reads and makes.

    Attributes:
        members: Rows that each node reads: its own, its left and its right child; -1 for a child that is not there,
            ``[N, 3]``, int32. Of the root of a pair, where the rows begin from which its place is counted.
        coefficient: Of the node itself and of each child in the aggregation, ``[N, 2]``.
        uses: Where each row that is read is a node's own state, and where it is a child (counted over ``[N, 2]``);
            -1 for nowhere, ``[M, 2]``, int32. Nothing is noted of the blank row, nor of what pairs read by their place.
        blank: The blank row among those that are read, or -1.
        nodes_of_height: How many nodes of a tree are made of each height, lowest first.
        blanks: How many nodes of a tree the blank row that is made stands for; 0 where none is made.
        first_pair: The first node that is the root of a pair; ``N`` in the layers before ``d``.
        own_moves: Whether such a root finds its own state by its place, which it does in layer ``d``.
    """

    members: Tensor
    coefficient: Tensor
    uses: Tensor
    blank: int
    nodes_of_height: tuple[int, ...]
    blanks: int
    first_pair: int
    own_moves: bool

    def rows_of(self, place: Tensor) -> Tensor:
        """The rows that each node of each replica reads, ``[R, N, 3]``, for the places of a batch ``[R, 3 B]``."""
        members = self.members.long().repeat(len(place), 1, 1)
        pairs = place.shape[1] // 3
        if self.first_pair < len(self.members):
            members[:, self.first_pair :, 0] += place[:, :pairs] * self.own_moves
            members[:, self.first_pair :, 1:] += place[:, pairs:].unflatten(1, (pairs, 2))
        return members

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "LayerPlan":
        """The plan on a device, with coefficients of a precision."""
        members, uses = self.members.to(device), self.uses.to(device)
        return replace(self, members=members, uses=uses, coefficient=self.coefficient.to(device, dtype))


def layer_plans(
    backbone: Backbone,
    depth: int,
    trees: int,
    pairs: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[LayerPlan]:
    """The plans of all ``d + 1`` layers.

    Args:
        backbone: Decides the coefficients; with GIN, whose BatchNorm looks at every node, every height is made.
        depth: ``d``.
        trees: Different trees in a batch.
        pairs: (tree, query) pairs in a batch.
        device: Where the plans lie.
        dtype: Of the coefficients.
    """
    plans: list[LayerPlan] = []
    rows: dict[Name, int] = {0: trees * 2**depth, "blank": 1, "root": 2**depth}  # what is there, in order
    for number in range(1, depth + 2):
        blocks, plan = _layer(backbone, depth, trees, pairs, number, rows)
        plans.append(plan.to(device, dtype))
        rows = {block.name: len(block.members) for block in blocks}
    return plans


@dataclass(frozen=True)
class _Block:
    """Rows that a layer makes together: what reads them calls them by name."""

    name: Name
    members: np.ndarray  # shape: [n, 3]
    coefficient: int = _INNER


def _layer(
    backbone: Backbone, depth: int, trees: int, pairs: int, number: int, rows: dict[Name, int]
) -> tuple[list[_Block], LayerPlan]:
    """Layer ``number``, counted from 1, which reads ``rows`` of each name."""
    ends = np.cumsum([0, *rows.values()]).tolist()
    start = dict(zip(rows, ends, strict=False))
    blank = start.get("blank", -1)

    def node(own: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return np.stack([own, left, right], axis=1)

    blocks = []
    lowest = 0 if backbone == "gin" else number - 1 if number <= depth else depth
    for height in range(lowest, min(number, depth - 1) + 1):
        nodes = np.arange(trees * 2 ** (depth - height))
        own = start[height] + nodes if height in start else np.full_like(nodes, blank)
        if height == 0:
            nobody = np.full_like(nodes, -1)
            blocks.append(_Block(height, node(own, nobody, nobody), _LEAF))
        else:
            left = start[height - 1] + 2 * nodes
            blocks.append(_Block(height, node(own, left, left + 1), _ABOVE_LEAVES if height == 1 else _INNER))
    blanks = sum(2 ** (depth - height) for height in range(number + 1, depth))
    if blanks:
        blocks.append(_Block("blank", np.full((1, 3), blank)))
    if number >= depth:
        pair = np.arange(pairs)
        own = start["root"] + (np.zeros_like(pair) if number == depth else pair)
        child = np.full_like(pair, start[depth - 1])
        blocks.append(_Block("root", node(own, child, child)))
    else:
        own = start["root"] + np.arange(2**depth)
        nothing_yet = np.full_like(own, blank)
        blocks.append(_Block("root", node(own, nothing_yet, nothing_yet)))

    members = np.concatenate([block.members for block in blocks])
    each = [np.tile(_COEFFICIENTS[backbone][block.coefficient], (len(block.members), 1)) for block in blocks]
    first_pair = len(members) - (pairs if number >= depth else 0)
    plan = LayerPlan(
        members=torch.from_numpy(members.astype(np.int32)),
        coefficient=torch.from_numpy(np.concatenate(each)),
        uses=torch.from_numpy(_uses(members, first_pair, number == depth, ends[-1], blank)),
        blank=blank,
        nodes_of_height=tuple(len(block.members) // trees for block in blocks if isinstance(block.name, int)),
        blanks=blanks,
        first_pair=first_pair,
        own_moves=number == depth,
    )
    return blocks, plan


def _uses(members: np.ndarray, first_pair: int, own_moves: bool, rows: int, blank: int) -> np.ndarray:
    uses = np.full((rows, 2), -1, dtype=np.int32)
    own = members[: first_pair if own_moves else None, 0]
    for column, table in ((0, own), (1, members[:first_pair, 1:].reshape(-1))):
        noted = (table >= 0) & (table != blank)
        assert len(np.unique(table[noted])) == noted.sum(), "a row is read once as own state and once as child"
        uses[table[noted], column] = np.flatnonzero(noted)
    return uses
