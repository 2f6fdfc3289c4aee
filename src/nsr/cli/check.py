"""``nsr check``: the decomposition on four operators, each verified."""

import json
from dataclasses import asdict
from typing import Annotated

import typer


def check(
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show on four operators that `x = UAx + Z` and `AZ = 0`, with the numbers.

    A graph-like weighted sum, a token-merge-like mean, an explicit matrix and an overlapping average pooling:
    each is split into what it keeps and what it makes invisible, and verified on random inputs.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    import nsr

    torch.manual_seed(seed)
    group = torch.arange(1000) % 100
    pool = torch.nn.AvgPool2d(3, stride=2)
    examples = [
        ("weighted sum", nsr.Segment(group, torch.randn(1000), 100), torch.randn(1000, 32)),
        ("group mean", nsr.Segment(group, torch.full((1000,), 0.1), 100, "copy"), torch.randn(1000, 32)),
        ("20 × 50 matrix", nsr.Dense(torch.randn(20, 50)), torch.randn(50, 32)),
        ("3 × 3 pooling", nsr.Function(pool, (31, 31)), torch.randn(32, 31, 31)),
    ]
    results = [(name, nsr.check(op, x)) for name, op, x in examples]
    if as_json:
        typer.echo(json.dumps([{"name": name, **asdict(result)} for name, result in results], indent=2))
    else:
        table = Table(
            title="x = UAx + Z,   AZ = 0",
            caption="Z is what the map makes invisible, |Z|/|X| its share, rank the dimension it lives in.",
        )
        for heading in ("map", "operator", "linear", "AUA = A", "|AZ|∞", "|Z|/|X|", "rank", ""):
            table.add_column(heading)
        for name, r in results:
            rank = "unknown" if r.null_rank is None else f"{r.null_rank:,}"
            verdict = "[green]holds[/]" if r.passed else "[red]does not hold[/]"
            numbers = (f"{r.linearity:.0e}", f"{r.lift:.0e}", f"{r.null_violation:.0e}", f"{r.residual_share:.3f}")
            table.add_row(name, r.operator, *numbers, rank, verdict)
        Console().print(table)
    if not all(result.passed for _, result in results):
        raise typer.Exit(1)
