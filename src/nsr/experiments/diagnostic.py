"""The label diagnostic as a run: scores by backbone on any graph, and accuracy by score for trained models.

Expected on Roman-empire's topology (four layers, mean over all nodes): GCN 0.71469, GIN 0.71328, GraphSAGE 0.63590.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nsr.data.heterophilous import topology
from nsr.experiments import record
from nsr.experiments.record import Record
from nsr.graph.coefficients import coefficients
from nsr.graph.diagnostic import null_space_scores, score_bins
from nsr.graph.models import Backbone, graph_layer

LAYERS, BINS = 4, 10


def node_scores(backbone: Backbone, edges: np.ndarray, labels: np.ndarray) -> Tensor:
    """The diagnostic score of every node for a backbone of four layers, ``[N]``."""
    edge_index = torch.from_numpy(np.concatenate([edges, edges[:, ::-1]]).T.copy())
    members = coefficients(graph_layer(backbone, 1).conv, torch.zeros(len(labels), 1), edge_index)
    t = members.coefficient.squeeze(1).detach()
    return null_space_scores(members.source, members.target, t, torch.from_numpy(labels), len(labels), LAYERS)


def by_bin(scores: Tensor, correct: Tensor, chosen: Tensor) -> dict[str, list[float | int | None]]:
    """Accuracy, mean score and count in each decile of the chosen nodes' scores; ``None`` in an empty bin.

    Args:
        scores: Of all nodes, ``[N]``.
        correct: Whether the model is right at each node, ``[N]``.
        chosen: The test nodes of a split, ``[N]`` bool.
    """
    bins = score_bins(scores[chosen], BINS)
    inside = [bins == number for number in range(BINS)]

    def mean(values: Tensor) -> list[float | int | None]:
        return [float(values[chosen][b].double().mean()) if bool(b.any()) else None for b in inside]

    return {
        "accuracy_by_bin": mean(correct),
        "score_by_bin": mean(scores),
        "count_by_bin": [int(b.sum()) for b in inside],
    }


def run_scores(
    datasets: Sequence[str],
    backbones: Sequence[Backbone],
    results: Path,
    *,
    folder: Path | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Write the score table of each graph and backbone: mean, deciles, and the share of nodes at 0."""
    config = {"layers": LAYERS, "bins": BINS}
    for dataset in datasets:
        for backbone in backbones:
            cell = {"dataset": dataset, "backbone": backbone, "variant": "scores"}
            if not force and record.exists(results, "diagnostic", cell, config):
                say(f"diagnostic {dataset} {backbone}: there already")
                continue
            begin = time.perf_counter()
            scores = node_scores(backbone, *topology(dataset, folder))
            ranks = torch.arange(BINS + 1, dtype=torch.float64) / BINS
            metrics = {
                "mean_score": float(scores.mean()),
                "deciles": torch.quantile(scores, ranks).tolist(),
                "zero_share": float((scores == 0).double().mean()),
            }
            command = f"nsr run diagnostic --dataset {dataset} --backbone {backbone}"
            seconds = time.perf_counter() - begin
            environment = record.environment(torch.device("cpu"))
            record.write(results, Record("diagnostic", cell, metrics, config, command, seconds, environment))
            say(f"diagnostic {dataset} {backbone}: mean score {metrics['mean_score']:.5f}")


def run_accuracy(
    datasets: Sequence[str],
    backbones: Sequence[Backbone],
    results: Path,
    *,
    say: Callable[[str], None] = print,
) -> None:
    """Collect accuracy by score decile from the results of trained models, original and with NSR."""
    for dataset in datasets:
        for backbone in backbones:
            count = 0
            for path in sorted((results / "heterophily").glob(f"{dataset}-{backbone}-*.json")):
                trained = record.read(path)
                compared = trained.cell["variant"] in ("original", "nsr") and "dropout" not in trained.cell
                if not compared or trained.status != "done":
                    continue
                metrics = {key: trained.metrics[key] for key in ("accuracy_by_bin", "score_by_bin", "count_by_bin")}
                if None in metrics["accuracy_by_bin"]:
                    say(f"diagnostic {path.stem}: equal scores leave a bin empty, so it is left out")
                    continue
                record.write(results, replace(trained, experiment="diagnostic", metrics=metrics))
                count += 1
            found = f"accuracy by score of {count} trained models" if count else "no trained models"
            say(f"diagnostic {dataset} {backbone}: {found}")
