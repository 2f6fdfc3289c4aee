"""The ``nsr`` command. One file a command; each loads what it needs only when it is called."""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from nsr.cli import bench, data, run
from nsr.cli.check import check
from nsr.cli.demo import demo
from nsr.cli.explain import explain
from nsr.cli.flops import flops
from nsr.cli.operating_point import operating_point
from nsr.cli.report import report
from nsr.cli.runs import runs
from nsr.cli.scale import scale
from nsr.cli.sweep import sweep

app = typer.Typer(
    name="nsr",
    help="Null-space residuals: see what many-to-one maps lose, give it back, and reproduce the paper.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command()(check)
app.command()(demo)
app.command()(flops)
app.command()(explain)
app.command()(operating_point)
app.command()(report)
app.command()(runs)
app.command()(scale)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(sweep)
app.add_typer(data.app, name="data")
app.add_typer(run.app, name="run")
app.add_typer(bench.app, name="bench")


@app.callback()
def _root() -> None:
    """Keep ``nsr`` a group of commands even while it has only one."""


def main() -> None:
    """Run the command line; a user's mistake, or a file that cannot be had, is one red line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        # not cut into lines: a path or an address in it must stay whole for whoever copies it
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
