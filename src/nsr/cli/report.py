"""``nsr report``: results to tables and figures beside the paper's, on one page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[Path, typer.Option(help="Folder with results.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder to write the report into.")] = Path("report"),
    renew: Annotated[
        list[Path] | None,
        typer.Option(help="A Markdown page to write the tables anew in, and no report; may be given several times."),
    ] = None,
) -> None:
    """Make one self-contained page from results, with the same tables as Markdown and CSV.

    Leaves with code 1 when a result file could not be used; the page is made all the same and says which and why.
    """
    try:
        from nsr.report import build

        if renew:
            changed = build.renew(results, renew)
            typer.echo("\n".join(f"{page}: {'renewed' if page in changed else 'as it was'}" for page in renew))
            return
        outcome = build.build(results, out)
    except ModuleNotFoundError as missing:
        raise ValueError(f"the report needs {missing.name}: pip install 'nsr[report]'") from missing
    for reason in outcome.problems[:20]:
        typer.echo(f"does not count: {reason}", err=True)
    line = f"{outcome.page}: {outcome.runs} runs"
    if outcome.unfinished:
        line += f", {outcome.unfinished} unfinished"
    if outcome.problems:
        files = "file does" if len(outcome.problems) == 1 else "files do"
        line += f", {len(outcome.problems)} {files} not count ({outcome.problems[0]})"
    typer.echo(line)
    if outcome.problems:
        raise typer.Exit(1)
