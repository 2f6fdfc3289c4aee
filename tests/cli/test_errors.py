"""What a user's mistake looks like from outside."""

import sys
from pathlib import Path

import pytest

from nsr import cli


def test_an_error_is_one_line_with_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nsr", "run", "zinc", "--data", str(tmp_path)])
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "zinc" / "zinc12k.npz") in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["runs", "--status", "faild"], "expected done, stopped, failed, unreadable"),
        (["bench", "graph", "--device", "abacus"], "is no device"),
        (["scale", "--device", "abacus"], "is no device"),
        (["run", "shapes", "--device", "abacus"], "is no device"),
        (["run", "tree", "--depth", "2", "--device", "cpu", "--results", "{file}/results"], "Not a directory"),
        (["demo", "--depths", "2,foo"], "such as 0,1,2"),
    ],
)
def test_a_mistake_is_no_traceback(
    arguments: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(sys, "argv", ["nsr", *(word.format(file=tmp_path / "file") for word in arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
