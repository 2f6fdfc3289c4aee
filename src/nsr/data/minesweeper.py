"""Minesweeper as the benchmark describes it, drawn anew: find the mines on a board half of whose numbers are hidden."""

import numpy as np

from nsr.data.node_graph import NodeGraph


def minesweeper(side: int = 100, mines: float = 0.2, hidden: float = 0.5, splits: int = 10, seed: int = 0) -> NodeGraph:
    """A board of ``side²`` squares, each joined to its up to eight neighbours.

    A share ``mines`` of the squares is mined, which is the label. A square shows how many of its neighbours are mined,
    one-hot in features 1 to 6 (0 to 4, and 5 or more), except for a share ``hidden`` of them, which have feature 0 set
    instead. Splits are 50 / 25 / 25 %.
    """
    if side < 2 or not 0 < mines < 1 or not 0 <= hidden <= 1 or splits < 1:
        raise ValueError(
            f"A board needs side >= 2, 0 < mines < 1, 0 <= hidden <= 1 and splits >= 1, got side={side}, "
            f"mines={mines}, hidden={hidden}, splits={splits}."
        )
    rng = np.random.default_rng(seed)
    nodes = side * side
    square = np.arange(nodes).reshape(side, side)
    pairs = [
        (square[:, :-1], square[:, 1:]),
        (square[:-1], square[1:]),
        (square[:-1, :-1], square[1:, 1:]),
        (square[:-1, 1:], square[1:, :-1]),
    ]
    edges = np.concatenate([np.stack([a.ravel(), b.ravel()], axis=1) for a, b in pairs])
    labels = _chosen(nodes, max(1, round(mines * nodes)), rng)
    around = np.bincount(edges.ravel(), weights=labels[edges[:, ::-1].ravel()], minlength=nodes)
    shown = 1 + np.minimum(around.astype(np.int64), 5)
    shown[_chosen(nodes, round(hidden * nodes), rng).astype(bool)] = 0
    orders = np.stack([rng.permutation(nodes) for _ in range(splits)])
    places = orders.argsort(axis=1) / nodes
    return NodeGraph(
        "minesweeper_generated",
        "roc_auc",
        np.eye(7, dtype=np.float32)[shown],
        labels,
        edges,
        places < 0.5,
        (places >= 0.5) & (places < 0.75),
        places >= 0.75,
    )


def _chosen(count: int, ones: int, rng: np.random.Generator) -> np.ndarray:
    """``ones`` ones among zeros, in random places."""
    values = np.zeros(count, dtype=np.int64)
    values[rng.permutation(count)[:ones]] = 1
    return values
