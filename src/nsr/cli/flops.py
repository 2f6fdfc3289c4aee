"""``nsr flops``: what a merged ViT segmenter costs, with and without NSR."""

import json
from typing import Annotated

import typer

from nsr.cli.merger import Blocks, Grid, Keep, Merger, R, integers, parse_grid, parse_merger

Classes = Annotated[int, typer.Option(help="Classes of the segmentation head.")]
Dim = Annotated[int, typer.Option(help="Width of the ViT.")]
Depth = Annotated[int, typer.Option(help="Blocks of the ViT.")]
Heads = Annotated[int, typer.Option(help="Attention heads.")]
Patch = Annotated[int, typer.Option(help="Side of a patch in pixels.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]


def flops(
    merger: Merger,
    grid: Grid = "14x14",
    classes: Classes = 21,
    r: R = None,
    keep: Keep = None,
    blocks: Blocks = None,
    pairs: Annotated[str | None, typer.Option(help="MPM: pairs found at each block, such as 40,30,20,10.")] = None,
    dim: Dim = 192,
    depth: Depth = 12,
    heads: Heads = 3,
    patch: Patch = 16,
    as_json: AsJson = False,
) -> None:
    """Count the multiply-accumulates and parameters of a merged ViT segmenter, exactly, from shapes alone.

    `full` is the ViT that merges nothing, `base` the merged one, `nsr` the merged one with NSR, all in the paper's
    convention; `nsr_executed` is what this implementation really runs. The defaults are DeiT-Tiny.
    """
    from nsr.tokens import TokenResidual, budget

    shape = budget.ViTShape(parse_grid(grid), classes, dim, depth, heads, patch)
    rule = parse_merger(merger, r, keep, blocks)
    if pairs is not None and merger != "mpm":
        raise ValueError(f"--pairs belongs to --merger mpm; the counts of {merger} follow from its settings.")
    events = budget.merge_events(shape, rule, None if pairs is None else integers("--pairs", pairs))
    full, base = budget.backbone_flops(shape, []), budget.backbone_flops(shape, events)
    params = budget.backbone_parameters(shape)
    result = {
        "full": full,
        "base": base,
        "nsr": base + budget.nsr_flops(shape, events),
        "nsr_executed": budget.executed_flops(shape, events, TokenResidual()),
        "achieved": full / base,
        "sites": len(events),
        "params_full": params,
        "params_nsr": params + budget.nsr_parameters(dim, len(events)),
    }
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print_table(result)


def _print_table(result: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption=f"{result['sites']} merge events; one multiply-accumulate is one FLOP")
    for heading in ("", "GFLOPs", "of full", "parameters"):
        table.add_column(heading, justify="left" if not heading else "right")
    rows = [
        ("full ViT", "full", "params_full"),
        ("merged", "base", "params_full"),
        ("merged + NSR", "nsr", "params_nsr"),
        ("merged + NSR, as executed", "nsr_executed", "params_nsr"),
    ]
    for name, key, params in rows:
        ratio = f"÷ {result['full'] / result[key]:.3f}"
        table.add_row(name, f"{result[key] / 1e9:.4f}", ratio, f"{result[params]:,}")
    Console().print(table)
