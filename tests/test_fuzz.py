"""Ten thousand damaged files: an error that is meant or a correct load; never a crash, a hang or an execution."""

import io
import json
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import nsr
from nsr.data import heterophilous, zinc
from nsr.data.disk_graph import NAMES, open_graph
from nsr.data.generated_graph import generated_graph
from nsr.data.segmentation.voc import voc
from nsr.experiments import record
from nsr.graph.models import GraphModel
from nsr.report.read import Problem, Run, read_file
from nsr.tokens import MergedViT, Segmenter, TokenResidual, ToMe
from nsr.tokens.segmenter_file import load_segmenter, save_segmenter
from nsr.training import checkpoint


@dataclass(frozen=True)
class Kind:
    """A kind of file: one good example, how it is loaded, and what every load must come to.

    Attributes:
        path: The example.
        load: Raises ValueError, or returns what it holds.
        count: Damaged copies to try.
        exact: Whether a file that loads must hold what the example holds, because the format has a checksum.
    """

    path: Path
    load: Callable[[], Any]
    count: int
    exact: bool


def result(folder: Path) -> Kind:
    cell = {"depth": 4, "backbone": "gcn", "variant": "nsr", "seed": 0}
    made = record.Record("tree", cell, {"test": 0.5, "bins": [1, 2.5]}, {"lr": 1e-3}, "nsr run tree", 1.5)
    path = record.write(folder, made)

    def load() -> None:
        shown = read_file(path)
        assert isinstance(shown, Run | Problem)
        assert isinstance(record.read(path).metrics, dict)

    return Kind(path, load, 4000, exact=False)


def state(folder: Path) -> Kind:
    path = folder / "run.safetensors"
    tensors = {"weight": torch.randn(4, 5), "half": torch.randn(3).bfloat16(), "count": torch.tensor(3)}
    checkpoint.save(path, tensors, {"seed": 0}, 7)

    def load() -> list[Any]:
        found = checkpoint.load(path, {"seed": 0})
        assert found is not None
        return [found[1], *(value.tolist() for _, value in sorted(found[0].items()))]

    return Kind(path, load, 2200, exact=True)


def branches(folder: Path) -> Kind:
    model = GraphModel("gcn", torch.nn.Linear(2, 2), 2, 2, layers=1)
    nsr.attach(model)
    path = folder / "branch.safetensors"
    nsr.save(model, path)
    return Kind(path, lambda: nsr.load(model, path), 600, exact=False)


def segmenter(folder: Path) -> Kind:
    def backbone() -> VisionTransformer:
        return VisionTransformer(img_size=16, patch_size=8, embed_dim=4, depth=1, num_heads=1, num_classes=0)

    path = folder / "segmenter.safetensors"
    save_segmenter(Segmenter(MergedViT(backbone(), ToMe(1), TokenResidual()), 2), path)
    return Kind(path, lambda: load_segmenter(path, backbone()), 300, exact=False)


def topology(folder: Path) -> Kind:
    path = folder / "heterophilous" / "roman_empire_topology.npz"
    path.parent.mkdir()
    np.savez(path, edges=np.array([[0, 1], [1, 2], [0, 3]]), node_labels=np.array([0, 1, 2, 0]))
    return Kind(path, lambda: [a.tolist() for a in heterophilous.topology("roman_empire", folder)], 1000, exact=True)


def molecules(folder: Path) -> Kind:
    arrays = {"num_nodes": [3, 2], "num_edges": [2, 1], "atom": [0, 5, 1, 2, 2], "bond": [1, 2, 1], "y": [0.5, -1.0]}
    arrays["edges"] = [[0, 1], [1, 2], [0, 1]]  # type: ignore[assignment]
    path = folder / "zinc" / "zinc12k.npz"
    path.parent.mkdir()
    np.savez_compressed(path, **{f"val_{name}": np.array(value) for name, value in arrays.items()})  # type: ignore[arg-type]

    def load() -> list[Any]:
        found = zinc.zinc("val", folder)
        return [found.num_nodes.tolist(), found.atom.tolist(), found.edges.tolist(), found.y.tolist()]

    return Kind(path, load, 1000, exact=True)


def pictures(folder: Path) -> Kind:
    streams = {"image": io.BytesIO(), "mask": io.BytesIO()}
    Image.fromarray(np.full((8, 8, 3), 100, np.uint8)).save(streams["image"], "WEBP")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(streams["mask"], "PNG")
    arrays: dict[str, np.ndarray] = {"ids": np.array(["2007_000032"])}
    for name, stream in streams.items():
        arrays[f"{name}_bytes"] = np.frombuffer(stream.getvalue(), np.uint8)
        arrays[f"{name}_offsets"] = np.array([0, len(stream.getvalue())])
    path = folder / "voc2012" / "val.npz"
    path.parent.mkdir()
    np.savez(path, **arrays)  # type: ignore[arg-type]

    def load() -> list[Any]:
        image, labels = voc(folder, "val")[0]
        return [image.tolist(), labels.tolist()]

    return Kind(path, load, 500, exact=True)


def disk_graph(folder: Path, name: str) -> Kind:
    generated_graph(folder / "graph", nodes=8, edges=12, features=2)

    def load() -> int:
        return open_graph(folder / "graph").num_nodes

    return Kind(folder / "graph" / f"{name}.npy", load, 100, exact=False)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "result": result,
    "checkpoint": state,
    "branches": branches,
    "segmenter": segmenter,
    "topology": topology,
    "molecules": molecules,
    "pictures": pictures,
    **{f"graph {name}": lambda folder, name=name: disk_graph(folder, name) for name in NAMES},
}


def damaged(good: bytes, rng: random.Random) -> bytes:
    """Flip bits, set bytes, cut, drop, repeat or move a piece, or change a number in the text."""
    data = bytearray(good)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at, length = rng.randrange(len(data) + 1), rng.choice((1, 2, 8, 64))
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 1])
            case 1:
                data[at : at + length] = rng.randbytes(len(data[at : at + length]))
            case 2:
                del data[at:]
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length] * rng.choice((1, 3))
            case 5:
                data[at : at + length] = rng.choice((b"\x00", b"\xff", b"9", b"{", b'"')) * length
            case 6:
                data[at:at] = rng.choice((b"NaN", b"-1", b"1e999", b"[[[[", b"null", b"\xf0\x9f", b"99999999999999"))
    return bytes(data)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"still loading after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_there_are_ten_thousand(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(KINDS))]
    for folder in folders:
        folder.mkdir()
    assert sum(make(folder).count for make, folder in zip(KINDS.values(), folders, strict=True)) >= 10_000


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zinc.SIZES, "val", 2)
    kind = KINDS[name](tmp_path)
    good, expected = kind.path.read_bytes(), kind.load()
    rng = random.Random(name)
    refused = 0
    for number in range(kind.count):
        data = damaged(good, rng)
        kind.path.write_bytes(data)
        try:
            with at_most(10):
                found = kind.load()
        except ValueError as error:
            said = str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"file {number} of {name}: {type(error).__name__}: {error}") from error
        else:
            said = str(kind.path.parent)
            assert found == expected or not kind.exact, f"file {number} of {name} loads, but is not what was saved"
        assert str(kind.path.parent) in said, f"file {number} of {name}: which file it is does not say: {said}"
    assert refused > kind.count // 20


class Weapon:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", KINDS)
def test_a_pickle_in_place_of_the_file_is_not_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zinc.SIZES, "val", 2)
    kind = KINDS[name](tmp_path)
    weapon = Weapon(tmp_path / "executed")
    buffers = {"torch": io.BytesIO(), "npz": io.BytesIO(), "npy": io.BytesIO()}
    torch.save({"weight": weapon}, buffers["torch"])
    objects = np.array([weapon], dtype=object)
    arrays = dict.fromkeys(np.load(kind.path).keys() if kind.path.suffix == ".npz" else ["array"], objects)
    np.savez(buffers["npz"], allow_pickle=True, **arrays)
    np.save(buffers["npy"], objects, allow_pickle=True)
    contents = [buffer.getvalue() for buffer in buffers.values()]
    for content in [pickle.dumps(weapon), json.dumps({"py/object": "os.system"}).encode(), *contents]:
        kind.path.write_bytes(content)
        with pytest.raises(ValueError):
            kind.load()
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(weapon))
    assert (tmp_path / "executed").exists(), "the weapon would have worked"
