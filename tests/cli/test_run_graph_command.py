"""``nsr run`` on graphs: one result a cell, made once, on generated data."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from nsr.cli import app
from nsr.data import heterophilous
from nsr.data.minesweeper import minesweeper
from nsr.experiments import heterophily as experiment


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["run", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def small_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board and a model so small that an epoch takes milliseconds."""
    monkeypatch.setattr(heterophilous, "minesweeper", lambda: minesweeper(side=10, splits=3))
    monkeypatch.setattr(experiment, "WIDTH", 8)


def test_tree_writes_one_result_a_cell_and_skips_what_is_there(tmp_path: Path) -> None:
    options = ["tree", "--depth", "2", "--backbone", "gcn", "--seed", "11,12", "--epochs", "3"]
    places = ["--device", "cpu", "--results", str(tmp_path / "r"), "--outputs", str(tmp_path / "o")]
    run(*options, *places, "--concurrent", "2")
    files = sorted((tmp_path / "r" / "tree").glob("*.json"))
    assert [file.stem for file in files] == [
        "2-gcn-nsr-11",
        "2-gcn-nsr-12",
        "2-gcn-original-11",
        "2-gcn-original-12",
    ]
    result = json.loads(files[0].read_text())
    assert result["cell"] == {"depth": 2, "backbone": "gcn", "variant": "nsr", "seed": 11}
    assert 0 <= result["metrics"]["train_accuracy"] <= 1
    assert result["metrics"]["params"] > json.loads(files[2].read_text())["metrics"]["params"]
    assert result["config"]["samples"] == 96
    assert result["command"] == "nsr run tree --depth 2 --backbone gcn --variant nsr --seed 11,12 --epochs 3"
    before = files[0].read_text()
    assert run(*options, *places).count("there already") == 2
    assert files[0].read_text() == before
    assert "replaced" not in (again := run(*options, *places, "--force"))
    assert "train_accuracy" in again
    other = run(*options, *places, "--trees-per-batch", "6")
    assert other.count("and 1 more have results of another configuration or time limit, which will be replaced") == 2
    assert list((tmp_path / "o" / "unfinished").glob("*")) == []


def test_what_differs_from_the_papers_protocol_is_in_the_record(tmp_path: Path) -> None:
    options = ["tree", "--depth", "2", "--backbone", "sage", "--variant", "nsr", "--epochs", "2", "--device", "cpu"]
    options += ["--trees-per-batch", "6", "--rate", "0.002", "--patience", "7", "--soap"]
    run(*options, "--results", str(tmp_path), "--outputs", str(tmp_path))
    result = json.loads((tmp_path / "tree" / "2-sage-nsr-11.json").read_text())
    assert result["config"]["trees_per_batch"] == 6
    assert result["config"]["batch"] == 24
    assert result["config"]["rule"]["rate"] == 0.002
    assert result["config"]["rule"]["patience"] == 7
    assert result["command"].endswith("--seed 11 --trees-per-batch 6 --rate 0.002 --patience 7 --epochs 2 --soap")
    assert result["config"]["optimizer"] == "soap"
    assert "anneal_over" not in result["config"]["rule"]


def test_annealing_is_in_the_record_and_excludes_patience(tmp_path: Path) -> None:
    options = ["tree", "--depth", "2", "--backbone", "gcn", "--variant", "original", "--epochs", "3", "--anneal"]
    options += ["--device", "cpu", "--results", str(tmp_path), "--outputs", str(tmp_path)]
    run(*options)
    result = json.loads((tmp_path / "tree" / "2-gcn-original-11.json").read_text())
    assert result["config"]["rule"]["anneal_over"] == 3
    assert "optimizer" not in result["config"]
    assert result["command"].endswith("--seed 11 --epochs 3 --anneal")
    with pytest.raises(ValueError, match=r"anneal.*give one of the two"):
        run(*options, "--patience", "7")


def test_a_tree_run_whose_time_is_up_has_its_numbers_and_says_so(tmp_path: Path) -> None:
    options = ["tree", "--depth", "2,3", "--backbone", "gcn", "--variant", "nsr", "--seed", "11,12", "--device", "cpu"]
    options += ["--trees-per-batch", "100", "--minutes", "0.001"]
    options += ["--results", str(tmp_path), "--outputs", str(tmp_path)]
    said = run(*options)
    assert "tree 3 gcn nsr seed 11,12: train_accuracy" in said
    assert "fresh_accuracy" in said
    assert "stopped by the time limit: 2" in said
    for depth, seed in ((2, 11), (2, 12), (3, 11), (3, 12)):
        result = json.loads((tmp_path / "tree" / f"{depth}-gcn-nsr-{seed}.json").read_text())
        assert result["status"] == "stopped"
        assert result["command"].endswith("--seed 11,12 --trees-per-batch 100 --minutes 0.001")
        assert {"train_accuracy", "test_accuracy"} <= set(result["metrics"])
        assert ("fresh_accuracy" in result["metrics"]) == (depth == 3)
    assert "there already" in run(*options)
    assert len(list((tmp_path / "unfinished").glob("*11,12-*.safetensors"))) == 2  # for runs with more time


def test_tensorboard_draws_each_replica(tmp_path: Path, small_board: None) -> None:
    options = ["--dataset", "minesweeper-generated", "--backbone", "gcn", "--variant", "nsr", "--split", "0-1"]
    places = ["--device", "cpu", "--results", str(tmp_path / "r"), "--outputs", str(tmp_path / "o")]
    run("heterophily", *options, *places, "--epochs", "20", "--tensorboard", str(tmp_path / "t"))
    folders = sorted(path.relative_to(tmp_path / "t") for path in (tmp_path / "t").glob("*/*"))
    assert folders == [Path(f"heterophily/minesweeper-generated-gcn-nsr-{split}") for split in (0, 1)]
    for folder in folders:
        events = EventAccumulator(str(tmp_path / "t" / folder)).Reload()
        assert sorted(events.Tags()["scalars"]) == ["best", "learning_rate", "metric"]
        result = json.loads((tmp_path / "r" / folder.parent / f"{folder.name}.json").read_text())
        last = events.Scalars("best")[-1]
        assert last.step == 20
        assert last.value == pytest.approx(result["metrics"]["val"])
        assert events.Scalars("learning_rate")[0].value > 0


def test_without_tensorboard_no_event_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run("tree", "--depth", "2", "--backbone", "gcn", "--variant", "original", "--epochs", "2", "--device", "cpu")
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert files == [Path("results/tree/2-gcn-original-11.json")]


def test_a_missing_tensorboard_is_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    options = ["--depth", "2", "--backbone", "gcn", "--epochs", "2", "--device", "cpu", "--results", str(tmp_path)]
    with pytest.raises(ValueError, match="pip install tensorboard"):
        run("tree", *options, "--tensorboard", str(tmp_path / "t"))
    assert list(tmp_path.rglob("*.json")) == []


def test_heterophily_and_diagnostic(tmp_path: Path, small_board: None) -> None:
    places = ["--dataset", "minesweeper-generated", "--backbone", "gcn", "--results", str(tmp_path)]
    run("heterophily", *places, "--split", "0-1", "--epochs", "20", "--device", "cpu", "--outputs", str(tmp_path))
    result = json.loads((tmp_path / "heterophily" / "minesweeper-generated-gcn-nsr-1.json").read_text())
    assert set(result["metrics"]) >= {"val", "test", "params", "accuracy_by_bin"}
    assert sum(result["metrics"]["count_by_bin"]) == 25
    said = run("diagnostic", *places)
    assert "mean score" in said
    collected = json.loads((tmp_path / "diagnostic" / "minesweeper-generated-gcn-nsr-1.json").read_text())
    assert collected["experiment"] == "diagnostic"
    assert collected["metrics"]["accuracy_by_bin"] == result["metrics"]["accuracy_by_bin"]


def test_another_dropout_is_another_cell(tmp_path: Path, small_board: None) -> None:
    options = ["--dataset", "minesweeper-generated", "--backbone", "gcn", "--variant", "nsr", "--split", "0"]
    options += ["--epochs", "10", "--device", "cpu", "--results", str(tmp_path), "--outputs", str(tmp_path)]
    for more in ([], ["--dropout", "0.5"], ["--dropout", str(experiment.DROPOUT)]):
        run("heterophily", *options, *more)
    usual, other = (
        json.loads((tmp_path / "heterophily" / f"minesweeper-generated-gcn-nsr-{rest}.json").read_text())
        for rest in ("0", "0.5-0")
    )
    assert len(list((tmp_path / "heterophily").glob("*.json"))) == 2
    assert "dropout" not in usual["cell"]
    assert usual["config"]["dropout"] == experiment.DROPOUT
    assert "--dropout" not in usual["command"]
    assert other["cell"]["dropout"] == other["config"]["dropout"] == 0.5
    assert other["command"].endswith("--split 0 --dropout 0.5 --epochs 10")
    run("diagnostic", *options[:4], "--results", str(tmp_path))
    assert [path.stem for path in (tmp_path / "diagnostic").glob("*-0.json")] == ["minesweeper-generated-gcn-nsr-0"]


def test_ablation_has_every_variant(tmp_path: Path, small_board: None) -> None:
    options = ["--dataset", "minesweeper-generated", "--backbone", "sage", "--split", "0", "--epochs", "10"]
    run("graph-ablation", *options, "--device", "cpu", "--results", str(tmp_path), "--outputs", str(tmp_path))
    found = {}
    for path in (tmp_path / "heterophily").glob("*.json"):
        result = json.loads(path.read_text())
        found[result["cell"]["variant"]] = result["metrics"]["params"]
    assert set(found) == {"original", "nsr", "raw-source", "post-aggregation", "matched"}
    assert found["nsr"] == found["raw-source"] == found["post-aggregation"]
    assert found["original"] < found["nsr"]


@pytest.mark.data
def test_zinc(tmp_path: Path, data_dir: Path) -> None:
    options = ["--backbone", "gin", "--variant", "original", "--seed", "0", "--epochs", "1", "--data", str(data_dir)]
    run("zinc", *options, "--device", "cpu", "--results", str(tmp_path), "--outputs", str(tmp_path))
    result = json.loads((tmp_path / "zinc" / "gin-original-0.json").read_text())
    assert 0.3 < result["metrics"]["test_mae"] < 3


@pytest.mark.data
def test_diagnostic_on_roman_empire(tmp_path: Path, data_dir: Path) -> None:
    run("diagnostic", "--dataset", "roman-empire", "--data", str(data_dir), "--results", str(tmp_path))
    means = {}
    for path in (tmp_path / "diagnostic").glob("*.json"):
        result = json.loads(path.read_text())
        means[result["cell"]["backbone"]] = round(result["metrics"]["mean_score"], 5)
    assert means == {"gcn": 0.71469, "gin": 0.71328, "sage": 0.63590}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tree", "--depth", "9"], "depths 2 to 8"),
        (["tree", "--backbone", "gat"], "names among gcn, sage, gin"),
        (["tree", "--variant", "nsr,best"], "names among original, nsr"),
        (["tree", "--seed", "x"], "such as 0,1,2 or 0-9"),
        (["tree", "--device", "cuda:77"], "CUDA devices. Use --device cpu"),
        (["tree", "--device", "abacus"], "is no device"),
        (["tree", "--rate", "0"], "a learning rate is above 0"),
        (["heterophily", "--dataset", ","], "names nothing"),
        (
            ["heterophily", "--dataset", "minesweeper-generated", "--epochs", "4"],
            "before the first evaluation, after 10",
        ),
        (["zinc", "--precision", "fp8"], "expected fp32, tf32, bf16"),
        (["heterophily", "--dataset", "cora"], "no data set 'cora'"),
        (["heterophily", "--dataset", "minesweeper-generated", "--split", "12"], "splits 0 to 9"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_out_of_memory_says_what_lowers_it(tmp_path: Path, small_board: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(experiment, "node_run", full)
    options = ["--dataset", "minesweeper-generated", "--backbone", "gcn", "--variant", "nsr", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"does not hold 3 replicas.*--together"):
        run("heterophily", *options, "--results", str(tmp_path), "--outputs", str(tmp_path))
