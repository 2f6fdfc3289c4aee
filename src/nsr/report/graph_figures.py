"""The paper's figures on graph aggregation: tree accuracy by depth, accuracy and gain by diagnostic score."""

from collections import defaultdict
from typing import NamedTuple

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.chart import Axis, Chart
from nsr.report.figure import Figure, Key, Panel
from nsr.report.graph_tables import DEPTHS
from nsr.report.names import BACKBONES, name
from nsr.report.statistics import mean, sample_std
from nsr.report.table import STOPPED, measured

SERIES = {backbone: i for i, backbone in enumerate(BACKBONES)}
BACKBONE_KEYS = tuple(Key(name(backbone), series) for backbone, series in SERIES.items())
TREE_KEYS = (
    Key("with runs that a time limit stopped", 5, "bound"),
    Key("published by Alon and Yahav (2021)", 5, "ring"),
)
VARIANT_KEYS = (Key("original", 5, "dash"), Key("with NSR", 5, "line"))


def graph_figures(book: Book) -> list[Figure]:
    """All figures on graphs, in the paper's order."""
    return [_tree(book), *_diagnostic(book)]


def _tree(book: Book) -> Figure:
    panels, total = [], 0
    for heading, metric in (("Training accuracy", "train_accuracy"), ("Fresh permutations", "fresh_accuracy")):
        chart = Chart(
            f"{heading} by tree depth",
            Axis(2, 8, "tree depth", tuple(DEPTHS)),
            Axis(0, 102, "per cent", (0, 25, 50, 75, 100)),
        )
        if metric == "train_accuracy":
            for backbone in ("gcn", "gin"):
                known = [row for row in paper.rows("alon2021bottleneck") if row["backbone"] == backbone]
                for row in known:
                    note = f"{name(backbone)} of Alon and Yahav, depth {row['depth']}: {100 * row[metric]:.0f} %"
                    chart.dot((row["depth"], 100 * row[metric]), SERIES[backbone], note, "ring")
        for backbone, series in SERIES.items():
            for variant in ("original", "nsr"):
                cells = {
                    depth: measured(
                        book, "", "tree", {"depth": depth, "backbone": backbone, "variant": variant}, metric, scale=100
                    )
                    for depth in DEPTHS
                }
                points = [(float(depth), cell.value) for depth, cell in cells.items() if cell.value is not None]
                chart.line(points, series, "dash" if variant == "original" else "")
                for depth, cell in cells.items():
                    if cell.value is not None:
                        total += cell.count if metric == "train_accuracy" else 0
                        note = f"{name(backbone)} {name(variant)}, depth {depth}: {cell.value:.1f} %, n = {cell.count}"
                        mark = chart.bound if STOPPED in cell.note else chart.dot
                        mark((depth, cell.value), series, f"{note}; {cell.note}" if cell.note else note)
        panels.append(Panel(heading, chart.svg()))
    return Figure(
        "fig:tree-depth",
        "Tree-NeighborsMatch: who can fit it as trees grow deeper",
        tuple(panels),
        (*BACKBONE_KEYS, *VARIANT_KEYS, *TREE_KEYS),
        "Each training-accuracy point is the best epoch of a run, averaged over seeds. Every permutation of the "
        "benchmark's test set also occurs in training; fresh permutations do not.",
        total,
        "nsr run tree",
    )


def _diagnostic(book: Book) -> list[Figure]:
    """Accuracy and gain by decile of the label-based null-space score, one panel a data set and backbone.

    A run is one variant on one split; ``accuracy_by_bin`` is null where a bin is empty.
    """
    found: dict[tuple[str, str], dict[str, dict[str, Accuracies]]] = defaultdict(lambda: {"original": {}, "nsr": {}})
    for run in book.experiment("diagnostic"):
        bins, variant = run.metrics.get("accuracy_by_bin"), run.cell.get("variant")
        if isinstance(bins, list) and variant in ("original", "nsr"):
            found[str(run.cell.get("dataset")), str(run.cell.get("backbone"))][variant][run.replicate] = bins
    accuracy, gains, total = [], [], 0
    for (dataset, backbone), splits in sorted(found.items()):
        series = SERIES.get(backbone, 4)
        heading = f"{name(dataset)}, {name(backbone)}"
        original, nsr = (_curve(list(splits[variant].values())) for variant in ("original", "nsr"))
        common = [split for split in splits["original"] if split in splits["nsr"]]
        gain = _curve([_difference(splits["original"][split], splits["nsr"][split]) for split in common])
        if not gain:
            continue
        total += sum(map(len, splits.values()))
        chart = Chart(f"Accuracy by score decile, {heading}", *_axes(original + nsr, "per cent correct"))
        _draw(chart, original, series, "dash")
        _draw(chart, nsr, series, "")
        accuracy.append(Panel(heading, chart.svg()))
        zero = Bin(gain[0].place, 0.0, 0.0, 0)
        chart = Chart(f"Gain by score decile, {heading}", *_axes([*gain, zero], "points gained"))
        chart.rule((chart.x.low, 0), (chart.x.high, 0), "zero")
        _draw(chart, gain, series, "")
        gains.append(Panel(heading, chart.svg()))
    remark = (
        "Test nodes of each split in ten bins of about equal size, by how much of their neighbours' labels lies in the "
        "null space of the aggregation. Lines are means over splits, bands one sample standard deviation."
    )
    command = "nsr run diagnostic"
    keys = (*BACKBONE_KEYS, *VARIANT_KEYS)
    return [
        Figure("fig:trnsil-accuracy", "Accuracy by diagnostic score", tuple(accuracy), keys, remark, total, command),
        Figure(
            "fig:trnsil-gain", "Gain of NSR by diagnostic score", tuple(gains), BACKBONE_KEYS, remark, total, command
        ),
    ]


Accuracies = list[float | None]  # by bin


class Bin(NamedTuple):
    """One decile over the splits in which it is not empty, in per cent."""

    place: int
    mean: float
    spread: float
    splits: int


def _difference(before: Accuracies, after: Accuracies) -> Accuracies:
    return [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]


def _curve(splits: list[Accuracies]) -> list[Bin]:
    bins = []
    for i in range(max(map(len, splits), default=0)):
        values = [100 * value for split in splits if i < len(split) and (value := split[i]) is not None]
        if values:
            bins.append(Bin(i + 1, mean(values), sample_std(values) or 0.0, len(values)))
    return bins


def _axes(bins: list[Bin], title: str) -> tuple[Axis, Axis]:
    low, high = min(bin.mean - bin.spread for bin in bins), max(bin.mean + bin.spread for bin in bins)
    margin = 0.06 * (high - low) or 1.0
    places = sorted({bin.place for bin in bins})
    ends = (places[0], places[-1]) if len(places) > 1 else (places[0] - 1, places[0] + 1)
    return Axis(*ends, "decile of the score", tuple(places)), Axis(low - margin, high + margin, title)


def _draw(chart: Chart, bins: list[Bin], series: int, kind: str) -> None:
    if len(bins) > 1 and any(bin.spread for bin in bins):
        lower = [(float(bin.place), bin.mean - bin.spread) for bin in bins]
        chart.band(lower, [(float(bin.place), bin.mean + bin.spread) for bin in bins], series)
    chart.line([(float(bin.place), bin.mean) for bin in bins], series, kind)
    for bin in bins:
        chart.dot((bin.place, bin.mean), series, f"decile {bin.place}: {bin.mean:.1f}, n = {bin.splits}")
