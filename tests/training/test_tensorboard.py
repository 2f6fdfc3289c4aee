"""Curves reach TensorBoard's files when asked for, and nothing happens otherwise."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nsr.training.tensorboard import tensorboard


def test_scalars_are_written_and_read_back(tmp_path: Path) -> None:
    with tensorboard(tmp_path / "run") as log:
        log(0, train__loss=2.0, miou=0.1)
        log(10, train__loss=1.0)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["miou", "train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 2.0), (10, 1.0)]


def test_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tensorboard(None) as log:
        log(0, loss=1.0)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"), tensorboard(tmp_path):
        pass
