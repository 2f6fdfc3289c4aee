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

    heights, lowest first (tree after tree, left to right) | blank | roots      then, in the last two layers:
                                                           | own state of each pair's root | its two children

The rows of the last line are copies that depend on the batch; everything else is known beforehand. A row is read at
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
            ``[N, 3]``, int32.
        coefficient: Of the node itself and of each child in the aggregation, ``[N, 2]``.
        uses: Where each row that is read is a node's own state, and where it is a child (counted over ``[N, 2]``);
            -1 for nowhere, ``[M, 2]``, int32. Nothing is noted of the blank row.
        blank: The blank row among those that are read, or -1.
        nodes_of_height: How many nodes of a tree are made of each height, lowest first.
        blanks: How many nodes of a tree the blank row that is made stands for; 0 where none is made.
        copied: Where the rows to copy for the pairs are counted from: their roots (in layer ``d`` alone) ``[B]``, then
            their children ``[2 B]``; empty in the layers before.
    """

    members: Tensor
    coefficient: Tensor
    uses: Tensor
    blank: int
    nodes_of_height: tuple[int, ...]
    blanks: int
    copied: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "LayerPlan":
        """The plan on a device, with coefficients of a precision."""
        members, uses, copied = self.members.to(device), self.uses.to(device), self.copied.to(device)
        coefficient = self.coefficient.to(device, dtype)
        return replace(self, members=members, uses=uses, copied=copied, coefficient=coefficient)


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
    copies = {depth: 3, depth + 1: 2}.get(number, 0)

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
    if copies:  # they follow what the layer before has made
        pair, after = np.arange(pairs), ends[-1]
        left = after + (copies - 2) * pairs + 2 * pair
        blocks.append(_Block("root", node((after if copies == 3 else start["root"]) + pair, left, left + 1)))
    else:
        query = np.arange(2**depth)
        blocks.append(
            _Block("root", node(start["root"] + query, np.full_like(query, blank), np.full_like(query, blank)))
        )

    members = np.concatenate([block.members for block in blocks])
    each = [np.tile(_COEFFICIENTS[backbone][block.coefficient], (len(block.members), 1)) for block in blocks]
    plan = LayerPlan(
        members=torch.from_numpy(members.astype(np.int32)),
        coefficient=torch.from_numpy(np.concatenate(each)),
        uses=torch.from_numpy(_uses(members, ends[-1] + copies * pairs, blank)),
        blank=blank,
        nodes_of_height=tuple(len(block.members) // trees for block in blocks if isinstance(block.name, int)),
        blanks=blanks,
        copied=torch.tensor(
            ([start["root"]] * (copies - 2) + [start[depth - 1]] * 2) if copies else []
        ).repeat_interleave(pairs),
    )
    return blocks, plan


def _uses(members: np.ndarray, rows: int, blank: int) -> np.ndarray:
    uses = np.full((rows, 2), -1, dtype=np.int32)
    for column, table in ((0, members[:, 0]), (1, members[:, 1:].reshape(-1))):
        noted = (table >= 0) & (table != blank)
        assert len(np.unique(table[noted])) == noted.sum(), "a row is read once as own state and once as child"
        uses[table[noted], column] = np.flatnonzero(noted)
    return uses
