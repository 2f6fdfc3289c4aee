"""``nsr runs``: the runs there are, with status, metric and time."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from nsr.report.read import Run

# The number that a run is judged by, and what it is multiplied with to be read.
HEADLINES = {
    "miou": ("mIoU", 100.0),
    "test": ("test", 100.0),
    "test_mae": ("MAE", 1.0),
    "train_accuracy": ("train accuracy", 100.0),
}
STATUSES = ("done", "stopped", "failed", "unreadable")


def runs(
    results: Annotated[Path, typer.Option(help="Folder with results.")] = Path("results"),
    experiment: Annotated[str, typer.Option(help="Only this experiment.")] = "",
    status: Annotated[str, typer.Option(help="Only runs with this status: done, stopped, failed, unreadable.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs with status, metric and time."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from nsr.report.read import read_folder

    if status not in ("", *STATUSES):
        raise ValueError(f"--status is {status!r}; expected {', '.join(STATUSES)}.")
    found, problems = read_folder(results)
    rows = [(run.experiment, run.path.stem, run.status, _headline(run), run.seconds, run.error) for run in found]
    rows += [(p.experiment, p.path.stem, "unreadable", "", 0.0, p.reason) for p in problems]
    rows = [row for row in rows if row[0] == (experiment or row[0]) and row[2] == (status or row[2])]
    rows.sort(key=lambda row: row[:2])
    if as_json:
        keys = ("experiment", "name", "status", "metric", "seconds", "reason")
        typer.echo(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2))
        return
    table = Table()
    for heading in ("experiment", "run", "status", "metric"):
        table.add_column(heading, overflow="fold")
    table.add_column("seconds", justify="right")
    for name, run, state, metric, seconds, reason in rows:
        colour = {"done": "green", "stopped": "yellow"}.get(state, "red")
        said = f"[{colour}]{escape(state)}[/]" + (f" {escape(reason)}" if reason else "")
        table.add_row(escape(name), escape(run), said, metric, f"{seconds:,.0f}" if seconds else "")
    Console().print(table)
    typer.echo(f"{len(rows)} runs")


def _headline(run: "Run") -> str:
    for key, (name, scale) in HEADLINES.items():
        value = run.metrics.get(key)
        if isinstance(value, int | float):
            return f"{name} {value * scale:.2f}" if scale > 1 else f"{name} {value:.4f}"
    return ""
