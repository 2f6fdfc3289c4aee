"""Runs that are killed, stopped, crowded out or doubled end as if nothing had happened, or say what did."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import survival_runs
from experiments.survival_runs import RESULT, TINY
from nsr.experiments import record
from nsr.experiments.attempt import attempt
from nsr.experiments.lock import Taken, locked
from nsr.experiments.record import Record
from nsr.experiments.segmentation import SegmentationLab
from nsr.experiments.segmentation_cells import SegmentationCell
from nsr.experiments.segmentation_runs import run_table


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The metrics of the run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    process = survival_runs.start(folder)
    process.join()
    assert process.exitcode == 0
    return metrics(folder)


def metrics(folder: Path) -> dict:
    return json.loads((folder / RESULT).read_text())["metrics"]


def epochs(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "epochs").read_text().split()] if (folder / "epochs").exists() else []


def wait_for_epoch(folder: Path, count: int) -> None:
    while len(epochs(folder)) < count:
        time.sleep(0.005)


def test_killed_at_twenty_random_moments(whole: dict, tmp_path: Path) -> None:
    moments = random.Random(0)
    kills = 0
    while kills < 20:
        process = survival_runs.start(tmp_path)
        if kills % 2:  # from the very start on, or after it has got a little further
            wait_for_epoch(tmp_path, len(epochs(tmp_path)) + 1)
        process.join(timeout=moments.uniform(0, 0.04))
        assert process.exitcode is None, "the run must be long enough for twenty kills"
        process.kill()
        process.join()
        kills += 1
        for path in (tmp_path / "results").rglob("*.json"):
            record.read(path)  # never an invalid one
    process = survival_runs.start(tmp_path)
    process.join()
    assert process.exitcode == 0
    assert metrics(tmp_path) == whole
    assert epochs(tmp_path)[-1] == TINY.protocol.epochs
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".partial")
    assert left == ["epochs", "tome-1.8x-nsr-0.json", "tome-1.8x-nsr-0.safetensors"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_asked_to_stop(whole: dict, tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = survival_runs.start(tmp_path)
    wait_for_epoch(tmp_path, 3)
    os.kill(process.pid, number)  # type: ignore[arg-type]
    process.join()
    assert process.exitcode == code
    assert not (tmp_path / RESULT).exists()
    done = epochs(tmp_path)
    process = survival_runs.start(tmp_path)
    process.join()
    assert metrics(tmp_path) == whole
    assert epochs(tmp_path)[len(done)] == done[-1] + 2  # it finished the epoch that it was in, and no work was lost


def test_two_processes_do_not_make_the_same_run(tmp_path: Path) -> None:
    first = survival_runs.start(tmp_path)
    wait_for_epoch(tmp_path, 1)
    lab = SegmentationLab(TINY, tmp_path, tmp_path / "outputs", torch.device("cpu"))
    cells = [SegmentationCell("tome", "1.8x", "nsr")]
    with pytest.raises(Taken, match=rf"tome-1\.8x-nsr-0\.json is being made by process {first.pid} on "):
        run_table(lab, cells, TINY.protocol, tmp_path / "results", say=lambda _: None)
    first.join()
    assert first.exitcode == 0
    lines: list[str] = []
    run_table(lab, cells, TINY.protocol, tmp_path / "results", say=lines.append)
    assert lines == ["tiny tome-1.8x-nsr-0: there already"]


class TestLock:
    def test_a_dead_holder_lets_go(self, tmp_path: Path) -> None:
        process = survival_runs.start(tmp_path)
        wait_for_epoch(tmp_path, 1)
        process.kill()
        process.join()
        with locked(tmp_path / RESULT):
            pass
        assert not list((tmp_path / RESULT).parent.iterdir())

    def test_made_in_the_meantime(self, tmp_path: Path) -> None:
        planned = Record("tree", {"seed": 0}, {}, {"epochs": 1}, "nsr run", 0.0)
        record.write(tmp_path, planned)
        with pytest.raises(Taken, match="made by another process in the meantime"), attempt(tmp_path, [planned]):
            pass
        with attempt(tmp_path, [planned], again=True):
            pass


class TestFailures:
    PLANNED = Record("tree", {"seed": 0}, {}, {"epochs": 1}, "nsr run", 0.0)

    def failed(self, folder: Path, error: Exception, expected: type[Exception]) -> str:
        with pytest.raises(expected) as raised, attempt(folder, [self.PLANNED]):
            raise error
        left = record.read(folder / "tree" / "0.json")
        assert left.status == "failed"
        assert left.error == (str(raised.value) or type(raised.value).__name__)
        assert left.seconds > 0
        return left.error

    def test_every_cause_is_written_down(self, tmp_path: Path) -> None:
        assert "disk is full" in self.failed(tmp_path, OSError(28, "No space left on device"), ValueError)
        lost = FileNotFoundError(2, "No such file", "train.npz")
        assert self.failed(tmp_path, lost, ValueError).startswith("train.npz is gone")
        assert self.failed(tmp_path, RuntimeError("out of memory"), RuntimeError) == "out of memory"
        assert self.failed(tmp_path, AssertionError(), AssertionError) == "AssertionError"

    @pytest.mark.parametrize("config", [PLANNED.config, {"epochs": 2}])
    def test_a_result_that_was_made_stays(self, tmp_path: Path, config: dict) -> None:
        record.write(tmp_path, replace(self.PLANNED, metrics={"test": 0.5}, config=config))
        with pytest.raises(RuntimeError), attempt(tmp_path, [self.PLANNED], again=True):
            raise RuntimeError
        assert record.read(tmp_path / "tree" / "0.json").metrics == {"test": 0.5}

    def test_a_file_that_is_no_result_gives_way(self, tmp_path: Path) -> None:
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "0.json").write_text("{")
        with pytest.raises(RuntimeError, match="why"), attempt(tmp_path, [self.PLANNED], again=True):
            raise RuntimeError("why")
        assert record.read(tmp_path / "tree" / "0.json").error == "why"

    def test_a_loss_that_is_no_number(self, tmp_path: Path) -> None:
        lab = SegmentationLab(TINY, tmp_path, tmp_path / "outputs", torch.device("cpu"))
        protocol = replace(TINY.protocol, epochs=3, lr=1e30)
        cells = [SegmentationCell("tome", "1.8x", "nsr")]
        with pytest.raises(ValueError, match="Try --precision fp32"):
            run_table(lab, cells, protocol, tmp_path, say=lambda _: None, watch=lambda _: None, every=0)
        left = record.read(tmp_path / "tiny" / RESULT.name)
        assert left.status == "failed"
        assert "loss is nan after epoch" in left.error

    def test_a_lost_data_file(self, tmp_path: Path) -> None:
        from nsr.data.segmentation.voc import voc

        task = replace(TINY, read=lambda folder, part: voc(folder, part))
        lab = SegmentationLab(task, tmp_path / "data", tmp_path / "outputs", torch.device("cpu"))
        cells = [SegmentationCell("tome", "1.8x", "nsr")]
        with pytest.raises(ValueError, match=r"VOC 2012 is neither at .* nor at"):
            run_table(lab, cells, TINY.protocol, tmp_path, say=lambda _: None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB, mounted in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root, which this process is not")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(whole: dict, tmp_path: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2**22 - 100 * 2**10))
    process = survival_runs.start(small_disk)
    process.join()
    assert process.exitcode == 1
    left = record.read(small_disk / RESULT)
    assert left.status == "failed"
    assert "No space left on device" in left.error
    filler.unlink()
    process = survival_runs.start(small_disk)
    process.join()
    assert process.exitcode == 0
    assert metrics(small_disk) == whole
