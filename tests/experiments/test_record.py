"""Results are written whole, read back equal, and recognised."""

import json
import os
from pathlib import Path

import pytest
import torch

from nsr.experiments import record
from nsr.experiments.record import Record

CELL = {"depth": 4, "backbone": "gcn", "variant": "nsr", "seed": 11}


def made(**changes: object) -> Record:
    fields = {
        "experiment": "tree",
        "cell": CELL,
        "metrics": {"train_accuracy": 1.0, "bins": [0.5, float("nan")]},
        "config": {"epochs": 3, "betas": (0.9, 0.999)},
        "command": "nsr run tree",
        "seconds": 1.5,
    }
    return Record(**(fields | changes))  # type: ignore[arg-type]


def test_round_trip_and_recognition(tmp_path: Path) -> None:
    path = record.write(tmp_path, made())
    assert path == tmp_path / "tree" / "4-gcn-nsr-11.json"
    back = record.read(path)
    assert back.metrics == {"train_accuracy": 1.0, "bins": [0.5, None]}
    assert (back.schema, back.status, back.cell) == (1, "done", CELL)
    assert record.exists(tmp_path, "tree", CELL, made().config)
    assert not record.exists(tmp_path, "tree", CELL, {"epochs": 4})
    assert not record.exists(tmp_path, "tree", CELL | {"seed": 12}, made().config)


def test_a_failed_run_is_not_a_made_one(tmp_path: Path) -> None:
    path = record.write(tmp_path, made(status="failed", error="the loss is nan"))
    assert record.read(path).error == "the loss is nan"
    assert not record.exists(tmp_path, "tree", CELL, made().config)
    record.write(tmp_path, made())
    assert "error" not in json.loads(path.read_text())


def test_killed_while_writing_leaves_the_old_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record.write(tmp_path, made())
    before = path.read_text()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        record.write(tmp_path, made(seconds=9.0))
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"broken\.json is not a result"):
        record.read(path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = record.write(tmp_path, made())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
    with pytest.raises(ValueError, match="schema 2"):
        record.read(path)


def test_environment_names_versions() -> None:
    facts = record.environment(torch.device("cpu"))
    assert facts["torch"] == torch.__version__
    assert set(facts) == {"commit", "python", "torch", "device", "matmul"}


def test_the_commit_is_the_one_that_a_run_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    before = record.environment(torch.device("cpu"))["commit"]
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("the tree may have changed since"))
    assert record.environment(torch.device("cpu"))["commit"] == before


def test_a_limit_does_not_matter_to_what_was_done_before_it(tmp_path: Path) -> None:
    def there(**config: object) -> bool:
        return record.exists(tmp_path, "tree", CELL, config, ["max_seconds"])

    record.write(tmp_path, made(config={"rate": 1.0, "max_seconds": 60}, status="done"))
    assert there(rate=1.0, max_seconds=None)
    assert not there(rate=2.0, max_seconds=60)
    record.write(tmp_path, made(config={"rate": 1.0, "max_seconds": 60}, status="stopped"))
    assert there(rate=1.0, max_seconds=60)
    assert not there(rate=1.0, max_seconds=120)
