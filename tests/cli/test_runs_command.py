"""``nsr runs`` lists what is there, broken files included."""

import json
from pathlib import Path

from typer.testing import CliRunner

from nsr.cli import app


def put(folder: Path, name: str, content: dict[str, object]) -> None:
    path = folder / str(content["experiment"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "cell": {"name": name}, "metrics": {}, "status": "done", **content}))


def listed(folder: Path, *options: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(app, ["runs", "--results", str(folder), "--json", *options])
    assert done.exit_code == 0
    return json.loads(done.stdout)


def test_status_metric_and_time(tmp_path: Path) -> None:
    put(tmp_path, "a", {"experiment": "voc", "metrics": {"miou": 0.4982}, "seconds": 18.0})
    put(tmp_path, "b", {"experiment": "voc", "status": "failed", "error": "loss was NaN"})
    put(tmp_path, "c", {"experiment": "zinc", "metrics": {"test_mae": 0.2947}})
    (tmp_path / "zinc" / "d.json").write_text("{")
    rows = {str(row["name"]): row for row in listed(tmp_path)}
    assert rows["a"] == {
        "experiment": "voc", "name": "a", "status": "done", "metric": "mIoU 49.82", "seconds": 18.0, "reason": "",
    }  # fmt: skip
    assert (rows["b"]["status"], rows["b"]["reason"]) == ("failed", "loss was NaN")
    assert rows["c"]["metric"] == "MAE 0.2947"
    assert (rows["d"]["status"], rows["d"]["reason"]) == ("unreadable", "truncated")


def test_selection(tmp_path: Path) -> None:
    put(tmp_path, "a", {"experiment": "voc"})
    put(tmp_path, "b", {"experiment": "voc", "status": "failed"})
    put(tmp_path, "c", {"experiment": "zinc"})
    assert [row["name"] for row in listed(tmp_path, "--experiment", "voc", "--status", "failed")] == ["b"]


def test_the_table_escapes_and_sums(tmp_path: Path) -> None:
    put(tmp_path, "[red]x", {"experiment": "voc", "seconds": 7200})
    done = CliRunner().invoke(app, ["runs", "--results", str(tmp_path)])
    assert done.exit_code == 0
    assert "[red]x" in done.stdout
    assert done.stdout.strip().endswith("1 runs")
