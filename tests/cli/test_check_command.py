import json

from typer.testing import CliRunner

from nsr.cli import app


def test_shows_a_table() -> None:
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 0, result.output
    assert "AUA = A" in result.output.replace("\n", " ")


def test_prints_json() -> None:
    result = CliRunner().invoke(app, ["check", "--json", "--seed", "3"])
    rows = json.loads(result.output)
    assert [row["operator"] for row in rows] == ["Segment", "Segment", "Dense", "Function"]
    assert all(row["passed"] for row in rows)
