"""Tree-NeighborsMatch (Alon and Yahav, 2021): the root must name the value of the leaf whose key it is asked for.

::

            query 3              node inputs are pairs (key, value), 0 is the blank:
           /       \\               root   (query, 0)
         ·           ·             inner  (0, 0)
       /   \\       /   \\           leaf   (i + 1, perm[i]), i from left to right
     1:4   2:2   3:1   4:3         label  perm[query - 1], here 1

A complete binary tree of depth ``d`` has ``L = 2^d`` leaves and ``n = 2L - 1`` nodes, numbered in pre-order (root 0,
the left child of ``v`` is ``v + 1``). Edges run from child to parent, and every node has a self-loop. One permutation
of the values makes ``L`` samples, one for each query; sample ``s`` is query ``s % L + 1`` on permutation ``s // L``.
"""

import hashlib
import itertools
import math
import random
from dataclasses import dataclass

import numpy as np
from sklearn.model_selection import train_test_split

DEPTHS = range(2, 9)


@dataclass(frozen=True)
class TreeTask:
    """The samples of one depth and seed.

    Attributes:
        depth: ``d``.
        seed: What permutations and split are drawn from.
        permutations: Values of the leaves from left to right, ``[P, L]``, int64.
        train: Indices of the training samples, int64, in the order of the split.
        test: Indices of the test samples. Their permutations occur in training too, with other queries.
    """

    depth: int
    seed: int
    permutations: np.ndarray
    train: np.ndarray
    test: np.ndarray

    @property
    def leaves(self) -> int:
        """``L = 2^d``, also the number of classes and of queries."""
        return 2**self.depth

    def labels(self, samples: np.ndarray) -> np.ndarray:
        """Classes ``0 .. L - 1`` of the given samples: the asked-for value less one."""
        return self.permutations.reshape(-1)[samples] - 1

    def fresh(self, count: int) -> np.ndarray:
        """Permutations that occur nowhere in the task, ``[count, L]``: accuracy on them is generalisation.

        Raises:
            ValueError: Fewer than ``count`` permutations are left (depth 2 uses all 24).
        """
        left = math.factorial(self.leaves) - len(self.permutations)
        if count > left:
            raise ValueError(
                f"Only {left} permutations of {self.leaves} values are left beside the {len(self.permutations)} "
                f"of the task, got count={count}."
            )
        # A stream of its own, so that the task's own draws stay those of the golden values.
        rng = np.random.RandomState([self.seed, self.depth, count])
        seen = {row.tobytes() for row in self.permutations}
        rows: list[np.ndarray] = []
        while len(rows) < count:
            row = rng.permutation(np.arange(1, self.leaves + 1))
            if row.tobytes() not in seen:
                seen.add(row.tobytes())
                rows.append(row)
        return np.array(rows, dtype=np.int64).reshape(count, self.leaves)

    def hashes(self) -> dict[str, str]:
        """The first 16 hex digits of the sha256 of each little-endian int64 array."""
        arrays = {"permutations": self.permutations, "train": self.train, "test": self.test}
        return {name: hashlib.sha256(array.astype("<i8").tobytes()).hexdigest()[:16] for name, array in arrays.items()}


def permutation_count(depth: int) -> int:
    """How many permutations a task of this depth draws; each makes ``L`` samples."""
    leaves = 2**depth
    return min(1000, math.factorial(leaves), 32000 // leaves)


def tree_task(depth: int, seed: int = 11) -> TreeTask:
    """Draw the task of one depth, number for number as the benchmark's reference implementation does.

    One stream of numpy and one of ``random`` start at ``seed``; permutations come first, then scikit-learn's stratified
    split goes on from where numpy stands. The global streams are neither read nor moved.
    """
    if depth not in DEPTHS:
        raise ValueError(f"depth is {depth}; Tree-NeighborsMatch has depths {DEPTHS.start} to {DEPTHS.stop - 1}.")
    leaves = 2**depth
    numpy_stream, python_stream = np.random.RandomState(seed), random.Random(seed)
    values = range(1, leaves + 1)
    count = permutation_count(depth)
    if depth > 3:
        permutations = np.array([numpy_stream.permutation(values) for _ in range(count)], dtype=np.int64)
    else:
        permutations = np.array(python_stream.sample(list(itertools.permutations(values)), count), dtype=np.int64)
    samples = np.arange(permutations.size)
    train, test = train_test_split(
        samples, train_size=0.8, shuffle=True, stratify=permutations.reshape(-1), random_state=numpy_stream
    )
    return TreeTask(depth, seed, permutations, train.astype(np.int64), test.astype(np.int64))


@dataclass(frozen=True)
class Topology:
    """One complete binary tree in pre-order.

    Attributes:
        parent: Parent of each node, ``[n]``; the root is its own.
        level: Distance from the root, ``[n]``.
        leaf: The leaves from left to right, ``[L]``.
    """

    parent: np.ndarray
    level: np.ndarray
    leaf: np.ndarray

    def edge_index(self) -> np.ndarray:
        """Child to parent, then a self-loop on every node, ``[2, 2n - 1]``."""
        nodes = np.arange(len(self.parent))
        return np.stack([np.concatenate([nodes[1:], nodes]), np.concatenate([self.parent[1:], nodes])])


def topology(depth: int) -> Topology:
    """The tree of the given depth."""
    parent = np.zeros(2 ** (depth + 1) - 1, dtype=np.int64)
    level = np.zeros_like(parent)
    # In pre-order the subtree of v is contiguous: its left half follows v, its right half follows that.
    stack = [(0, 0, 0)]
    while stack:
        node, above, depth_here = stack.pop()
        parent[node], level[node] = above, depth_here
        if depth_here < depth:
            half = 2 ** (depth - depth_here) - 1
            stack += [(node + 1, node, depth_here + 1), (node + 1 + half, node, depth_here + 1)]
    return Topology(parent, level, np.flatnonzero(level == depth))


def node_inputs(permutations: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Keys and values of the trees' nodes: ``[S, L]`` permutations, ``[S]`` queries from 1 to L -> ``[S, n, 2]``."""
    leaves = permutations.shape[1]
    tree = topology(leaves.bit_length() - 1)
    inputs = np.zeros((len(permutations), len(tree.parent), 2), dtype=np.int64)
    inputs[:, 0, 0] = queries
    inputs[:, tree.leaf, 0] = np.arange(1, leaves + 1)
    inputs[:, tree.leaf, 1] = permutations
    return inputs
