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
