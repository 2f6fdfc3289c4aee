"""``nsr scale`` on a small graph: every stage measured."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsr.cli import app

SMALL = ["scale", "--nodes", "2000", "--edges", "16000", "--width", "8", "--batch", "64", "--block", "512"]


def test_generation_and_inference_are_measured(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*SMALL, "--steps", "0", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output)
    assert 0.15 < figures["accuracy"] < 0.6
    assert 0.05 < figures["inference_gib"] < 8
    assert "training_seconds" not in figures
    assert (tmp_path / "graph-2000-16000" / "source.npy").is_file()


@pytest.mark.sampling
def test_training_is_measured_too(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*SMALL, "--steps", "5", "--fanout", "3,3", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["training_nodes_per_second"] > 0
