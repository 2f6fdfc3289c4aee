"""A heterophilous graph of any size, written piece by piece: memory grows with the nodes, not with the edges.

Four classes stand at the corners ``±e1, ±e2`` of the feature space, under noise. Whom a node listens to depends on its
class, and every mixture of neighbours has mean 0:

====== ============== ==========================
class  corner         neighbours' classes
====== ============== ==========================
0      ``+e1``        2 and 3
1      ``-e1``        0, 1, 2 and 3
2      ``+e2``        0 and 1
3      ``-e2``        0, 1, 2 and 3
====== ============== ==========================

So the mean over the neighbours says nothing; along which axis they spread does, and that is in the null space of the
mean. One edge in eight joins equal classes. In-degrees are log-normal.
"""

import os
import shutil
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from nsr.data.disk_graph import DiskGraph, open_graph

CLASSES = 4
_NEIGHBOURS = np.array([[2, 3, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]])  # shape: [class, equally likely]
_PIECE = 2**20  # nodes written together


def generated_graph(
    folder: Path, nodes: int = 10_000_000, edges: int = 100_000_000, features: int = 16, seed: int = 0
) -> DiskGraph:
    """The graph in ``folder``, made there if it is not there yet.

    Args:
        folder: Its own folder; complete or absent, because it is renamed into place.
        nodes: ``N``.
        edges: ``E``, directed.
        features: ``F``, at least 2.
        seed: Of everything drawn.
    """
    if nodes < CLASSES or edges < 1 or features < 2:
        raise ValueError(
            f"nodes={nodes}, edges={edges}, features={features}: at least {CLASSES} nodes, 1 edge and 2 features."
        )
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True)
        try:
            _write(partial, nodes, edges, features, seed)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    graph = open_graph(folder)
    found = graph.num_nodes, graph.num_edges, graph.features.shape[1]
    if found != (nodes, edges, features):
        raise ValueError(
            f"{folder} holds another graph: nodes, edges, features are {found}, asked for {(nodes, edges, features)}. "
            "Choose another folder."
        )
    return graph


def _write(folder: Path, nodes: int, edges: int, features: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = open_memmap(folder / "labels.npy", "w+", np.int64, (nodes,))
    labels[:] = rng.permutation(np.arange(nodes) % CLASSES)
    members = [np.flatnonzero(labels == c) for c in range(CLASSES)]

    weight = rng.lognormal(sigma=0.8, size=nodes)
    pointer = open_memmap(folder / "pointer.npy", "w+", np.int64, (nodes + 1,))
    pointer[0] = 0
    # the edges are dealt out along the cumulated weights, so that their number is exactly what was asked for
    np.cumsum(weight, out=weight)
    pointer[1:] = np.rint(weight * (edges / weight[-1]))
    del weight

    table = open_memmap(folder / "features.npy", "w+", np.float32, (nodes, features))
    source = open_memmap(folder / "source.npy", "w+", np.int64, (edges,))
    corner = np.zeros((CLASSES, features), dtype=np.float32)
    corner[[0, 1], 0] = corner[[2, 3], 1] = 1, -1
    for begin in range(0, nodes, _PIECE):
        end = min(begin + _PIECE, nodes)
        own = labels[begin:end]
        table[begin:end] = rng.normal(corner[own], 0.5)
        target_class = np.repeat(own, np.diff(pointer[begin : end + 1]))
        chosen = _NEIGHBOURS[target_class, rng.integers(0, 4, size=len(target_class))]
        span = source[pointer[begin] : pointer[end]]
        for c, nodes_of_class in enumerate(members):
            mine = chosen == c
            span[mine] = nodes_of_class[rng.integers(0, len(nodes_of_class), size=int(mine.sum()))]
    for array in (labels, pointer, table, source):
        array.flush()
