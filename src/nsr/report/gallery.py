"""A gallery: one row of pictures an image, from the photograph to what merging forgot of it."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Panel:
    """One picture of a row.

    Attributes:
        title: What it shows.
        pixels: ``[H, W, 3]``, uint8.
        note: A number to it, such as a score.
    """

    title: str
    pixels: np.ndarray
    note: str = ""


@dataclass(frozen=True)
class Exhibit:
    """Everything about one image."""

    name: str
    panels: Sequence[Panel]


def write_gallery(exhibits: Sequence[Exhibit], path: Path, title: str, remark: str, classes: dict[str, str]) -> None:
    """Write one self-contained page.

    Args:
        exhibits: The rows.
        path: Where to; its folder is made.
        title: Of the page.
        remark: How to read it.
        classes: Name and CSS colour of the classes that occur.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(loader=PackageLoader("nsr", "report"), autoescape=True, undefined=StrictUndefined)
    environment.globals["data_uri"] = data_uri
    css = files("nsr.report").joinpath("page.css").read_text(encoding="utf-8")
    page = environment.get_template("gallery.html.j2").render(
        css=css, exhibits=exhibits, title=title, remark=remark, classes=classes
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def data_uri(pixels: np.ndarray) -> str:
    """A picture inside the page itself."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
