"""One run over two processes is the run over one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsr.training import checkpoint
from nsr.training.distributed import Group, join
from training import processes


def test_two_processes_train_the_weights_of_one(tmp_path: Path) -> None:
    assert processes.start(2, processes.trained, tmp_path / "two") == [0, 0]
    processes.alone(tmp_path / "one")
    one = load_file(tmp_path / "one-0")
    halves = [load_file(tmp_path / f"two-{rank}") for rank in (0, 1)]
    for name, expected in one.items():
        for half in halves:
            if name in ("confusion", "windows"):
                assert torch.equal(half[name], expected)
            else:
                torch.testing.assert_close(half[name], expected, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert one["confusion"].sum() > 0


def test_a_dead_process_ends_the_others() -> None:
    first, second = processes.start(2, processes.dying)
    assert second == -9
    assert first == 1  # an error, not a hang


def test_a_request_to_one_process_is_one_to_all(tmp_path: Path) -> None:
    assert processes.start(2, processes.asked_to_stop, tmp_path / "run") == [143, 143]
    state, epoch, _ = checkpoint.load(tmp_path / "run", {})  # type: ignore[misc]
    assert (epoch, int(state["epoch"])) == (3, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_one_process_is_a_group_of_its_own() -> None:
    group = join("cpu")
    assert (group.rank, group.size, group.writes) == (0, 1, True)
    value = torch.ones(2)
    assert group.sum(value) is value
    with pytest.raises(ValueError, match="batch of 5 cannot be shared equally by 2 processes"):
        Group(0, 2).share(5)


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    options = ["--merger", "tome", "--point", "1.8x", "--variant", "nsr", "--epochs", "1", "--device", "cpu"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = []
    for command in ([*launcher, "-m", "nsr"], [sys.executable, "-m", "nsr"]):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        done = subprocess.run(
            [*command, "run", "shapes", *options], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("mIoU") == 1  # one of them speaks
        (path,) = (folder / "results").rglob("*.json")
        found.append(json.loads(path.read_text()))
    two, one = found
    assert (two["environment"]["processes"], one["environment"]["processes"]) == (2, 1)
    assert two["metrics"]["miou"] == pytest.approx(one["metrics"]["miou"], abs=1e-3)
