"""The paper's figures on graph aggregation: tree accuracy by depth, accuracy and gain by diagnostic score."""

from collections import defaultdict
from typing import Any

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.chart import Axis, Chart, Point
from nsr.report.figure import Figure, Key, Panel
from nsr.report.graph_tables import DEPTHS
from nsr.report.names import BACKBONES, name
from nsr.report.read import Run
from nsr.report.statistics import mean, sample_std
from nsr.report.table import measured

SERIES = {backbone: i for i, backbone in enumerate(BACKBONES)}
BACKBONE_KEYS = tuple(Key(name(backbone), series) for backbone, series in SERIES.items())
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
                        chart.dot((depth, cell.value), series, note)
        panels.append(Panel(heading, chart.svg()))
    return Figure(
        "fig:tree-depth",
        "Tree-NeighborsMatch: who can fit it as trees grow deeper",
        tuple(panels),
        (*BACKBONE_KEYS, *VARIANT_KEYS, Key("published by Alon and Yahav (2021)", 5, "ring")),
        "Each training-accuracy point is the best epoch of a run, averaged over seeds. Every permutation of the "
        "benchmark's test set also occurs in training; fresh permutations do not.",
        total,
        "nsr run tree",
    )


def _diagnostic(book: Book) -> list[Figure]:
    """Accuracy and gain by decile of the label-based null-space score, one panel a data set and backbone."""
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in book.experiment("diagnostic"):
        if "accuracy_by_bin" in run.metrics:
            runs[str(run.cell.get("dataset")), str(run.cell.get("backbone"))].append(run)
    accuracy, gains = [], []
    for (dataset, backbone), found in sorted(runs.items()):
        series = SERIES.get(backbone, 4)
        heading = f"{name(dataset)}, {name(backbone)}"
        by_variant = {variant: _curves(found, variant) for variant in ("original", "nsr")}
        chart = Chart(
            f"Accuracy by score decile, {heading}", *_axes([c for v in by_variant.values() for c in v.values()])
        )
        for variant, curves in by_variant.items():
            _draw(chart, list(curves.values()), series, "dash" if variant == "original" else "", band=True)
        accuracy.append(Panel(heading, chart.svg()))
        splits = by_variant["original"].keys() & by_variant["nsr"].keys()
        differences = [
            [b - a for a, b in zip(by_variant["original"][s], by_variant["nsr"][s], strict=True)]
            for s in sorted(splits)
        ]
        if differences:
            chart = Chart(f"Gain by score decile, {heading}", *_axes(differences, "points gained", with_zero=True))
            chart.rule((1, 0), (10, 0), "zero")
            _draw(chart, differences, series, "", band=True)
            gains.append(Panel(heading, chart.svg()))
    total = sum(map(len, runs.values()))
    remark = (
        "Test nodes of each split in ten bins of about equal size, by how much of their neighbours' labels lies in the "
        "null space of the aggregation. Lines are means over splits, bands one sample standard deviation."
    )
    return [
        Figure(
            "fig:trnsil-accuracy", "Accuracy by diagnostic score", tuple(accuracy), (*BACKBONE_KEYS, *VARIANT_KEYS),
            remark, total, "nsr run diagnostic",
        ),
        Figure(
            "fig:trnsil-gain", "Gain of NSR by diagnostic score", tuple(gains), BACKBONE_KEYS,
            remark, total, "nsr run diagnostic",
        ),
    ]  # fmt: skip


def _curves(runs: list[Run], variant: str) -> dict[str, list[float]]:
    """Per cent correct in each bin, by split."""
    return {
        run.replicate: [100 * value for value in run.metrics["accuracy_by_bin"]]
        for run in runs
        if run.cell.get("variant") == variant
    }


def _axes(curves: list[list[float]], title: str = "per cent correct", with_zero: bool = False) -> tuple[Axis, Axis]:
    spread: list[Any] = [value for curve in curves for value in curve]
    low, high = min(spread), max(spread)
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) or 1.0
    return Axis(1, 10, "decile of the score", tuple(range(1, 11))), Axis(low - margin, high + margin, title)


def _draw(chart: Chart, curves: list[list[float]], series: int, kind: str, band: bool) -> None:
    if not curves:
        return
    centre: list[Point] = []
    lower: list[Point] = []
    upper: list[Point] = []
    for i, values in enumerate(zip(*curves, strict=True)):
        middle, spread = mean(values), sample_std(values) or 0.0
        centre.append((i + 1, middle))
        lower.append((i + 1, max(middle - spread, chart.y.low)))
        upper.append((i + 1, min(middle + spread, chart.y.high)))
    if band and len(curves) > 1:
        chart.band(lower, upper, series)
    chart.line(centre, series, kind)
    for x, y in centre:
        chart.dot((x, y), series, f"decile {x:g}: {y:.1f}, n = {len(curves)}")
