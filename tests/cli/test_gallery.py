"""The gallery, with models that know nothing, on generated shapes."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nsr.cli import app
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_cells import SegmentationCell
from nsr.experiments.segmentation_model import make_segmenter
from nsr.experiments.segmentation_task import TASKS
from nsr.tokens import save_segmenter

CELLS = [("none", "1.0x", "original"), ("tome", "3.4x", "original"), ("tome", "3.4x", "nsr")]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Weights where training would have left them."""
    task = TASKS["shapes"]
    lab = SegmentationLab(task, tmp_path, tmp_path / "outputs", torch.device("cpu"))
    for merger, point, variant in CELLS:
        cell = SegmentationCell(merger, point, variant)
        model = make_segmenter(task, task.rule(merger, point), variant, lab.shared(0), 0, tmp_path)
        lab.weights_of(cell).parent.mkdir(parents=True, exist_ok=True)
        save_segmenter(model, lab.weights_of(cell))
    return tmp_path / "outputs"


def call(outputs: Path, *arguments: str) -> str:
    done = CliRunner().invoke(
        app,
        ["explain", "--task", "shapes", "--outputs", str(outputs), "--data", str(outputs), *arguments],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    return done.stdout.strip()


def test_a_row_of_seven_pictures_an_image(outputs: Path) -> None:
    page = Path(call(outputs, "--gallery", "0,3", "--out", str(outputs / "gallery")))
    html = page.read_text()
    assert re.findall("<h2>(.*?)</h2>", html) == ["0", "3"]
    titles = re.findall("<figcaption>([^<]+)", html)
    assert titles[:7] == ["image", "truth", "full", "merged", "merged + NSR", "merge map", "residual energy"]
    assert html.count("data:image/webp") == 14
    assert "of the pixels right" in html
    assert "64 patches" in html


def test_mistakes_are_named(outputs: Path) -> None:
    with pytest.raises(ValueError, match="has no image 'nobody'"):
        call(outputs, "--gallery", "nobody")
    with pytest.raises(ValueError, match="There are no trained weights"):
        call(outputs, "--gallery", "0", "--point", "1.8x")
    with pytest.raises(ValueError, match="either a picture or --gallery"):
        call(outputs)
    with pytest.raises(ValueError, match="Unknown task"):
        call(outputs, "--gallery", "0", "--task", "nowhere")
    with pytest.raises(ValueError, match="names no image"):
        call(outputs, "--gallery", ",")
    with pytest.raises(ValueError, match="their settings are known"):
        call(outputs, "--gallery", "0", "--r", "3")
