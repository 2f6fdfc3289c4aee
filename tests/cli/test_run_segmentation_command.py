"""The commands of the segmentation experiments, at tiny settings."""

import json
from pathlib import Path

import pytest
import typer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from nsr.cli.run_segmentation import add_segmentation

APP = typer.Typer()
add_segmentation(APP)


def invoke(*arguments: str):
    return CliRunner().invoke(APP, list(arguments), catch_exceptions=True)


def test_shapes_from_training_to_numerics(tmp_path: Path) -> None:
    folders = ["--results", str(tmp_path / "r"), "--outputs", str(tmp_path / "o"), "--device", "cpu"]
    cell = ["--merger", "tome", "--point", "3.8x"]
    curves = tmp_path / "t"
    options = ["--variant", "nsr", "--epochs", "1", "--batch", "48", "--tensorboard", str(curves)]
    done = invoke("shapes", *cell, *options, *folders)
    assert done.exit_code == 0, done.output
    assert "shapes tome-3.8x-nsr-0: mIoU" in done.output
    assert "epoch 1/1, loss" in done.output
    result = json.loads((tmp_path / "r" / "shapes" / "tome-3.8x-nsr-0.json").read_text())
    (loss,) = EventAccumulator(str(curves / "shapes" / "tome-3.8x-nsr-0")).Reload().Scalars("loss")
    assert (loss.step, loss.value) == (1, pytest.approx(result["metrics"]["loss"]))
    assert {path.parents[2] for path in tmp_path.rglob("*tfevents*")} == {curves}
    done = invoke("numerics", "--task", "shapes", *cell, *folders)
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "r" / "numerics" / "shapes-tome-3.8x-0.json").read_text())
    assert written["metrics"]["null_violation"] < 2e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shapes", "--seed", "one"], "expected numbers by commas or a range"),
        (["token-ablation", "--task", "coco"], "Unknown task 'coco'"),
        (["shapes", "--precision", "int8"], "precision is 'int8'"),
        (["voc", "--data", "nowhere", "--merger", "none"], "VOC 2012 is neither at"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    done = invoke(*arguments, "--device", "cpu")
    assert done.exit_code != 0
    assert message in str(done.exception)
