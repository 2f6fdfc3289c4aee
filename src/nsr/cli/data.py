"""``nsr data``: what data there is, where it lies, and whether it is what it should be."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="The data sets: list, fetch, verify, describe; generate the tree task.")

AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")]
Names = Annotated[list[str] | None, typer.Argument(help="Data sets, as `nsr data list` names them; all by default.")]
Results = Annotated[
    Path | None,
    typer.Option(file_okay=False, help="Write a result a data set here too, for the report. Default: none."),
]


@app.command("list")
def list_() -> None:
    """Show every graph data set, where its file belongs and whether it is there.

    Segmentation sets say what they want where they miss it: `nsr run voc`, `ade20k`, `cityscapes`.
    """
    from rich.console import Console
    from rich.table import Table

    from nsr.data import heterophilous, zinc
    from nsr.data.folder import data_folder

    table = Table(title=f"data folder: {data_folder()}", caption="Set NSR_DATA to use another folder.")
    for heading in ("data set", "task", "file", ""):
        table.add_column(heading, overflow="fold")
    for name, known in heterophilous.DATASETS.items():
        path = heterophilous.path_of(name)
        topology = path.with_name(f"{name}_topology.npz")
        found = "there" if path.is_file() else "topology only" if topology.is_file() else "missing"
        table.add_row(name, f"nodes, {known.metric}", str(path.relative_to(data_folder())), found)
    found = "there" if zinc.path_of().is_file() else "missing"
    table.add_row("zinc", "graphs, MAE", str(zinc.path_of().relative_to(data_folder())), found)
    table.add_row(heterophilous.GENERATED, "nodes, roc_auc", "made where it is used", "there")
    table.add_row("tree", "roots, accuracy", "made where it is used", "there")
    Console().print(table)


@app.command()
def fetch(names: Names = None) -> None:
    """Download data sets from their official sources, and check them."""
    from nsr.data import heterophilous, zinc

    for name in names or [*heterophilous.DATASETS, "zinc"]:
        typer.echo(f"{name}: {zinc.fetch() if name == 'zinc' else heterophilous.fetch(name)}")


@app.command()
def verify(names: Names = None) -> None:
    """Check the files that are there: hashes, counts, labels, edges, masks."""
    from nsr.data import heterophilous, zinc

    there = [name for name in heterophilous.DATASETS if heterophilous.path_of(name).is_file()]
    chosen = names or [*there, *(["zinc"] if zinc.path_of().is_file() else [])]
    if not chosen:
        raise ValueError("There is no data set to verify; `nsr data list` shows where files belong.")
    for name in chosen:
        zinc.verify() if name == "zinc" else heterophilous.verify(name)
        # its official archive has no published hash, and the file is made from it
        typer.echo(f"{name}: counts and ranges as published" if name == "zinc" else f"{name}: as published")


@app.command()
def stats(names: Names = None, as_json: AsJson = False, results: Results = None) -> None:
    """Compute the statistics by which the heterophilous graphs are described (half a minute for Tolokers)."""
    from rich.console import Console
    from rich.table import Table

    from nsr.data import heterophilous
    from nsr.data.graph_statistics import graph_statistics

    columns = {}
    for name in names or _with_topology():
        begin = time.perf_counter()
        edges, labels = heterophilous.topology(name)
        columns[name] = asdict(graph_statistics(edges, labels, _features(name)))
        if results is not None:
            _write(results, heterophilous.canonical(name).replace("_", "-"), columns[name], time.perf_counter() - begin)
    if as_json:
        typer.echo(json.dumps(columns, indent=2))
        return
    table = Table()
    for heading in ("statistic", *columns):
        table.add_column(heading, justify="left" if heading == "statistic" else "right")
    for row in next(iter(columns.values())):
        values = [column[row] for column in columns.values()]
        table.add_row(row.replace("_", " "), *(f"{v:.2f}" if isinstance(v, float) else str(v) for v in values))
    Console().print(table)


def _features(name: str) -> int:
    """The number of features, which a data set's file is checked for; 0 where only the topology is at hand."""
    from nsr.data.heterophilous import DATASETS, canonical, path_of

    known = DATASETS.get(canonical(name))
    if known is None:
        return 7  # the generated Minesweeper's
    return known.features if path_of(canonical(name)).is_file() else 0


def _write(results: Path, dataset: str, statistics: dict[str, Any], seconds: float) -> None:
    """Leave ``results/statistics/<dataset>.json``, without what could not be counted."""
    import torch

    from nsr.experiments import record

    metrics = {key: value for key, value in statistics.items() if key != "features" or value}
    command = f"nsr data stats {dataset} --results results"
    environment = record.environment(torch.device("cpu"))
    record.write(results, record.Record("statistics", {"dataset": dataset}, metrics, {}, command, seconds, environment))


def _with_topology() -> list[str]:
    from nsr.data.heterophilous import DATASETS, GENERATED, path_of

    files = {name: (path_of(name), path_of(name).with_name(f"{name}_topology.npz")) for name in DATASETS}
    return [name for name, paths in files.items() if any(path.is_file() for path in paths)] or [GENERATED]


@app.command()
def tree(
    depth: Annotated[int, typer.Option(help="Depth of the trees, 2 to 8.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of permutations and split.")] = 11,
    as_json: AsJson = False,
) -> None:
    """Generate Tree-NeighborsMatch and print its counts and hashes."""
    from nsr.data.tree import tree_task

    task = tree_task(depth, seed)
    facts = {
        "depth": depth,
        "seed": seed,
        "permutations": len(task.permutations),
        "train_samples": len(task.train),
        "test_samples": len(task.test),
        "first_values": task.permutations[0, :8].tolist(),
        "sha256": task.hashes(),
    }
    typer.echo(json.dumps(facts, indent=2) if as_json else "\n".join(f"{key:14} {facts[key]}" for key in facts))
