"""Groups of options: a command gets its dataclasses, a user sees plain options."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from nsr.cli.option_groups import with_groups


@dataclass(frozen=True)
class Place:
    device: Annotated[str, typer.Option(help="Where.")] = "cpu"
    force: Annotated[bool, typer.Option("--force", help="Again.")] = False


def test_a_group_is_options_outside_and_one_value_inside() -> None:
    seen: list[tuple[int, Place]] = []

    def train(epochs: Annotated[int, typer.Option(help="Passes.")] = 3, *, place: Place) -> None:
        """Train it."""
        seen.append((epochs, place))

    app = typer.Typer()
    app.command()(with_groups(train))
    assert CliRunner().invoke(app, []).exit_code == 0
    assert CliRunner().invoke(app, ["--device", "cuda", "--epochs", "5", "--force"]).exit_code == 0
    assert seen == [(3, Place()), (5, Place("cuda", force=True))]
    said = CliRunner().invoke(app, ["--help"]).output
    assert "Train it." in said
    assert all(part in said for part in ("--epochs", "Passes.", "--device", "Where.", "--force"))
    assert "--place" not in said
    assert CliRunner().invoke(app, ["--place", "cpu"]).exit_code == 2
