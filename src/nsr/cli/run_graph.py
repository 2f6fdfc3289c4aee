"""The graph half of ``nsr run``: trees, heterophilous nodes, ZINC, the ablation and the diagnostic."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsr.cli.device import chosen_device
from nsr.cli.option_groups import with_groups
from nsr.cli.selection import integers, names
from nsr.cli.spoken import duration, pace

if TYPE_CHECKING:
    import torch

    from nsr.experiments.replicated import Configuration
    from nsr.training.progress import Progress, Watch

Depths = Annotated[str, typer.Option("--depth", help="Tree depths by commas, from 2 to 8.")]
Datasets = Annotated[str, typer.Option("--dataset", help="Data sets by commas; `nsr data list` names them.")]
Backbones = Annotated[str, typer.Option("--backbone", help="Backbones by commas: gcn,sage,gin.")]
Variants = Annotated[
    str, typer.Option("--variant", help="Variants by commas: original,nsr,raw-source,post-aggregation,matched.")
]
Seeds = Annotated[str, typer.Option("--seed", help="Seeds by commas or as a range, such as 0-9.")]
Splits = Annotated[str, typer.Option("--split", help="Splits by commas or as a range, such as 0-9. Default: all.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Epochs at most. Default: the paper's.")]
Minutes = Annotated[
    float | None, typer.Option(min=0.0, help="End each configuration after so many minutes with what it has.")
]
TreesPerBatch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Batches of so many trees with all their queries. Default: single samples, as in the paper."
    ),
]
Rate = Annotated[float | None, typer.Option(min=0.0, help="Initial learning rate. Default: the paper's.")]
Patience = Annotated[
    int | None, typer.Option(min=1, help="Epochs without progress before the rate is halved. Default: the paper's.")
]
Anneal = Annotated[
    bool,
    typer.Option("--anneal", help="Let the rate fall along half a cosine to 0 over --epochs, not at plateaus."),
]
Soap = Annotated[
    bool,
    typer.Option(
        "--soap", help="Adam in the eigenbasis of a matrix's gradients (SOAP): far fewer epochs. Not the paper's."
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … Default: a GPU if there is one.")]
Precision = Annotated[
    str | None,
    typer.Option(
        help="Matrix products in fp32 or tf32; bf16: in tf32, but the branch's product a member in bf16. "
        "Default: bf16 on a GPU."
    ),
]
Dropout = Annotated[
    float | None,
    typer.Option(min=0.0, max=0.95, help="Default: 0.2 on nodes, 0.5 on ZINC. Another one makes cells of its own."),
]
Together = Annotated[int, typer.Option(min=1, help="Seeds or splits trained at once; fewer need less memory.")]
Concurrent = Annotated[int, typer.Option(min=1, help="Models that take turns on the device; fills a GPU.")]
Results = Annotated[Path, typer.Option(help="Where results go, one JSON a run.")]
Outputs = Annotated[Path, typer.Option(help="Where unfinished runs are kept.")]
TensorBoard = Annotated[
    Path | None, typer.Option(file_okay=False, help="Draw curves for TensorBoard here, one folder a run. Default: off.")
]
Data = Annotated[Path | None, typer.Option(help="Where the data is. Default: $NSR_DATA or the user's cache folder.")]
Force = Annotated[bool, typer.Option("--force", help="Run again, from the beginning, what has a result.")]

_RESULTS, _OUTPUTS, _BACKBONES = Path("results"), Path("outputs"), "gcn,sage,gin"
_AT_HAND = "minesweeper,tolokers,actor,chameleon-filtered"


@dataclass(frozen=True)
class Runs:
    """Where the models of a command are trained, how many at once, and what they leave."""

    epochs: Epochs = None
    device: Device = None
    together: Together = 10
    concurrent: Concurrent = 1
    results: Results = _RESULTS
    outputs: Outputs = _OUTPUTS
    tensorboard: TensorBoard = None
    force: Force = False

    def make(self, configurations: "Sequence[Configuration]", device: "torch.device") -> None:
        """Train what has no result yet."""
        from nsr.experiments.replicated import run_configurations

        run_configurations(
            configurations,
            self.results,
            self.outputs,
            device,
            together=self.together,
            concurrent=self.concurrent,
            force=self.force,
            say=typer.echo,
            watch=lambda name: _line(name, sys.stderr.isatty()),
            tensorboard=self.tensorboard,
        )


def add_graph(app: typer.Typer) -> None:
    """Add the graph experiments to ``nsr run``."""
    for command in (tree, heterophily, zinc, graph_ablation, diagnostic):
        app.command(command.__name__.replace("_", "-"))(with_groups(command))


def tree(
    depth: Depths = "2,3,4,5,6,7,8",
    backbone: Backbones = _BACKBONES,
    variant: Variants = "original,nsr",
    seed: Seeds = "11",
    minutes: Minutes = None,
    trees_per_batch: TreesPerBatch = None,
    rate: Rate = None,
    patience: Patience = None,
    anneal: Anneal = False,
    soap: Soap = False,
    *,
    runs: Runs,
) -> None:
    """Train on Tree-NeighborsMatch: training accuracy by depth, and accuracy on fresh permutations."""
    device = _device(runs.device, "fp32")  # as the tree kernels, which have no other: see nsr.training.tree_product
    from nsr.data.tree import DEPTHS
    from nsr.experiments.tree import tree_configurations

    depths = integers("--depth", depth)
    if not set(depths) <= set(DEPTHS):
        raise ValueError(f"--depth {depth}: trees have depths {DEPTHS.start} to {DEPTHS.stop - 1}.")
    seconds = None if minutes is None else 60 * minutes
    seeds = integers("--seed", seed)
    configurations = tree_configurations(
        depths,
        *_models(backbone, variant),
        seeds,
        device,
        runs.epochs,
        max_seconds=seconds,
        trees_per_batch=trees_per_batch,
        rate=rate,
        patience=patience,
        anneal=anneal,
        soap=soap,
    )
    runs.make(configurations, device)


def heterophily(
    dataset: Datasets = _AT_HAND,
    backbone: Backbones = _BACKBONES,
    variant: Variants = "original,nsr",
    split: Splits = "",
    dropout: Dropout = None,
    precision: Precision = None,
    data: Data = None,
    *,
    runs: Runs,
) -> None:
    """Train node classifiers on heterophilous graphs: accuracy or ROC-AUC over the official splits."""
    device = _device(runs.device, precision)
    from nsr.experiments.heterophily import heterophily_configurations

    splits = integers("--split", split) if split else None
    configurations = heterophily_configurations(
        names(dataset), *_models(backbone, variant), splits, device, runs.epochs, data, dropout
    )
    runs.make(configurations, device)


def zinc(
    backbone: Backbones = _BACKBONES,
    variant: Variants = "original,nsr",
    seed: Seeds = "0-9",
    dropout: Dropout = None,
    precision: Precision = None,
    data: Data = None,
    *,
    runs: Runs,
) -> None:
    """Train graph regression on ZINC: test MAE over seeds."""
    device = _device(runs.device, precision)
    from nsr.experiments.zinc import zinc_configurations

    seeds = integers("--seed", seed)
    configurations = zinc_configurations(*_models(backbone, variant), seeds, device, runs.epochs, data, dropout)
    runs.make(configurations, device)


def graph_ablation(
    dataset: Datasets = "minesweeper",
    backbone: Backbones = _BACKBONES,
    split: Splits = "",
    dropout: Dropout = None,
    precision: Precision = None,
    data: Data = None,
    *,
    runs: Runs,
) -> None:
    """Train the controls beside the method: post-aggregation only, raw source, and a wider original of equal size."""
    controls = "original,post-aggregation,raw-source,nsr,matched"
    heterophily(dataset, backbone, controls, split, dropout, precision, data, runs=runs)


def diagnostic(
    dataset: Datasets = "roman-empire,minesweeper,actor",
    backbone: Backbones = _BACKBONES,
    results: Results = _RESULTS,
    data: Data = None,
    force: Force = False,
) -> None:
    """Score how much label structure aggregation hides; with trained models, accuracy by decile of the score."""
    from nsr.data.heterophilous import canonical
    from nsr.experiments.diagnostic import run_accuracy, run_scores

    datasets = [canonical(name).replace("_", "-") for name in names(dataset)]
    backbones, _ = _models(backbone, "original")
    run_scores(datasets, backbones, results, folder=data, force=force, say=typer.echo)
    run_accuracy(datasets, backbones, results, say=typer.echo)


def _line(name: str, terminal: bool) -> "Watch":
    """One live line a run; without a terminal, one line now and then."""
    next_at = 0.0

    def watch(progress: "Progress") -> None:
        nonlocal next_at
        if not terminal and progress.seconds < next_at:
            return
        next_at = progress.seconds + 30
        best = sum(progress.best) / len(progress.best)
        latest = sum(progress.metric) / len(progress.metric)
        text = (
            f"  {name}: epoch {progress.epoch}/{progress.epochs}, mean {latest:.4f}, best {best:.4f}, "
            f"{progress.active} training, {pace(progress.pace)}, at most {duration(progress.left)} left"
        )
        ends = progress.left == 0
        typer.echo(f"\r{text:<118}" if terminal else text, err=True, nl=not terminal or ends)

    return watch


def _device(name: str | None, precision: str | None) -> "torch.device":
    """The device to train on, and the precision of its matrix products."""
    import torch

    from nsr.training.kept_memory import keep_freed_memory

    device = chosen_device(name)
    if device.type == "cpu":
        keep_freed_memory()
    known = {"fp32": "highest", "tf32": "high", "bf16": "medium"}  # as the kernels take what torch is told
    precision = precision or ("bf16" if device.type == "cuda" else "fp32")
    if precision not in known:
        raise ValueError(f"--precision is {precision!r}; expected {', '.join(known)}.")
    torch.set_float32_matmul_precision(known[precision])
    return device


def _models(backbone: str, variant: str) -> tuple[list[Any], list[Any]]:
    from nsr.experiments.graph_models import BACKBONES, VARIANTS

    chosen = []
    for option, given, known in (("--backbone", backbone, BACKBONES), ("--variant", variant, VARIANTS)):
        listed = names(given)
        if not listed or not set(listed) <= set(known):
            raise ValueError(f"{option} {given!r}: expected names among {', '.join(known)}.")
        chosen.append(listed)
    return chosen[0], chosen[1]
