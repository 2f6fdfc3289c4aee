r"""The statistics by which the heterophilous graphs are described: degrees, clustering, diameter, homophily.

Definitions as in Platonov et al. (2023), on the undirected graph: global clustering is three times the triangles over
the connected triples; the mean local clustering counts 0 for nodes of degree below 2; the diameter is that of the
largest connected component. With the class shares :math:`\bar p_k` taken over the ends of edges,

.. math::
    h_{edge} = \Pr(y_u = y_v), \qquad h_{adj} = \frac{h_{edge} - \sum_k \bar p_k^2}{1 - \sum_k \bar p_k^2}, \qquad
    LI = 2 - \frac{\sum_{k,l} p_{kl} \log p_{kl}}{\sum_k \bar p_k \log \bar p_k}.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components


@dataclass(frozen=True)
class GraphStatistics:
    """One column of the table; ``features`` is 0 where only the topology is at hand."""

    nodes: int
    edges: int
    average_degree: float
    global_clustering: float
    average_local_clustering: float
    diameter: int
    features: int
    classes: int
    edge_homophily: float
    adjusted_homophily: float
    label_informativeness: float


def graph_statistics(edges: np.ndarray, labels: np.ndarray, features: int = 0) -> GraphStatistics:
    """Every row of the table for a graph with each edge once, ``[E, 2]``, and labels ``[N]``."""
    nodes = len(labels)
    both = np.concatenate([edges, edges[:, ::-1]])
    adjacency = csr_array((np.ones(len(both)), (both[:, 0], both[:, 1])), shape=(nodes, nodes))
    degree = np.bincount(both[:, 0], minlength=nodes)
    closed = _closed_walks(adjacency, edges, nodes)
    open_or_closed = degree * (degree - 1.0)
    local = np.divide(closed, open_or_closed, out=np.zeros(nodes), where=open_or_closed > 0)
    homophily, adjusted, informativeness = label_structure(edges, labels)
    return GraphStatistics(
        nodes=nodes,
        edges=len(edges),
        average_degree=2 * len(edges) / nodes,
        global_clustering=float(closed.sum() / max(open_or_closed.sum(), 1)),
        average_local_clustering=float(local.mean()),
        diameter=diameter(adjacency),
        features=features,
        classes=int(labels.max()) + 1,
        edge_homophily=homophily,
        adjusted_homophily=adjusted,
        label_informativeness=informativeness,
    )


def label_structure(edges: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
    """Edge homophily, adjusted homophily and label informativeness, see the top of this file."""
    classes = int(labels.max()) + 1
    joint = np.zeros((classes, classes))
    np.add.at(joint, (labels[edges[:, 0]], labels[edges[:, 1]]), 1.0)
    joint = (joint + joint.T) / (2 * len(edges))
    share = joint.sum(axis=1)
    same, by_chance = float(np.trace(joint)), float(np.square(share).sum())
    informativeness = 2 - _plogp(joint) / _plogp(share)
    return same, (same - by_chance) / (1 - by_chance), informativeness


def diameter(adjacency: csr_array) -> int:
    """The longest shortest path of the largest connected component, exactly.

    Breadth-first searches from well-chosen nodes bound every node's eccentricity from both sides (a node is at least as
    eccentric as it is far from another, and at most that distance more than it); the search ends when no bound leaves
    room for more, usually after a few dozen of them.
    """
    _, component = connected_components(adjacency, directed=False)
    inside = np.flatnonzero(component == np.bincount(component).argmax())
    graph = adjacency[inside][:, inside]
    low = np.zeros(len(inside), dtype=np.int64)
    high = np.full(len(inside), len(inside), dtype=np.int64)
    from_above = True
    while (best := low.max()) < high.max():
        undecided = np.flatnonzero((high > best) & (low < high))
        chosen = undecided[high[undecided].argmax() if from_above else low[undecided].argmin()]
        from_above = not from_above
        distance = _distances(graph, int(chosen))
        eccentricity = distance.max()
        low = np.maximum(low, np.maximum(distance, eccentricity - distance))
        high = np.minimum(high, eccentricity + distance)
    return int(low.max())


def _distances(graph: csr_array, start: int) -> np.ndarray:
    """Hops from one node to all, by the levels of a breadth-first tree."""
    order, parent = breadth_first_order(graph, start, directed=False)
    hops = np.zeros(len(order), dtype=np.int64)
    for node in order[1:]:
        hops[node] = hops[parent[node]] + 1
    return hops


def _closed_walks(adjacency: csr_array, edges: np.ndarray, nodes: int) -> np.ndarray:
    """Ordered pairs of joined neighbours of each node, a block of edges at a time: twice its triangles."""
    closed = np.zeros(nodes)
    for start in range(0, len(edges), 20_000):
        block = edges[start : start + 20_000]
        common = adjacency[block[:, 0]].multiply(adjacency[block[:, 1]]).sum(axis=1)
        np.add.at(closed, block[:, 0], common)
        np.add.at(closed, block[:, 1], common)
    return closed


def _plogp(shares: np.ndarray) -> float:
    positive = shares[shares > 0]
    return float((positive * np.log(positive)).sum())
