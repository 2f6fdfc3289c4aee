"""Graph data is read without trust: what is wrong with a file is said, with its name and the remedy."""

import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from nsr.data import heterophilous, zinc
from nsr.data.folder import data_folder
from nsr.data.graph_statistics import graph_statistics
from nsr.data.heterophilous import DATASETS, Published
from nsr.data.minesweeper import minesweeper
from nsr.data.node_graph import NodeGraph

TINY = Published("accuracy", nodes=40, edges=60, features=3, classes=4)


def tiny(**changes: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    pairs = np.array([(a, b) for a in range(40) for b in range(a + 1, 40)])
    place = np.stack([rng.permutation(40) for _ in range(10)])
    arrays = {
        "node_features": rng.random((40, 3), dtype=np.float32),
        "node_labels": np.arange(40) % 4,
        "edges": pairs[rng.permutation(len(pairs))[:60]],
        "train_masks": place < 20,
        "val_masks": (place >= 20) & (place < 30),
        "test_masks": place >= 30,
    }
    return arrays | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with a small data set in the layout of Roman-empire's file."""
    monkeypatch.setitem(DATASETS, "roman_empire", TINY)
    monkeypatch.setenv("NSR_DATA", str(tmp_path))
    (tmp_path / "heterophilous").mkdir()
    np.savez(tmp_path / "heterophilous" / "roman_empire.npz", **tiny())  # type: ignore[arg-type]
    return tmp_path


def test_reads_the_published_layout(folder: Path) -> None:
    graph = heterophilous.heterophilous("Roman-Empire")
    assert (graph.classes, graph.splits, graph.metric) == (4, 10, "accuracy")
    edge_index = graph.edge_index()
    assert edge_index.shape == (2, 120)
    assert {tuple(edge) for edge in edge_index.T.tolist()} == {tuple(edge) for edge in edge_index[::-1].T.tolist()}
    edges, labels = heterophilous.topology("roman-empire")
    assert np.array_equal(edges, graph.edges)
    assert np.array_equal(labels, graph.labels)


def test_topology_alone_is_enough_for_labels(folder: Path) -> None:
    (folder / "heterophilous" / "roman_empire.npz").unlink()
    arrays = tiny()
    np.savez(
        folder / "heterophilous" / "roman_empire_topology.npz",
        edges=arrays["edges"].astype(np.int32),
        node_labels=arrays["node_labels"].astype(np.int8),
    )
    edges, _ = heterophilous.topology("roman_empire")
    assert np.array_equal(edges, arrays["edges"])
    with pytest.raises(ValueError, match=r"roman_empire\.npz is not there.*nsr data fetch roman_empire"):
        heterophilous.heterophilous("roman_empire")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_labels": np.arange(40) % 4 - 1}, "labels run from -1 to 2"),
        ({"node_labels": np.where(np.arange(40) % 4 == 2, 9, np.arange(40) % 4)}, "expected every class"),
        ({"edges": np.array([[0, 40]])}, "edges name nodes 0 to 40; there are 40"),
        ({"edges": np.array([[0, 1], [1, 0]])}, "stands there twice"),
        ({"val_masks": tiny()["train_masks"]}, "in more than one of train, val and test"),
        ({"test_masks": np.zeros((10, 40), dtype=bool)}, "no test nodes"),
        ({"train_masks": np.ones((10, 39), dtype=bool)}, "not one row of 40"),
        ({"node_features": np.full((40, 3), np.nan)}, "finite row"),
        ({"node_labels": np.where(np.arange(40) % 4 == 2, 2**40, np.arange(40) % 4)}, "expected every class"),
        ({"node_labels": np.int64(3)}, "expected one integer a node"),
        ({"node_labels": np.arange(40) % 4 / 2}, r"npz is damaged: node_labels are float64.*Delete it, then"),
        ({"node_features": np.full((40, 3), "x")}, "node_features are <U1"),
        ({"edges": tiny()["edges"][:59]}, r"the published roman_empire has \(40, 60, 3, 4\)"),
    ],
)
def test_wrong_content_is_named(folder: Path, change: dict[str, np.ndarray], message: str) -> None:
    np.savez(folder / "heterophilous" / "roman_empire.npz", **tiny(**change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        heterophilous.heterophilous("roman_empire")


def test_a_truncated_or_foreign_file_is_named(folder: Path) -> None:
    path = folder / "heterophilous" / "roman_empire.npz"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a zip file"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"roman_empire\.npz is damaged"):
            heterophilous.heterophilous("roman_empire")
    np.savez(path, edges=np.zeros((0, 2)))
    with pytest.raises(ValueError, match="has no node_features"):
        heterophilous.heterophilous("roman_empire")


def test_pickled_objects_are_not_opened(folder: Path) -> None:
    objects = np.array([{}], dtype=object)
    np.savez(folder / "heterophilous" / "roman_empire.npz", **tiny(node_features=objects))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="damaged, incomplete or no npz file"):
        heterophilous.heterophilous("roman_empire")


def test_a_folder_without_permission_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "heterophilous" / "roman_empire.npz"
    path.chmod(0)
    if os.access(path, os.R_OK):  # a superuser reads everything: let the system say no in its place

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match="may not be read"):
        heterophilous.heterophilous("roman_empire")
    monkeypatch.undo()
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no data set 'cora'; there are roman_empire"):
        heterophilous.heterophilous("cora", tmp_path)
    with pytest.raises(ValueError, match=r"questions\.npz is not there"):
        heterophilous.heterophilous("questions", tmp_path)
    with pytest.raises(ValueError, match=r"zinc12k\.npz is not there"):
        zinc.zinc("val", tmp_path)


def test_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NSR_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("NSR_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "nsr"


def test_generated_minesweeper_is_the_game() -> None:
    graph = minesweeper(side=12, splits=3, seed=1)
    neighbours: list[set[int]] = [set() for _ in range(144)]
    for a, b in graph.edges:
        neighbours[a].add(b)
        neighbours[b].add(a)
    assert sorted({len(n) for n in neighbours}) == [3, 5, 8]
    assert graph.labels.sum() == round(0.2 * 144)
    assert (graph.features.sum(1) == 1).all()
    assert graph.features[:, 0].sum() == 72
    for node in np.flatnonzero(graph.features[:, 0] == 0):
        mines = sum(graph.labels[n] for n in neighbours[node])
        assert graph.features[node].argmax() == 1 + min(mines, 5)
    assert graph.train_masks.sum(1).tolist() == [72] * 3
    assert not np.array_equal(graph.train_masks[0], graph.train_masks[1])
    with pytest.raises(ValueError, match="side >= 2"):
        minesweeper(side=1)


@pytest.mark.data
@pytest.mark.parametrize("name", ["minesweeper", "tolokers", "actor", "chameleon_filtered"])
def test_files_at_hand_are_the_published_ones(data_dir: Path, name: str) -> None:
    heterophilous.verify(name, data_dir)


@pytest.mark.data
def test_generated_minesweeper_resembles_the_published_one(data_dir: Path) -> None:
    published, generated = heterophilous.heterophilous("minesweeper", data_dir), minesweeper()
    assert published.edges.shape == generated.edges.shape
    assert {tuple(e) for e in published.edges.tolist()} == {tuple(sorted(e)) for e in generated.edges.tolist()}
    assert np.abs(published.features.mean(0) - generated.features.mean(0)).max() < 0.02
    assert published.labels.sum() == generated.labels.sum() == 2000


# Rows of the paper's table of statistics: degree, clustering, diameter, homophilies, informativeness.
TABLE = {
    "roman_empire": (22662, 32927, 2.91, 0.29, 0.39, 6824, 18, 0.05, -0.05, 0.11),
    "minesweeper": (10000, 39402, 7.88, 0.43, 0.44, 99, 2, 0.68, 0.01, 0.00),
}


@pytest.mark.data
@pytest.mark.parametrize("name", TABLE)
def test_statistics_equal_the_published_table(data_dir: Path, name: str) -> None:
    found = graph_statistics(*heterophilous.topology(name, data_dir))
    assert (
        found.nodes,
        found.edges,
        round(found.average_degree, 2),
        round(found.global_clustering, 2),
        round(found.average_local_clustering, 2),
        found.diameter,
        found.classes,
        round(found.edge_homophily, 2),
        round(found.adjusted_homophily, 2),
        round(found.label_informativeness, 2),
    ) == TABLE[name]


def test_statistics_of_a_known_graph() -> None:
    # a triangle with a tail, and a separate pair
    edges = np.array([[0, 1], [1, 2], [0, 2], [2, 3], [3, 4], [5, 6]])
    found = graph_statistics(edges, np.array([0, 0, 0, 1, 1, 0, 1]))
    assert found.diameter == 3
    assert found.global_clustering == pytest.approx(3 / 6)
    assert found.average_local_clustering == pytest.approx((1 + 1 + 1 / 3) / 7)
    assert found.edge_homophily == pytest.approx(4 / 6)


def test_official_zinc_records_become_arrays() -> None:
    bonds = torch.tensor([[0, 2, 0], [2, 0, 1], [0, 1, 0]])
    record = {"num_atom": 3, "atom_type": torch.tensor([5, 0, 27]), "bond_type": bonds}
    record["logP_SA_cycle_normalized"] = torch.tensor([0.5])
    arrays = zinc.convert(zinc.read_molecules(pickle.dumps([record, record])), [1, 0], "val")
    assert arrays["val_num_nodes"].tolist() == [3, 3]
    assert arrays["val_edges"].tolist() == [[0, 1], [1, 2]] * 2
    assert arrays["val_bond"].tolist() == [2, 1] * 2
    assert arrays["val_y"].tolist() == [0.5, 0.5]


def test_a_pickle_that_would_run_code_is_not_opened() -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, ("true",)

    with pytest.raises(ValueError, match=r"asks for posix\.system"):
        zinc.read_molecules(pickle.dumps([Evil()]))


@pytest.mark.data
def test_zinc_at_hand(data_dir: Path) -> None:
    zinc.verify(data_dir)
    train = zinc.zinc("train", data_dir)
    assert len(train) == 10_000
    assert train.atom.max() < zinc.ATOMS
    assert train.num_nodes.max() <= 37


def test_zinc_with_wrong_content_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zinc.SIZES, "val", 2)
    arrays = {
        "val_num_nodes": np.array([2, 3], dtype=np.uint8),
        "val_num_edges": np.array([1, 2], dtype=np.uint8),
        "val_atom": np.array([0, 1, 2, 3, 4], dtype=np.uint8),
        "val_edges": np.array([[0, 1], [0, 1], [1, 2]], dtype=np.uint8),
        "val_bond": np.array([1, 1, 2], dtype=np.uint8),
        "val_y": np.array([0.5, 1.0], dtype=np.float32),
    }
    (tmp_path / "zinc").mkdir()

    def load(**changes: np.ndarray) -> zinc.Molecules:
        np.savez(tmp_path / "zinc" / "zinc12k.npz", **(arrays | changes))  # type: ignore[arg-type]
        return zinc.zinc("val", tmp_path)

    assert len(load()) == 2
    with pytest.raises(ValueError, match="a node that its molecule does not have"):
        load(val_edges=np.array([[0, 2], [0, 1], [1, 2]], dtype=np.uint8))
    with pytest.raises(ValueError, match="atom types run from 0 to 28"):
        load(val_atom=np.array([0, 1, 2, 3, 28], dtype=np.uint8))
    with pytest.raises(ValueError, match="do not add up"):
        load(val_num_nodes=np.array([2, 4], dtype=np.uint8))
    with pytest.raises(ValueError, match="not a finite number"):
        load(val_y=np.array([0.5, np.nan], dtype=np.float32))


def test_bool_masks_are_required() -> None:
    arrays = tiny()
    with pytest.raises(ValueError, match="expected bool"):
        NodeGraph(
            "x",
            "accuracy",
            arrays["node_features"],
            arrays["node_labels"],
            arrays["edges"],
            *(arrays[f"{part}_masks"].astype(np.int8) for part in ("train", "val", "test")),
        )
