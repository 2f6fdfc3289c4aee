"""Getting the data sets from where they are published. Cityscapes asks for a registration and has no such function."""

from pathlib import Path

from nsr.data.archive import unpack
from nsr.data.download import fetch
from nsr.data.segmentation import ade20k, voc


def fetch_voc(folder: Path) -> None:
    """Fetch VOC 2012 (2 GB) and unpack it below ``folder``, as :func:`~.voc.voc` reads it."""
    unpack(fetch(voc.URL, folder / voc.URL.rpartition("/")[2], voc.SHA256), folder)


def fetch_ade20k(folder: Path) -> None:
    """Fetch ADE20K's scene parsing (1 GB) and unpack it below ``folder``, as :func:`~.ade20k.ade20k` reads it.

    Raises:
        ValueError: It cannot be fetched, or is not the published file.
    """
    unpack(fetch(ade20k.URL, folder / ade20k.URL.rpartition("/")[2], ade20k.SHA1), folder)
