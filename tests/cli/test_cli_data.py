import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nsr.cli import app
from nsr.experiments import record

run = CliRunner().invoke


def test_tree_prints_the_golden_hashes() -> None:
    result = run(app, ["data", "tree", "--depth", "4", "--seed", "11", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["permutations"] == 1000
    assert facts["first_values"] == [9, 4, 7, 11, 16, 5, 6, 15]
    assert facts["sha256"] == {
        "permutations": "85685f038cd038de",
        "train": "4687cb2d776d58a1",
        "test": "53a7d1a3c3ea84d1",
    }


def test_list_names_the_folder_and_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSR_DATA", str(tmp_path))
    result = run(app, ["data", "list"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert str(tmp_path) in result.stdout.replace("\n", "")
    assert result.stdout.count("missing") == 8
    (tmp_path / "heterophilous").mkdir()
    (tmp_path / "heterophilous" / "roman_empire_topology.npz").touch()
    assert "topology only" in run(app, ["data", "list"], env={"COLUMNS": "200"}).stdout


def test_verify_without_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSR_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="no data set to verify"):
        run(app, ["data", "verify"], catch_exceptions=False)
    with pytest.raises(ValueError, match=r"questions\.npz is not there"):
        run(app, ["data", "verify", "questions"], catch_exceptions=False)


def test_stats_of_the_generated_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSR_DATA", str(tmp_path))
    result = run(app, ["data", "stats", "--json", "--results", str(tmp_path / "r")])
    (column,) = json.loads(result.stdout).values()
    assert (column["nodes"], column["edges"], column["diameter"], column["features"]) == (10_000, 39_402, 99, 7)
    written = record.read(tmp_path / "r" / "statistics" / "minesweeper-generated.json")
    assert (written.experiment, written.cell) == ("statistics", {"dataset": "minesweeper-generated"})
    assert written.metrics == column
    assert written.command == "nsr data stats minesweeper-generated --results results"


def test_stats_of_a_topology_count_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSR_DATA", str(tmp_path))
    (tmp_path / "heterophilous").mkdir()
    triangle = {"edges": np.array([[0, 1], [1, 2], [0, 2]]), "node_labels": np.array([0, 0, 1])}
    np.savez(tmp_path / "heterophilous" / "roman_empire_topology.npz", **triangle)
    shown = run(app, ["data", "stats", "roman-empire", "--json"], catch_exceptions=False)
    assert json.loads(shown.stdout)["roman-empire"]["features"] == 0
    assert not (tmp_path / "results").exists()
    run(app, ["data", "stats", "--results", str(tmp_path / "results")], catch_exceptions=False)
    written = record.read(tmp_path / "results" / "statistics" / "roman-empire.json")
    assert written.metrics["global_clustering"] == 1
    assert "features" not in written.metrics


@pytest.mark.data
def test_verify_real_data(data_dir: Path) -> None:
    result = run(app, ["data", "verify", "minesweeper", "zinc"], env={"NSR_DATA": str(data_dir)})
    assert result.stdout.count("as published") == 2
