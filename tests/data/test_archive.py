"""Archives are unpacked inside their folder or not at all."""

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from nsr.data.archive import unpack


def make_tar(path: Path, *entries: tarfile.TarInfo, content: bytes = b"payload") -> Path:
    with tarfile.open(path, "w:gz") as file:
        for entry in entries:
            entry.size = len(content) if entry.isreg() else 0
            file.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def make_zip(path: Path, name: str, mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        file.writestr(info, "payload")
    return path


def test_plain_archives(tmp_path: Path) -> None:
    unpack(make_tar(tmp_path / "a.tar.gz", entry("inner/file")), tmp_path / "tar")
    unpack(make_zip(tmp_path / "a.zip", "inner/file"), tmp_path / "zip")
    assert (tmp_path / "tar/inner/file").read_text() == (tmp_path / "zip/inner/file").read_text() == "payload"


@pytest.mark.parametrize(
    "bad",
    [
        [entry("../outside")],
        [entry("inner/../../outside")],
        [entry("link", tarfile.SYMTYPE, "../.."), entry("link/outside")],
        [entry("link", tarfile.SYMTYPE, "/etc/passwd")],
        [entry("hard", tarfile.LNKTYPE, "../outside")],
        [entry("pipe", tarfile.FIFOTYPE)],
    ],
)
def test_a_tar_that_would_leave_its_folder(tmp_path: Path, bad: list[tarfile.TarInfo]) -> None:
    archive = make_tar(tmp_path / "bad.tar.gz", *bad)
    with pytest.raises(ValueError, match="not safe to unpack"):
        unpack(archive, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar.gz", "folder"]


@pytest.mark.parametrize(
    ("name", "mode"), [("../outside", 0), ("/outside", 0), ("..\\outside", 0), ("link", stat.S_IFLNK | 0o777)]
)
def test_a_zip_that_would_leave_its_folder(tmp_path: Path, name: str, mode: int) -> None:
    archive = make_zip(tmp_path / "bad.zip", name, mode)
    with pytest.raises(ValueError, match="not safe to unpack"):
        unpack(archive, tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.zip", "folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_absolute_names_in_a_tar_stay_inside(tmp_path: Path) -> None:
    unpack(make_tar(tmp_path / "a.tar.gz", entry("/inner/file")), tmp_path / "folder")
    assert (tmp_path / "folder/inner/file").read_text() == "payload"


def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "file.tar"
    path.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match="neither a tar nor a zip"):
        unpack(path, tmp_path / "folder")
    whole = make_tar(path, entry("file"), content=bytes(range(256)) * 500).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged"):
        unpack(path, tmp_path / "folder")
