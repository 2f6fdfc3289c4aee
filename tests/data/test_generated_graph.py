"""The generated graph is what it says it is, the same every time, and refused when damaged."""

from pathlib import Path

import numpy as np
import pytest

from nsr.data.disk_graph import open_graph
from nsr.data.generated_graph import CLASSES, generated_graph


def test_counts_and_statistics(tmp_path: Path) -> None:
    graph = generated_graph(tmp_path / "graph", nodes=10_000, edges=120_000, features=8)
    assert (graph.num_nodes, graph.num_edges, graph.features.shape) == (10_000, 120_000, (10_000, 8))
    assert np.bincount(graph.labels).tolist() == [2500] * CLASSES
    target = np.repeat(np.arange(10_000), np.diff(graph.pointer))
    homophily = (graph.labels[graph.source] == graph.labels[target]).mean()
    assert abs(homophily - 1 / 8) < 0.01
    for label in range(CLASSES):  # what a mean over the neighbours sees is the same for every class: nothing
        members = graph.source[graph.labels[target] == label]
        assert np.abs(graph.features[members].mean(0)).max() < 0.03
    spread = [graph.features[graph.source[graph.labels[target] == label], 0].var() for label in (0, 2)]
    assert spread[1] - spread[0] > 0.9  # and the spread along e1 tells class 2 from class 0


def test_it_is_made_once_and_always_the_same(tmp_path: Path) -> None:
    first = generated_graph(tmp_path / "a", nodes=500, edges=3000)
    written = (tmp_path / "a" / "source.npy").stat().st_mtime_ns
    again = generated_graph(tmp_path / "a", nodes=500, edges=3000)
    twin = generated_graph(tmp_path / "b", nodes=500, edges=3000)
    assert (tmp_path / "a" / "source.npy").stat().st_mtime_ns == written
    for name in ("pointer", "source", "features", "labels"):
        assert (getattr(first, name) == getattr(twin, name)).all()
        assert (getattr(first, name) == getattr(again, name)).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(ValueError, match="holds another graph"):
        generated_graph(tmp_path / "a", nodes=501, edges=3000)


def test_reading_does_not_write(tmp_path: Path) -> None:
    graph = generated_graph(tmp_path / "graph", nodes=500, edges=3000)
    graph.labels[0] += 1
    assert open_graph(tmp_path / "graph").labels[0] == graph.labels[0] - 1


def damaged(folder: Path, name: str, change: str) -> None:
    path = folder / f"{name}.npy"
    if change == "missing":
        path.unlink()
        return
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-64])
        return
    array = np.load(path)
    if change == "out of range":
        array[5] = 500
    elif change == "falling":
        array[[5, 6]] = array[6] + 1, array[5]
    elif change == "short":
        array = array[:-1]
    elif change == "float":
        array = array.astype(float)
    elif change == "pickled":
        array = np.array([print], dtype=object)
    np.save(path, array)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("labels", "missing"),
        ("features", "truncated"),
        ("source", "out of range"),
        ("source", "short"),
        ("source", "float"),
        ("pointer", "falling"),
        ("pointer", "short"),
        ("labels", "pickled"),
    ],
)
def test_a_damaged_graph_is_refused(tmp_path: Path, name: str, change: str) -> None:
    folder = tmp_path / "graph"
    generated_graph(folder, nodes=500, edges=3000)
    damaged(folder, name, change)
    with pytest.raises(ValueError, match=rf"{name}\.npy"):
        open_graph(folder)
