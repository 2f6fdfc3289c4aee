"""Tree-NeighborsMatch is the benchmark's own, number for number."""

import random

import numpy as np
import pytest

from nsr.data.tree import node_inputs, topology, tree_task

# depth: permutations, first values, and the first 16 hex digits of three sha256
GOLDEN = {
    2: (24, [3, 2, 1, 4], "6de4879a98c5dc46", "20c175f7dbd1cdff", "cc790fb60dfaf7ae"),
    3: (1000, [6, 8, 2, 1, 4, 3, 7, 5], "dce2d5cb9c7cc71f", "bfa2c8cf14d02b46", "2637e16e74e7ab16"),
    4: (1000, [9, 4, 7, 11, 16, 5, 6, 15], "85685f038cd038de", "4687cb2d776d58a1", "53a7d1a3c3ea84d1"),
    5: (1000, [9, 7, 16, 10, 15, 20, 4, 23], "4f31b3fa289bc387", "a9500165a49e631d", "288c12c54c70504c"),
    6: (500, [10, 47, 27, 41, 52, 55, 44, 59], "8d47b1e6a0f1975c", "4e773486f9fe9ee3", "f7b897a5342c2bc6"),
    7: (250, [52, 3, 79, 10, 17, 78, 1, 105], "8066610a162fc44d", "aa0536ebaf2a7f1b", "e84a620780428c98"),
    8: (125, [138, 145, 27, 174, 200, 224, 219, 136], "ed417c4424f96273", "a06f77bee565a719", "de6cb609132eaea7"),
}


@pytest.mark.parametrize("depth", GOLDEN)
def test_golden_values(depth: int) -> None:
    count, first, permutations, train, test = GOLDEN[depth]
    task = tree_task(depth, seed=11)
    assert task.permutations.shape == (count, 2**depth)
    assert task.permutations[0, : len(first)].tolist() == first
    assert task.hashes() == {"permutations": permutations, "train": train, "test": test}


def test_the_global_streams_are_left_alone() -> None:
    np.random.seed(3)
    random.seed(3)
    expected = np.random.rand(), random.random()
    np.random.seed(3)
    random.seed(3)
    tree_task(3)
    assert (np.random.rand(), random.random()) == expected


def test_split_covers_every_sample_once_and_is_stratified() -> None:
    task = tree_task(4)
    both = np.sort(np.concatenate([task.train, task.test]))
    assert np.array_equal(both, np.arange(16_000))
    assert set(np.bincount(task.labels(task.test))) == {200}


def test_another_seed_is_another_task() -> None:
    assert tree_task(4, seed=12).hashes() != tree_task(4, seed=11).hashes()


def test_tree_in_pre_order() -> None:
    tree = topology(2)
    assert tree.parent.tolist() == [0, 0, 1, 1, 0, 4, 4]
    assert tree.level.tolist() == [0, 1, 2, 2, 1, 2, 2]
    assert tree.leaf.tolist() == [2, 3, 5, 6]
    edges = tree.edge_index()
    # three incoming edges at an inner node (two children, itself), one at a leaf
    assert np.bincount(edges[1]).tolist() == [3, 3, 1, 1, 3, 1, 1]


def test_the_label_is_the_value_of_the_asked_for_leaf() -> None:
    task = tree_task(3)
    samples = task.train[:50]
    inputs = node_inputs(task.permutations[samples // 8], samples % 8 + 1)
    for nodes, label in zip(inputs, task.labels(samples), strict=True):
        query = nodes[0, 0]
        (value,) = nodes[1:][nodes[1:, 0] == query][:, 1]
        assert value == label + 1
        assert nodes[0, 1] == 0


def test_fresh_permutations_are_new_distinct_and_repeatable() -> None:
    task = tree_task(3)
    fresh = task.fresh(300)
    rows = {tuple(row) for row in fresh}
    assert len(rows) == 300
    assert not rows & {tuple(row) for row in task.permutations}
    assert (np.sort(fresh, axis=1) == np.arange(1, 9)).all()
    assert np.array_equal(fresh, task.fresh(300))


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="depths 2 to 8"):
        tree_task(9)
    with pytest.raises(ValueError, match="Only 0 permutations"):
        tree_task(2).fresh(1)
