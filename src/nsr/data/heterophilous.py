"""The heterophilous graphs of Platonov et al. (2023), from the authors' repository or generated.

``<folder>/heterophilous/<name>.npz`` holds ``node_features``, ``node_labels``, ``edges`` (each once) and
``train_masks``, ``val_masks``, ``test_masks`` ``[10, N]``, exactly as published. ``roman_empire_topology.npz`` holds
``edges`` and ``node_labels`` alone: enough for the label diagnostic, not for training.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nsr.data import download
from nsr.data.folder import data_folder, read_npz
from nsr.data.minesweeper import minesweeper
from nsr.data.node_graph import Metric, NodeGraph, check_edges, check_labels

SOURCE = "https://github.com/yandex-research/heterophilous-graphs/raw/main/data"


@dataclass(frozen=True)
class Published:
    """What is known of a data set before it is read.

    Attributes:
        metric: What it is judged by.
        nodes: Published count.
        edges: Published count, each undirected edge once.
        features: Published count.
        classes: Published count.
        sha256: Of the published file, where known; counts are checked in any case.
    """

    metric: Metric
    nodes: int
    edges: int
    features: int
    classes: int
    sha256: str | None = None


DATASETS = {
    "roman_empire": Published("accuracy", 22662, 32927, 300, 18),
    "amazon_ratings": Published("accuracy", 24492, 93050, 300, 5),
    "minesweeper": Published(
        "roc_auc", 10000, 39402, 7, 2, "e664c8dacf1e8ac466c2c09ed4b237bd2c5541f47a6eae9c6092cb87f16412b3"
    ),
    "tolokers": Published(
        "roc_auc", 11758, 519000, 10, 2, "dacf3ac94cec53d03cd2adb5255c08b33dee1656c33ca8164a464bd9450a1667"
    ),
    "questions": Published("roc_auc", 48921, 153540, 301, 2),
    "actor": Published(
        "accuracy", 7600, 26659, 932, 5, "c350eef06b2c2a9bf8218be2b57cac6d4003d0922eb597a039e9123f75817816"
    ),
    "chameleon_filtered": Published(
        "accuracy", 890, 8854, 2325, 5, "bf46f07e1fb5249280447e5fe3100f3e82fc4b93ad1e13ffcfdec924b6ac0bb5"
    ),
}
GENERATED = "minesweeper_generated"


def heterophilous(name: str, folder: Path | None = None) -> NodeGraph:
    """Load a data set by name; ``minesweeper_generated`` needs no file.

    Args:
        name: One of :data:`DATASETS`, with ``_`` or ``-``, or ``minesweeper_generated``.
        folder: Default: :func:`nsr.data.folder.data_folder`.

    Raises:
        ValueError: No such data set, or its file is missing, damaged or not what it should be.
    """
    name = canonical(name)
    if name == GENERATED:
        return minesweeper()
    known, path = DATASETS[name], path_of(name, folder)
    keys = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
    file = read_npz(path, keys, _remedy(name, path))
    for key, kind in (("node_features", np.number), ("node_labels", np.integer), ("edges", np.integer)):
        if not np.issubdtype(file[key].dtype, kind):
            raise ValueError(f"{path} is damaged: {key} are {file[key].dtype}. Delete it, then: {_remedy(name, path)}")
    try:
        graph = NodeGraph(
            name,
            known.metric,
            file["node_features"].astype(np.float32),
            file["node_labels"].astype(np.int64),
            file["edges"].astype(np.int64),
            *(file[f"{part}_masks"] for part in ("train", "val", "test")),
        )
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error} Delete it, then: {_remedy(name, path)}") from error
    found = (len(graph.labels), len(graph.edges), graph.features.shape[1], graph.classes)
    expected = (known.nodes, known.edges, known.features, known.classes)
    if found != expected:
        raise ValueError(
            f"{path} has {found} nodes, edges, features and classes; the published {name} has {expected}. "
            f"Delete it, then: {_remedy(name, path)}"
        )
    return graph


def topology(name: str, folder: Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Edges ``[E, 2]`` and labels ``[N]`` of a data set, also where nothing more of it is at hand."""
    name = canonical(name)
    path = path_of(name, folder)
    short = path.with_name(f"{name}_topology.npz")
    if name == GENERATED or path.is_file() or not short.is_file():
        graph = heterophilous(name, folder)
        return graph.edges, graph.labels
    file = read_npz(short, ("edges", "node_labels"), _remedy(name, path))
    edges, labels = file["edges"].astype(np.int64), file["node_labels"].astype(np.int64)
    check_edges(str(short), edges, len(labels))
    check_labels(str(short), labels)
    return edges, labels


def fetch(name: str, folder: Path | None = None) -> Path:
    """Download a data set from the authors' repository unless it is there, and check it."""
    name = canonical(name)
    if name == GENERATED:
        raise ValueError(f"{GENERATED} is made where it is used; there is nothing to fetch.")
    path = path_of(name, folder)
    download.fetch(f"{SOURCE}/{name}.npz", path, DATASETS[name].sha256)
    verify(name, folder)
    return path


def verify(name: str, folder: Path | None = None) -> None:
    """Check hash, counts, labels, edges and masks of a data set.

    Raises:
        ValueError: Something is not as published.
    """
    name = canonical(name)
    heterophilous(name, folder)
    if name != GENERATED and DATASETS[name].sha256 is not None:
        found = download.file_hash(path_of(name, folder))
        if found != DATASETS[name].sha256:
            raise ValueError(
                f"{path_of(name, folder)} has sha256 {found}, the published file {DATASETS[name].sha256}. "
                + _remedy(name, path_of(name, folder))
            )


def path_of(name: str, folder: Path | None = None) -> Path:
    """Where the file of a data set belongs."""
    return (folder or data_folder()) / "heterophilous" / f"{name}.npz"


def canonical(name: str) -> str:
    """The name with underscores; refuses what is no data set."""
    plain = name.lower().replace("-", "_")
    if plain not in DATASETS and plain != GENERATED:
        raise ValueError(f"There is no data set {name!r}; there are {', '.join((*DATASETS, GENERATED))}, and zinc.")
    return plain


def _remedy(name: str, path: Path) -> str:
    return f"Run `nsr data fetch {name}`, or put {SOURCE}/{name}.npz at {path}."
