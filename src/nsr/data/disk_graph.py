"""A graph that lies on disk and is read through memory maps: larger than memory, opened in no time.

::

    pointer.npy    [N + 1] int64     the members of node v are source[pointer[v] : pointer[v + 1]]
    source.npy     [E]     int64     where each edge comes from, sorted by where it goes
    features.npy   [N, F]  float     node inputs
    labels.npy     [N]     int64     classes

What is read again and again stays in the page cache for as long as there is room; the process itself owns none of it.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SCAN = 2**22  # rows looked at together while checking
NAMES = ("pointer", "source", "features", "labels")


@dataclass(frozen=True)
class DiskGraph:
    """A directed graph by its incoming edges, with features and labels; see the top of this file."""

    pointer: np.ndarray
    source: np.ndarray
    features: np.ndarray
    labels: np.ndarray

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return len(self.labels)

    @property
    def num_edges(self) -> int:
        """``E``."""
        return len(self.source)


def open_graph(folder: Path) -> DiskGraph:
    """Map the graph in ``folder``.

    The edges are looked through once (a second for 100 million): a sampler in C++ trusts them, and one index out of
    range would end the process.

    Raises:
        ValueError: A file is missing or damaged, or the files do not fit each other.
    """
    pointer, source, features, labels = (_mapped(folder / f"{name}.npy") for name in NAMES)
    graph = DiskGraph(pointer, source, features, labels)
    nodes = graph.num_nodes
    expected = {"pointer": (pointer, (nodes + 1,)), "source": (source, source.shape[:1]), "labels": (labels, (nodes,))}
    for name, (array, shape) in expected.items():
        if array.dtype != np.int64 or array.shape != shape:
            raise ValueError(f"{folder / name}.npy is {array.dtype} {array.shape}; expected int64 {shape}.")
    if features.ndim != 2 or len(features) != nodes or features.dtype.kind != "f":
        raise ValueError(f"{folder}/features.npy is {features.dtype} {features.shape}; expected floats [{nodes}, F].")
    if pointer[0] != 0 or pointer[-1] != graph.num_edges:
        raise ValueError(f"{folder}/pointer.npy does not span the {graph.num_edges} edges of source.npy.")
    for begin in range(0, nodes, _SCAN):
        if (np.diff(pointer[begin : begin + _SCAN + 1]) < 0).any():
            raise ValueError(f"{folder}/pointer.npy falls somewhere after node {begin}; it must rise.")
    for begin in range(0, graph.num_edges, _SCAN):
        part = source[begin : begin + _SCAN]
        if part.min() < 0 or part.max() >= nodes:
            raise ValueError(f"{folder}/source.npy names a node outside 0 … {nodes - 1} after edge {begin}.")
    return graph


def _mapped(path: Path) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path} is missing; a graph on disk has the files {', '.join(f'{n}.npy' for n in NAMES)}.")
    try:
        # copy-on-write: torch asks for writable memory, and the file stays as it is
        return np.lib.format.open_memmap(path, mode="c")
    except Exception as error:  # a damaged header has many errors
        raise ValueError(f"{path} is no readable npy file ({error}).") from error
