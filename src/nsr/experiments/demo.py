"""The main job in a few minutes on two cores: one backbone with and without its null-space residual, side by side.

Tree-NeighborsMatch: the root of a binary tree must answer with the value of the leaf whose key it is asked for.
Swapping the values of two sibling leaves changes the answer and leaves their parent's aggregate as it was, so the plain
network has to fit what its first layer cannot see. Task and models are the paper's; batches hold whole trees and the
rate is twice as high, because a demonstration should not take an hour.
These settings were chosen for NSR; the original is still rising when its epochs end (docs/log.md).
"""

import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Variant = Literal["original", "nsr"]
VARIANTS: tuple[Variant, ...] = ("original", "nsr")
# What both variants get at each depth: epochs at most, and trees a batch. A model at 100 % stops.
EPOCHS = {2: 600, 3: 200, 4: 500}
TREES_PER_BATCH = {2: 24, 3: 50, 4: 32}
RATE = 2e-3


@dataclass(frozen=True)
class Standing:
    """Where one variant stands at one depth.

    Attributes:
        accuracy: Training accuracy over the latest epoch.
        best: The highest so far, which is what the benchmark reports.
        done: Whether this depth is finished for this variant.
    """

    variant: Variant
    depth: int
    epoch: int
    epochs: int
    accuracy: float
    best: float
    seconds: float
    parameters: int
    done: bool = False


def side_by_side(backbone: str, depths: tuple[int, ...], seed: int) -> Iterator[Standing]:
    """Train both variants at each depth, each in a process of its own, and tell where they stand.

    Raises:
        RuntimeError: One of the two processes died; its own traceback is on standard error.
    """
    context = multiprocessing.get_context("spawn")
    standings = context.Queue()
    workers = [
        context.Process(target=_train, args=(backbone, variant, depths, seed, standings), daemon=True)
        for variant in VARIANTS
    ]
    for worker in workers:
        worker.start()
    unfinished = {(variant, depth) for variant in VARIANTS for depth in depths}
    try:
        while unfinished:
            try:
                standing = standings.get(timeout=1)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise RuntimeError(
                        "A training process of the demonstration failed; see its traceback above."
                    ) from None
                continue
            if standing.done:
                unfinished.discard((standing.variant, standing.depth))
            yield standing
    finally:
        for worker in workers:
            worker.terminate()


def _train(backbone: str, variant: Variant, depths: tuple[int, ...], seed: int, standings: Any) -> None:
    """One variant, depth after depth, on one core."""
    import torch
    from torch import nn

    from nsr.data.tree import tree_task
    from nsr.experiments.graph_models import graph_model, parameter_count
    from nsr.training.plateau import PlateauRule
    from nsr.training.progress import Progress
    from nsr.training.tree import train_trees

    torch.set_num_threads(1)  # the tensors are small, and the other core is the other variant's
    rule = PlateauRule("max", rate=RATE, patience=1000, stop_after=2000, perfect=1.0)
    for depth in depths:
        leaves = 2**depth
        model = graph_model(
            backbone,  # type: ignore[arg-type]
            variant,
            lambda width, inputs=2 * (leaves + 1): nn.Linear(inputs, width),  # type: ignore[misc]
            seed=seed,
            width=32,
            outputs=leaves,
            layers=depth + 1,
            readout="root",
        )
        parameters = parameter_count(model)

        def watch(at: Progress, depth: int = depth, parameters: int = parameters) -> None:
            here = (at.epoch, at.epochs, at.metric[0], at.best[0], at.seconds)
            standings.put(Standing(variant, depth, *here, parameters))

        outcome = train_trees(
            [model],
            [tree_task(depth, seed)],
            epochs=EPOCHS[depth],
            rule=rule,
            trees_per_batch=TREES_PER_BATCH[depth],
            watch=watch,
            look_every=2,
        )
        best = outcome.train_accuracy[0]
        ended = (outcome.epochs, EPOCHS[depth], best, best, outcome.seconds)
        standings.put(Standing(variant, depth, *ended, parameters, done=True))


def picture(curves: dict[tuple[Variant, int], list[Standing]], backbone: str, path: Path) -> None:
    """Training accuracy over the epochs, one panel a depth, both variants in each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    depths = sorted({depth for _, depth in curves})
    figure, axes = pyplot.subplots(
        1, len(depths), figsize=(4 * len(depths), 3.6), sharey=True, squeeze=False, layout="constrained"
    )
    for depth, axis in zip(depths, axes[0], strict=True):
        for variant, colour, label in (("original", "#9a9a9a", backbone), ("nsr", "#2a6fdb", f"{backbone} + NSR")):
            curve = curves[variant, depth]  # type: ignore[index]
            axis.plot([s.epoch for s in curve], [100 * s.best for s in curve], color=colour, label=label, linewidth=2)
        axis.axhline(100 / 2**depth, color="#cccccc", linestyle=":", linewidth=1)
        axis.set(title=f"depth {depth}: {2**depth} leaves", xlabel="epoch", ylim=(0, 103))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("best training accuracy, %")
    axes[0][-1].legend(frameon=False, loc="lower right")
    figure.suptitle(
        "Tree-NeighborsMatch: what the aggregation hides and the residual gives back (dotted: guessing)",
        fontsize="medium",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
