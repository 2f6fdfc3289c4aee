"""The paper's figure on Tree-NeighborsMatch: training accuracy by depth, with and without NSR.

Expected: 100 % at depths 2 to 6 for the three NSR backbones (paper; here in three seeds to depth 4, with SAGE to 5, and
in one seed with GCN to 6); originals fall off from depth 4 on (published GCN: 70 % at depth 4, 19 % at 5). Depths from
5 on need thousands of epochs, so give them a time limit: what has been reached by then is the result, or anneal, and
take SOAP instead of Adam: with 64 trees a batch at 4e-3 along a cosine of 2,500 epochs SAGE with NSR reaches 100 % at
depth 5 in six minutes on one core of a CPU, where Adam has 98.5 % after 4,000.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from nsr.data.tree import permutation_count, tree_task
from nsr.experiments.graph_models import Variant, graph_model, parameter_count
from nsr.experiments.replicated import Cell, Configuration, Metrics, Place, Trained
from nsr.graph.models import Backbone
from nsr.training import tree as training
from nsr.training.loop import Run
from nsr.training.plateau import PlateauRule
from nsr.training.tree import tree_run

WIDTH = 32


def tree_configurations(
    depths: Sequence[int],
    backbones: Sequence[Backbone],
    variants: Sequence[Variant],
    seeds: Sequence[int],
    device: torch.device,
    epochs: int | None = None,
    max_seconds: float | None = None,
    trees_per_batch: int | None = None,
    rate: float | None = None,
    patience: int | None = None,
    anneal: bool = False,
    soap: bool = False,
) -> list[Configuration]:
    """Every combination of depth, backbone and variant, with the seeds as replicas.

    Args:
        depths: Of the trees.
        backbones: Of the models.
        variants: Of the models.
        seeds: Of data, initialisation and order.
        device: Where to train.
        epochs: At most so many; by default the paper's.
        max_seconds: End a configuration after this time with what it has.
        trees_per_batch: Make batches of so many trees with all of their queries, which repeats far less work than the
            paper's single samples.
        rate: Initial learning rate; by default the paper's.
        patience: Epochs without progress before the rate is halved; by default the paper's.
        anneal: Let the rate fall along half a cosine to 0 over the epochs instead, and stop at 100 % alone.
        soap: Let the matrices of the layers follow SOAP and not Adam; see :mod:`nsr.training.soap`.
    """
    if anneal and patience is not None:
        raise ValueError("The rate falls at plateaus (patience) or over the epochs (anneal): give one of the two.")
    if rate is not None and not rate > 0:
        raise ValueError(f"--rate {rate:g}: a learning rate is above 0.")
    rule = replace(training.RULE, rate=rate or training.RULE.rate, patience=patience or training.RULE.patience)
    if anneal:
        over = epochs or training.EPOCHS
        rule = replace(rule, anneal_over=over, stop_after=over)
    return [
        _configuration(
            depth, backbone, variant, seeds, device, epochs or training.EPOCHS, max_seconds, trees_per_batch, rule, soap
        )
        for depth in depths
        for backbone in backbones
        for variant in variants
    ]


def _configuration(
    depth: int,
    backbone: Backbone,
    variant: Variant,
    seeds: Sequence[int],
    device: torch.device,
    epochs: int,
    max_seconds: float | None,
    trees_per_batch: int | None,
    rule: PlateauRule,
    soap: bool,
) -> Configuration:
    leaves = 2**depth

    def train(cells: Sequence[Cell], place: Place) -> Run[Trained]:
        tasks = [tree_task(depth, cell["seed"]) for cell in cells]
        models = [
            graph_model(
                backbone,
                variant,
                lambda width: nn.Linear(2 * (leaves + 1), width),
                seed=cell["seed"],
                width=WIDTH,
                outputs=leaves,
                layers=depth + 1,
                readout="root",
            )
            for cell in cells
        ]
        params = parameter_count(models[0])
        outcome = yield from tree_run(
            models,
            tasks,
            epochs=epochs,
            rule=rule,
            trees_per_batch=trees_per_batch,
            soap=soap,
            device=device,
            max_seconds=max_seconds,
            watch=place.watch,
            save_to=place.save_to,
            configuration=place.configuration,
        )
        metrics = []
        for r in range(len(cells)):
            found: Metrics = {
                "train_accuracy": outcome.train_accuracy[r],
                "train_accuracy_at_best": outcome.train_accuracy_at_best[r],
                "test_accuracy": outcome.test_accuracy[r],
                "best_epoch": outcome.best_epoch[r],
                "epochs": outcome.epochs,
                "params": params,
            }
            if outcome.fresh_accuracy is not None:
                found["fresh_accuracy"] = outcome.fresh_accuracy[r]
            metrics.append(found)
        return Trained(metrics, outcome.seconds, outcome.stopped)

    config = {
        "samples": permutation_count(depth) * leaves,
        "width": WIDTH,
        "layers": depth + 1,
        "batch": trees_per_batch * leaves if trees_per_batch else training.BATCH[depth],
        "trees_per_batch": trees_per_batch,
        "epochs": epochs,
        "max_seconds": max_seconds,
        "rule": rule.described(),
        "matmul": torch.get_float32_matmul_precision(),
    }
    if soap:  # alone where it is, so that records from before it stay what they were
        config["optimizer"] = "soap"
    cells = [{"depth": depth, "backbone": backbone, "variant": variant, "seed": seed} for seed in seeds]
    command = (
        f"nsr run tree --depth {depth} --backbone {backbone} --variant {variant} --seed {','.join(map(str, seeds))}"
    )
    if trees_per_batch:
        command += f" --trees-per-batch {trees_per_batch}"
    if rule.rate != training.RULE.rate:
        command += f" --rate {rule.rate:g}"
    if rule.patience != training.RULE.patience:
        command += f" --patience {rule.patience}"
    if epochs != training.EPOCHS:
        command += f" --epochs {epochs}"
    if rule.anneal_over is not None:
        command += " --anneal"
    if soap:
        command += " --soap"
    if max_seconds is not None:
        command += f" --minutes {max_seconds / 60:g}"
    return Configuration("tree", cells, config, command, train, limit=("max_seconds",))
