"""Getting the data sets from where they are published. Cityscapes asks for a registration and has no such function."""

import hashlib
from pathlib import Path

from nsr.data.archive import unpack
from nsr.data.download import fetch
from nsr.data.folder import download
from nsr.data.segmentation import ade20k, voc


def fetch_voc(folder: Path) -> None:
    """Fetch VOC 2012 (2 GB) and unpack it below ``folder``, as :func:`~.voc.voc` reads it."""
    unpack(fetch(voc.URL, folder / voc.URL.rpartition("/")[2], voc.SHA256), folder)


def fetch_ade20k(folder: Path) -> None:
    """Fetch ADE20K's scene parsing (1 GB) and unpack it below ``folder``, as :func:`~.ade20k.ade20k` reads it.

    Raises:
        ValueError: It cannot be fetched, or is not the published file.
    """
    archive = folder / ade20k.URL.rpartition("/")[2]
    if not archive.is_file():
        download(ade20k.URL, archive)
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha1").hexdigest()
    if found != ade20k.SHA1:
        archive.unlink()
        raise ValueError(
            f"{ade20k.URL} gave a file with sha1 {found}, expected {ade20k.SHA1}; it was removed. Try again."
        )
    unpack(archive, folder)
