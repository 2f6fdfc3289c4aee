"""ZINC, the 12,000-graph subset of Dwivedi et al.: predict the constrained solubility of a molecule.

``<folder>/zinc/zinc12k.npz`` holds for each of ``train``, ``val`` and ``test`` the graphs one after the other:
``<split>_num_nodes``, ``_num_edges``, ``_atom`` (0 to 27), ``_edges`` (each bond once, node numbers within the
molecule), ``_bond`` (1 to 3) and ``_y``. It is made from the official files, which are Python pickles: these are opened
here by a reader that knows tensors and nothing else.
"""

import io
import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from nsr.data import download
from nsr.data.folder import data_folder, read_npz

MOLECULES = "https://www.dropbox.com/s/feo9qle74kg48gy/molecules.zip?dl=1"
SUBSET = "https://raw.githubusercontent.com/graphdeeplearning/benchmarking-gnns/master/data/molecules/{}.index"
Part = Literal["train", "val", "test"]
SIZES: dict[Part, int] = {"train": 10_000, "val": 1_000, "test": 1_000}
ATOMS = 28
_FIELDS = ("num_nodes", "num_edges", "atom", "edges", "bond", "y")


@dataclass(frozen=True)
class Molecules:
    """Graphs one after the other.

    Attributes:
        num_nodes: Atoms of each molecule, ``[G]``.
        num_edges: Bonds of each molecule, ``[G]``.
        atom: Atom types, ``[N]``.
        edges: Each bond once, numbers within the molecule, ``[E, 2]``.
        bond: Bond types, ``[E]``; the paper does not use them.
        y: Target of each molecule, ``[G]``, float32.
    """

    num_nodes: np.ndarray
    num_edges: np.ndarray
    atom: np.ndarray
    edges: np.ndarray
    bond: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.num_nodes)


def zinc(split: Part, folder: Path | None = None) -> Molecules:
    """One split.

    Raises:
        ValueError: The file is missing, damaged or not what it should be.
    """
    path = path_of(folder)
    remedy = f"Run `nsr data fetch zinc` (it needs the network) or put zinc12k.npz at {path}."
    file = read_npz(path, [f"{split}_{field}" for field in _FIELDS], remedy)
    wide = {field: file[f"{split}_{field}"].astype(np.int64) for field in _FIELDS[:-1]}
    molecules = Molecules(**wide, y=file[f"{split}_y"].astype(np.float32))
    problem = _problem(molecules)
    if len(molecules) != SIZES[split]:
        problem = f"{len(molecules)} molecules, expected {SIZES[split]}"
    if problem:
        raise ValueError(f"{path}, {split}: {problem}. Delete the file, then: {remedy}")
    return molecules


def fetch(folder: Path | None = None) -> Path:
    """Make the file from the official download unless it is there."""
    path = path_of(folder)
    if not path.is_file():
        source = path.parent / "official"
        archive = source / "molecules.zip"
        download.fetch(MOLECULES, archive)
        arrays: dict[str, np.ndarray] = {}
        for split in SIZES:
            listing = source / f"{split}.index"
            download.fetch(SUBSET.format(split), listing)
            chosen = [int(number) for number in listing.read_text().replace("\n", ",").split(",") if number.strip()]
            with zipfile.ZipFile(archive) as file, file.open(f"molecules/{split}.pickle") as stream:
                arrays |= convert(read_molecules(stream.read()), chosen, split)
        partial = path.with_name(f".{path.name}.npz")
        np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    verify(folder)
    return path


def verify(folder: Path | None = None) -> None:
    """Read and check every split."""
    for split in SIZES:
        zinc(split, folder)


def path_of(folder: Path | None = None) -> Path:
    """Where the file belongs."""
    return (folder or data_folder()) / "zinc" / "zinc12k.npz"


def convert(molecules: list[dict[str, Any]], chosen: list[int], split: str) -> dict[str, np.ndarray]:
    """The arrays of one split from the official records (``atom_type``, ``bond_type`` as a matrix, the target)."""
    rows: dict[str, list[np.ndarray]] = {field: [] for field in _FIELDS}
    for number in chosen:
        molecule = molecules[number]
        atom, bond = molecule["atom_type"].numpy(), molecule["bond_type"].numpy()
        edges = np.argwhere(np.triu(bond, 1))
        rows["num_nodes"].append(np.array([len(atom)]))
        rows["num_edges"].append(np.array([len(edges)]))
        rows["atom"].append(atom.reshape(-1))
        rows["edges"].append(edges)
        rows["bond"].append(bond[edges[:, 0], edges[:, 1]])
        rows["y"].append(np.asarray(molecule["logP_SA_cycle_normalized"], dtype=np.float32).reshape(-1))
    kinds = {field: np.float32 if field == "y" else np.uint8 for field in _FIELDS}
    return {f"{split}_{field}": np.concatenate(rows[field]).astype(kinds[field]) for field in _FIELDS}


def read_molecules(content: bytes) -> list[dict[str, Any]]:
    """The records of an official pickle, opened by a reader that can build tensors and plain containers only."""
    return _TensorsOnly(io.BytesIO(content)).load()


class _TensorsOnly(pickle.Unpickler):
    """Refuses every name that is not needed to rebuild a tensor, so that a file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return torch._utils._rebuild_tensor_v2
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise ValueError(f"The ZINC pickle asks for {module}.{name}, which it has no need of; it is not opened.")


def _problem(m: Molecules) -> str | None:
    """What is wrong with a split, ``None`` if nothing is."""
    if len(m.num_edges) != len(m) or len(m.y) != len(m):
        return f"{len(m)} node counts, {len(m.num_edges)} edge counts and {len(m.y)} targets"
    if m.num_nodes.sum() != len(m.atom) or m.num_edges.sum() != len(m.edges) or len(m.bond) != len(m.edges):
        return "counts of nodes or edges do not add up to the arrays"
    if m.atom.min() < 0 or m.atom.max() >= ATOMS:
        return f"atom types run from {m.atom.min()} to {m.atom.max()}, expected 0 to {ATOMS - 1}"
    if (m.edges.max(axis=1) >= np.repeat(m.num_nodes, m.num_edges)).any() or m.edges.min() < 0:
        return "an edge names a node that its molecule does not have"
    if not np.isfinite(m.y).all():
        return "a target is not a finite number"
    return None
