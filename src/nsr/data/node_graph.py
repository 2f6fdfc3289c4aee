"""One graph with a class for every node, and splits of its nodes."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Metric = Literal["accuracy", "roc_auc"]


@dataclass(frozen=True)
class NodeGraph:
    """A data set for node classification.

    Attributes:
        name: Of the data set.
        metric: What it is judged by.
        features: ``[N, F]``, float32.
        labels: Classes ``0 .. C - 1``, ``[N]``, int64.
        edges: Each undirected edge once, ``[E, 2]``, int64.
        train_masks: Training nodes of each split, ``[S, N]``, bool.
        val_masks: Validation nodes.
        test_masks: Test nodes.
    """

    name: str
    metric: Metric
    features: np.ndarray
    labels: np.ndarray
    edges: np.ndarray
    train_masks: np.ndarray
    val_masks: np.ndarray
    test_masks: np.ndarray

    def __post_init__(self) -> None:
        check_labels(self.name, self.labels)
        nodes = len(self.labels)
        check_edges(self.name, self.edges, nodes)
        if self.features.ndim != 2 or len(self.features) != nodes or not np.isfinite(self.features).all():
            raise ValueError(f"{self.name}: features {self.features.shape} are not one finite row for {nodes} nodes.")
        masks = (self.train_masks, self.val_masks, self.test_masks)
        if len({mask.shape for mask in masks}) != 1 or masks[0].ndim != 2 or masks[0].shape[1] != nodes:
            raise ValueError(
                f"{self.name}: masks {[m.shape for m in masks]} are not one row of {nodes} for each split."
            )
        if any(mask.dtype != bool for mask in masks):
            raise ValueError(f"{self.name}: masks are {[str(m.dtype) for m in masks]}; expected bool.")
        twice = np.flatnonzero((np.stack(masks).sum(axis=0) > 1).any(axis=1))
        if len(twice):
            raise ValueError(f"{self.name}: in split {twice[0]} a node is in more than one of train, val and test.")
        empty = [name for name, mask in zip(("train", "val", "test"), masks, strict=True) if not mask.any(axis=1).all()]
        if empty:
            raise ValueError(f"{self.name}: a split has no {empty[0]} nodes.")

    @property
    def classes(self) -> int:
        """``C``."""
        return int(self.labels.max()) + 1

    @property
    def splits(self) -> int:
        """``S``."""
        return len(self.train_masks)

    def edge_index(self) -> np.ndarray:
        """Both directions of every edge, ``[2, 2E]``."""
        return np.concatenate([self.edges, self.edges[:, ::-1]]).T.copy()


def check_labels(name: str, labels: np.ndarray) -> None:
    """Refuse labels that are not ``0 .. C - 1`` with every class present."""
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise ValueError(f"{name}: labels are {labels.dtype} of shape {labels.shape}; expected one integer a node.")
    different = len(np.unique(labels))
    if labels.min() != 0 or labels.max() != different - 1:
        raise ValueError(
            f"{name}: labels run from {labels.min()} to {labels.max()} with {different} different values; "
            "expected every class from 0 on."
        )


def check_edges(name: str, edges: np.ndarray, nodes: int) -> None:
    """Refuse edges that are not pairs of existing nodes, self-loops, and edges that stand there twice."""
    if edges.ndim != 2 or edges.shape[1] != 2 or not np.issubdtype(edges.dtype, np.integer):
        raise ValueError(f"{name}: edges are {edges.dtype} of shape {edges.shape}; expected integers [E, 2].")
    if len(edges) and not 0 <= edges.min() <= edges.max() < nodes:
        raise ValueError(f"{name}: edges name nodes {edges.min()} to {edges.max()}; there are {nodes}.")
    low, high = edges.min(axis=1).astype(np.int64), edges.max(axis=1).astype(np.int64)
    if (low == high).any() or len(np.unique(low * nodes + high)) != len(edges):
        raise ValueError(f"{name}: an edge is a self-loop or stands there twice; expected each undirected edge once.")
