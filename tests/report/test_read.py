"""A result that cannot be used is kept with its reason and, where possible, its cell."""

import json
from pathlib import Path

import pytest
from example_results import document, write
from hypothesis import given
from hypothesis import strategies as st

from nsr.report.read import Problem, Run, read_file, read_folder

CELL = {"merger": "tome", "point": "3.4x", "variant": "nsr", "seed": 0}


def put(folder: Path, text: str | bytes) -> Path:
    path = folder / "voc" / "one.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problem(outcome: Run | Problem) -> Problem:
    assert isinstance(outcome, Problem)
    return outcome


def test_a_good_file(empty: Path) -> None:
    run = read_file(write(empty, document("voc", CELL, {"miou": 0.5})))
    assert isinstance(run, Run)
    assert (run.experiment, run.cell, run.metrics) == ("voc", CELL, {"miou": 0.5})
    assert run.replicate == "seed 0"


def test_truncated_anywhere_is_told_and_never_a_crash(empty: Path) -> None:
    whole = json.dumps(document("voc", CELL, {"miou": 0.5}))
    for length in range(len(whole) - 1):
        reason = problem(read_file(put(empty, whole[:length]))).reason
        assert "truncated" in reason or "no valid JSON" in reason
    late = problem(read_file(put(empty, whole[: whole.index("metrics") + 20])))
    assert (late.reason, late.cell) == ("truncated", CELL)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema 2 is newer than this nsr reads"),
        ({"schema": None}, "schema None is unknown"),
        ({"metrics": {"miou": float("nan")}}, "not a finite number: miou"),
        ({"metrics": {"a": {"b": [1.0, float("inf")]}}}, "not a finite number: a.b"),
        ({"metrics": {"miou": 10**400}}, "not a finite number: miou"),
        ({"metrics": [1]}, "`metrics` is missing or of the wrong kind"),
        ({"cell": "tome"}, "`cell` is missing or of the wrong kind"),
    ],
)
def test_what_does_not_count(empty: Path, change: dict[str, object], reason: str) -> None:
    found = problem(read_file(put(empty, json.dumps({**document("voc", CELL, {"miou": 0.5}), **change}))))
    assert reason in found.reason
    assert found.experiment == "voc"
    if "cell" not in change:
        assert found.cell == CELL


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[]", b"null", b"[" * 100_000, b'{"schema": 1}'])
def test_what_is_no_result_at_all(empty: Path, content: bytes) -> None:
    assert problem(read_file(put(empty, content))).reason


@given(st.binary(max_size=200))
def test_any_bytes_are_a_run_or_a_reason(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(content)
    assert isinstance(read_file(path), Problem)


def test_the_same_cell_twice_counts_once(empty: Path) -> None:
    write(empty, document("voc", CELL, {"miou": 0.5}), "a")
    write(empty, document("voc", CELL, {"miou": 0.9}), "b")
    runs, problems = read_folder(empty)
    assert [run.path.name for run in runs] == ["a.json"]
    assert "the same cell as a.json" in problems[0].reason


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        read_folder(tmp_path / "nowhere")
