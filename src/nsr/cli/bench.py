"""``nsr bench``: what the library costs, beside its peers; one table and one JSON a benchmark."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsr.cli.device import chosen_device

if TYPE_CHECKING:
    import torch

    from nsr.experiments.record import Record

app = typer.Typer(
    help="Measure time and memory against honest peers, all arms in turns in one run.", no_args_is_help=True
)

Device = Annotated[str | None, typer.Option(help="cuda or cpu; cuda where there is one.")]
Machine = Annotated[str | None, typer.Option(help="Name of this machine in the results.")]
Results = Annotated[Path, typer.Option(help="Folder of the results.")]
Limit = Annotated[
    float | None, typer.Option(help="Seconds after which models that are still being compiled are left out.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes and few calls: shows that everything runs.")]


@app.command()
def graph(
    device: Device = None,
    machine: Machine = None,
    results: Results = Path("results"),
    quick: Quick = False,
    only: Annotated[
        list[str] | None, typer.Option(help="Names of the arms to measure, as patterns; all of them.")
    ] = None,
    limit: Limit = None,
) -> None:
    """One training step of a four-layer GCN with the branch: against the plain GCN, GATv2 and the literal form."""
    from nsr.bench.graph import bench_graph
    from nsr.experiments.record import write

    where = chosen_device(device)
    record = bench_graph(
        where,
        machine=machine or _name(where),
        quick=quick,
        only=only or ("*",),
        limit=limit,
        keep=lambda so_far: write(results, so_far),
    )
    _show(record, results)


@app.command()
def scale(
    device: Device = None, machine: Machine = None, results: Results = Path("results"), quick: Quick = False
) -> None:
    """How a training step grows with the number of members, up to a hundred million on a GPU."""
    from nsr.bench.scale import bench_scale
    from nsr.experiments.record import write

    where = chosen_device(device)
    record = bench_scale(
        where, machine=machine or _name(where), quick=quick, keep=lambda so_far: write(results, so_far)
    )
    _show(record, results)


@app.command()
def tokens(
    device: Device = None,
    machine: Machine = None,
    results: Results = Path("results"),
    quick: Quick = False,
    limit: Limit = None,
) -> None:
    """Images a second of merged ViTs, with and without NSR, against the full model and the limit."""
    from nsr.bench.tokens import CASES, CPU_CASES, LATENCY, QUICK, bench_tokens

    where = chosen_device(device)
    cases = QUICK if quick else CASES + LATENCY if where.type == "cuda" else CPU_CASES
    _show(bench_tokens(where, cases, machine=machine or _name(where), quick=quick, limit=limit), results)


@app.command()
def train(
    device: Device = None,
    machine: Machine = None,
    results: Results = Path("results"),
    quick: Quick = False,
    limit: Limit = None,
) -> None:
    """A training step of a ViT segmenter: full, merged, and merged with NSR."""
    from nsr.bench.train import CASES, CPU_CASES, QUICK, bench_train

    where = chosen_device(device)
    cases = QUICK if quick else CASES if where.type == "cuda" else CPU_CASES
    _show(bench_train(where, cases, machine=machine or _name(where), quick=quick, limit=limit), results)


def _name(device: "torch.device") -> str:
    """A short name of the device, such as ``nvidia-h200`` or ``cpu-2``."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return f"cpu-{torch.get_num_threads()}"


def _show(record: "Record", results: Path) -> None:
    """Print the record as one table and write it."""
    from rich.console import Console
    from rich.table import Table

    from nsr.experiments.record import write

    on = record.environment["device"]
    where = f"{on}, {record.environment['threads']} threads" if record.cell["machine"].startswith("cpu") else on
    table = Table(title=f"nsr bench {record.cell['bench']} on {where}")
    headings = ("", "milliseconds", "quartiles", "speed-up", "peak memory")
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right")
    for title, arms in record.metrics.items():
        table.add_section()
        table.add_row(f"[bold]{title}[/]")
        for name, arm in arms.items():
            if isinstance(arm, dict) and "milliseconds" in arm:
                times, speed_up, peak = arm["milliseconds"], arm.get("speed_up"), arm.get("peak_bytes")
                table.add_row(
                    name,
                    f"{times['median']:.3g}",
                    f"{times['low']:.3g} – {times['high']:.3g}",
                    f"{speed_up:.2f}" if speed_up else "",
                    f"{peak / 2**30:.2f} GiB" if peak else "",
                )
    console = Console()
    console.print(table)
    console.print(f"written to {write(results, record)}", highlight=False)
