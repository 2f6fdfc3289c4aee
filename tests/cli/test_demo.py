import pytest
from typer.testing import CliRunner

from nsr.cli import app


def test_trains_both_variants_and_draws_them(tmp_path) -> None:
    picture = tmp_path / "demo.png"
    result = CliRunner().invoke(app, ["demo", "--depths", "2", "--out", str(picture)])
    assert result.exit_code == 0, result.output
    assert "depth 2  original" in result.output
    assert "depth 2  nsr       100.0 %" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("option", "value"), [("--depths", "2,9"), ("--depths", "deep"), ("--backbone", "mlp")])
def test_refuses_what_it_cannot_show(option: str, value: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        CliRunner().invoke(app, ["demo", option, value], catch_exceptions=False)
