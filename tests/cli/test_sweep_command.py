"""``nsr sweep``: options dealt out, one cell a run; real runs on this machine."""

import json
import resource
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nsr.cli import app
from nsr.cli.selection import integers, names
from nsr.cli.sweep import make_run, sweep_tasks
from nsr.experiments import record
from nsr.experiments.record import read
from nsr.experiments.sweep import Task


def test_cells_of_a_graph_experiment() -> None:
    options = ["--depth", "2,3", "--backbone=gcn", "--seed", "0-1", "--epochs", "5", "--force"]
    tasks = sweep_tasks("tree", options, ["--results", "r"])
    assert [task.name for task in tasks] == [
        f"tree-{depth}-gcn-{variant}-{seed}" for depth in (2, 3) for variant in ("original", "nsr") for seed in (0, 1)
    ]
    assert " ".join(tasks[1].arguments) == (
        "run tree --depth 2 --backbone gcn --variant original --seed 1 --epochs 5 --force --results r"
    )
    assert len(sweep_tasks("heterophily", ["--dataset", "actor", "--backbone", "gin"], [])) == 2 * 10


def test_cells_of_a_segmentation_experiment() -> None:
    tasks = sweep_tasks("voc", ["--merger", "none,tome", "--seed", "0,1"], [])
    assert {"voc-none-1.0x-original-0", "voc-tome-3.4x-nsr-1"} <= {task.name for task in tasks}
    assert len(tasks) == 2 + 4 * 2 * 2


def test_what_a_gpu_trains_as_one_stays_one_run() -> None:
    tasks = sweep_tasks("voc", ["--merger", "none,tome", "--point", "1.0x,3.4x", "--seed", "0,1"], [], as_one=True)
    assert [" ".join(task.arguments) for task in tasks] == [
        f"run voc --merger {merger} --point {point} --variant {variants} --seed {seed}"
        for seed in (0, 1)
        for merger, point, variants in (("none", "1.0x", "original"), ("tome", "3.4x", "original,nsr"))
    ]
    (task,) = sweep_tasks(
        "heterophily", ["--dataset", "actor", "--backbone", "gin", "--variant", "nsr"], [], as_one=True
    )
    assert task.arguments[-2:] == ("--split", "0,1,2,3,4,5,6,7,8,9")


def test_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="no sweep of 'nonsense'; there are tree"):
        sweep_tasks("nonsense", [], [])
    with pytest.raises(ValueError, match="--seed 'x': expected numbers"):
        integers("--seed", "x")
    with pytest.raises(ValueError, match="names nothing"):
        integers("--seed", "")
    assert names("a, b,") == ["a", "b"]
    assert integers("--seed", "0-2,7") == [0, 1, 2, 7]


def test_a_sweep_of_trees(tmp_path: Path) -> None:
    def sweep(*options: str):
        fixed = ["--depth", "2", "--backbone", "gcn,sage", "--variant", "nsr", "--epochs", "2", "--workers", "2"]
        folders = ["--results", str(tmp_path / "results"), "--outputs", str(tmp_path / "outputs")]
        return CliRunner().invoke(app, ["sweep", "tree", *fixed, *folders, *options])

    done = sweep("--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "2 of 2 runs done" in done.output
    results = sorted((tmp_path / "results" / "tree").iterdir())
    assert [path.name for path in results] == ["2-gcn-nsr-11.json", "2-sage-nsr-11.json"]
    assert json.loads(results[0].read_text())["metrics"]["epochs"] == 2
    assert "train_accuracy" in (tmp_path / "outputs" / "sweep" / "tree-2-gcn-nsr-11.log").read_text()
    before = [path.read_bytes() for path in results]
    assert sweep("--device", "cpu").exit_code == 0
    assert [path.read_bytes() for path in results] == before
    failed = sweep("--device", "nowhere")
    assert failed.exit_code == 1
    for backbone in ("gcn", "sage"):  # with what its log ends with
        assert f"failed: tree-2-{backbone}-nsr-11: error: --device 'nowhere' is no device" in failed.output


@pytest.mark.slow
def test_a_soak_of_two_hundred_trees(tmp_path: Path) -> None:
    fixed = ["--depth", "2", "--backbone", "gcn", "--variant", "original", "--epochs", "1", "--device", "cpu"]
    folders = ["--results", str(tmp_path / "results"), "--outputs", str(tmp_path / "outputs")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB
    done = CliRunner().invoke(app, ["sweep", "tree", *fixed, *folders, "--seed", "0-199", "--workers", "4"])
    assert done.exit_code == 0, done.output
    assert "200 of 200 runs done" in done.output
    made = {path.name for path in (tmp_path / "results" / "tree").iterdir()}
    assert made == {f"2-gcn-original-{seed}.json" for seed in range(200)}
    assert all(read(tmp_path / "results" / "tree" / name).status == "done" for name in made)
    logs = [path.read_text() for path in (tmp_path / "outputs" / "sweep").iterdir()]
    assert [log.count("train_accuracy") for log in logs] == [1] * 200  # none made twice
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_a_run_says_which_share_of_a_gpu_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, object] = {}
    monkeypatch.setattr(record, "_noted", {})
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr("nsr.cli.main", lambda: said.update(record.environment(torch.device("cpu"))))
    assert make_run(tmp_path, 0, Task("alone", ())) == 0
    assert "gpu_share" not in said
    assert make_run(tmp_path, 0.25, Task("beside", ())) == 0
    assert said["gpu_share"] == 0.25
