"""``nsr demo``: watch a graph network fail, and its null-space residual succeed, on the same task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsr.cli.selection import integers
from nsr.cli.spoken import duration

if TYPE_CHECKING:
    from rich.table import Table

    from nsr.experiments.demo import Standing, Variant


def demo(
    backbone: Annotated[str, typer.Option(help="gcn, sage or gin.")] = "gcn",
    depths: Annotated[str, typer.Option(help="Tree depths by commas, from 2 to 4.")] = "2,3,4",
    seed: Annotated[int, typer.Option(help="Of the trees, the weights and the order of batches.")] = 11,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("outputs/demo.png"),
) -> None:
    """Train one graph network with and without NSR, side by side, on trees that it cannot tell apart.

    Tree-NeighborsMatch asks the root of a binary tree for the value of one leaf. Swap the values of two sibling
    leaves: the answer changes, their parent's aggregate does not. Both models get the same epochs; one to two
    minutes on two CPU cores.
    """
    from rich.console import Console
    from rich.live import Live

    from nsr.experiments.demo import EPOCHS, picture, side_by_side
    from nsr.experiments.graph_models import BACKBONES

    if backbone not in BACKBONES:
        raise ValueError(f"backbone is {backbone!r}; expected one of {', '.join(BACKBONES)}.")
    chosen = tuple(sorted(integers("--depths", depths)))
    if not set(chosen) <= EPOCHS.keys():
        raise ValueError(f"depths is {depths!r}; expected numbers among {', '.join(map(str, EPOCHS))}, such as 2,3,4.")

    console = Console()
    console.print(f"Tree-NeighborsMatch, {backbone.upper()} with and without its null-space residual, seed {seed}")
    curves: dict[tuple[Variant, int], list[Standing]] = {}
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for standing in side_by_side(backbone, chosen, seed):
            curves.setdefault((standing.variant, standing.depth), []).append(standing)
            if console.is_terminal:
                live.update(_table(curves, chosen, backbone, live=True))
            elif standing.done:
                reached = f"{100 * standing.best:5.1f} % after {standing.epoch} epochs, {standing.seconds:.0f} s"
                console.print(f"depth {standing.depth}  {standing.variant:<8}  {reached}")
    console.print(_table(curves, chosen, backbone, live=False))
    picture(curves, backbone.upper(), out)
    console.print(_verdict(curves, chosen, backbone), highlight=False)
    console.print(f"The curves are in {out}.", highlight=False)


def _table(
    curves: "dict[tuple[Variant, int], list[Standing]]", depths: tuple[int, ...], backbone: str, live: bool
) -> "Table":
    from rich.table import Table

    from nsr.experiments.demo import VARIANTS

    table = Table(title="training accuracy", caption="the highest over an epoch, as the benchmark reports it")
    for heading in (
        "depth",
        "leaves",
        "model",
        "accuracy",
        "epochs",
        "parameters",
        "seconds",
        *(("left",) if live else ()),
    ):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for depth in depths:
        for variant in VARIANTS:
            name = backbone.upper() + (" + NSR" if variant == "nsr" else "")
            curve = curves.get((variant, depth))
            if curve is None:
                table.add_row(str(depth), str(2**depth), name, "", "", "", "", *(("waiting",) if live else ()))
                continue
            at = curve[-1]
            colour = "green" if at.best == 1 else "red" if at.done else "yellow"
            left = "" if at.done else f"≤ {duration(at.seconds / at.epoch * (at.epochs - at.epoch))}"
            table.add_row(
                str(depth),
                str(2**depth),
                name,
                f"[{colour}]{100 * at.best:.1f} %[/]",
                f"{at.epoch} of {at.epochs}",
                f"{at.parameters:,}",
                f"{at.seconds:.0f}",
                *((left,) if live else ()),
            )
    return table


def _verdict(curves: "dict[tuple[Variant, int], list[Standing]]", depths: tuple[int, ...], backbone: str) -> str:
    """What this run showed, in one sentence; nothing that it did not."""
    deepest = depths[-1]
    plain, residual = (curves[variant, deepest][-1] for variant in ("original", "nsr"))
    return (
        f"At depth {deepest} {backbone.upper()} reached {100 * plain.best:.1f} % in {plain.epoch} epochs, with its "
        f"null-space residual {100 * residual.best:.1f} % in {residual.epoch}."
    )
