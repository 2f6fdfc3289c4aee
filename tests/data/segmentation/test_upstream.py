"""Fetching and unpacking, from archives that the test makes itself."""

import hashlib
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from data.segmentation.trees import picture, save, voc_tree
from nsr.data.segmentation import ade20k, voc
from nsr.data.segmentation.upstream import fetch_ade20k, fetch_voc

MASK = np.array([[0, 1], [2, 255]], dtype=np.uint8).repeat(4, 0).repeat(4, 1)


def test_voc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    voc_tree(tmp_path / "made", {"2007_000001": MASK})
    archive = tmp_path / "voc.tar"
    with tarfile.open(archive, "w") as file:
        file.add(tmp_path / "made" / "VOCdevkit", "VOCdevkit")
    monkeypatch.setattr(voc, "URL", archive.as_uri())
    monkeypatch.setattr(voc, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    fetch_voc(tmp_path / "data")
    np.testing.assert_array_equal(voc.voc(tmp_path / "data", "train")[0][1], MASK)
    monkeypatch.setattr(voc, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="expected 0000"):
        fetch_voc(tmp_path / "other")


def test_ade20k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made"
    save(made / "ADEChallengeData2016" / "images" / "training" / "a.jpg", picture((4, 4)))
    save(made / "ADEChallengeData2016" / "annotations" / "training" / "a.png", np.full((4, 4), 7, dtype=np.uint8))
    archive = tmp_path / "ade.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(made.rglob("*.*")):
            file.write(path, path.relative_to(made))
    monkeypatch.setattr(ade20k, "URL", archive.as_uri())
    with pytest.raises(ValueError, match=r"expected 219e1696.*It was removed"):
        fetch_ade20k(tmp_path / "data")
    monkeypatch.setattr(ade20k, "SHA1", hashlib.sha1(archive.read_bytes()).hexdigest())
    fetch_ade20k(tmp_path / "data")
    assert (ade20k.ade20k(tmp_path / "data", "train")[0][1] == 6).all()
