"""Benchmarks: one chart a case with the limit drawn in, and all numbers as tables.

A benchmark's metrics are ``{case: {arm: {"milliseconds": {"median", "low", "high"}, ...}}}``, every arm of a case
measured interleaved in one process. The arm that drops tokens for free is no peer but the limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nsr.report.book import Book
from nsr.report.chart import Axis, Chart
from nsr.report.figure import Figure, Key, Panel
from nsr.report.names import name
from nsr.report.read import Run
from nsr.report.table import Cell, Row, Table, measured

LIMIT = "free drop"
RATE = "images_per_second"
OURS = "NSR"  # arms that have it in their name are what the benchmark is about


@dataclass(frozen=True)
class Case:
    """One setting of one benchmark run, with its arms."""

    run: Run
    title: str
    arms: dict[str, dict[str, Any]]

    @property
    def limit(self) -> dict[str, Any] | None:
        """The arm that cannot be beaten, where there is one."""
        return next((arm for title, arm in self.arms.items() if title.startswith(LIMIT)), None)


def cases(book: Book) -> Iterator[Case]:
    """Every case of every benchmark that has been run, on every machine."""
    for run in book.experiment("bench"):
        for title, arms in run.metrics.items():
            if isinstance(arms, dict):
                timed = {arm: entry for arm, entry in arms.items() if _median(entry) is not None}
                if timed:
                    yield Case(run, title, timed)


def _median(entry: Any) -> float | None:
    times = entry.get("milliseconds") if isinstance(entry, dict) else None
    median = times.get("median") if isinstance(times, dict) else None
    return median if isinstance(median, int | float) and median > 0 else None


def bench_figures(book: Book) -> list[Figure]:
    """Quality against measured speed, then one figure a benchmark."""
    figures = [_quality_by_speed(book)]
    found = list(cases(book))
    kinds = list(dict.fromkeys(str(case.run.cell.get("bench")) for case in found)) or ["tokens"]
    for kind in kinds:
        own = [case for case in found if str(case.run.cell.get("bench")) == kind]
        rated = any(RATE in arm for case in own for arm in case.arms.values())
        keys = [Key("with NSR", 1, "bar"), Key("without", 0, "bar")]
        keys += [Key("limit: tokens dropped for free", 5, "limit")] if any(case.limit for case in own) else []
        figures.append(
            Figure(
                f"ours:bench-{kind}",
                f"Benchmark: {kind}",
                tuple(Panel(f"{case.title}, {_machine(case.run)}", _bars(case)) for case in own),
                tuple(keys),
                f"{'Images a second, longer is better' if rated else 'Milliseconds a step, shorter is better'}. "
                "Median over interleaved rounds in one process; whiskers are the quartiles.",
                len({case.run.path for case in own}),
                f"nsr bench {kind}",
                ours=True,
            )
        )
    return figures


def _machine(run: Run) -> str:
    return str(run.cell.get("machine") or run.environment.get("device") or "unknown machine")


def _speed(arm: dict[str, Any], quartile: str = "median") -> float:
    """Images a second where that is measured, else milliseconds."""
    times = arm["milliseconds"]
    if RATE in arm:
        return arm[RATE] * times["median"] / times[quartile]
    return times[quartile]


def _bars(case: Case) -> str:
    peers = {title: arm for title, arm in case.arms.items() if not title.startswith(LIMIT)}
    speeds = {title: _speed(arm) for title, arm in peers.items()}
    limit = _speed(case.limit) if case.limit else None
    top = 1.08 * max([*speeds.values(), limit or 0.0])
    rows = len(peers)
    places = tuple(float(rows - i) for i in range(rows))
    unit = "images a second" if any(RATE in arm for arm in peers.values()) else "milliseconds"
    chart = Chart(
        f"{case.title}, {_machine(case.run)}",
        Axis(0, top, unit),
        Axis(0.4, rows + 0.6, "", places, names=tuple(map(_short, peers))),
        height=66 + 24 * rows,
        left=140,
    )
    for place, (title, arm) in zip(places, peers.items(), strict=True):
        speed = speeds[title]
        note = f"{title}: {speed:,.4g} {unit}"
        chart.bar((0, place), (speed, place), 12, 1 if OURS in title else 0, note)
        if {"low", "high"} <= arm["milliseconds"].keys():
            chart.rule((min(_speed(arm, "low"), top), place), (min(_speed(arm, "high"), top), place), "whisker")
    if limit is not None:
        chart.rule((limit, 0.4), (limit, rows + 0.6))
    return chart.svg()


def _short(title: str) -> str:
    return title.replace("compiled and captured", "captured")


def _quality_by_speed(book: Book) -> Figure:
    """mIoU on VOC against measured images a second: the full model, the merged one, and the one with NSR."""
    models = {
        "full": ("none", "1.0x", "original"),
        "merged": ("tome", "3.4x", "original"),
        "merged + NSR": ("tome", "3.4x", "nsr"),
    }
    panels, total = [], 0
    for case in cases(book):
        if case.run.cell.get("bench") != "tokens" or not case.title.startswith("224x224"):
            continue
        points = []
        for title, cell in models.items():
            quality = measured(
                book, "", "voc", dict(zip(("merger", "point", "variant"), cell, strict=True)), "miou", scale=100
            )
            own = [arm for arm_title, arm in case.arms.items() if arm_title.split(",")[0] == title]
            rates = [arm[RATE] for arm in own if RATE in arm]
            if quality.value is not None and rates:
                points.append((title, max(rates), quality))
                total += quality.count
        if len(points) < 2:
            continue
        chart = Chart(
            f"mIoU by images a second, {case.title}",
            Axis(0, 1.2 * max(rate for _, rate, _ in points), "images a second"),
            Axis(0, 70, "mIoU on VOC, per cent"),
        )
        for title, rate, quality in points:
            assert quality.value is not None
            note = f"{title}: {quality.value:.2f} at {rate:,.0f} images a second, n = {quality.count}"
            chart.dot((rate, quality.value), 1 if OURS in title else 0 if title == "merged" else 5, note, radius=5)
            chart.say((rate, quality.value), title, "middle", (0, -10))
        panels.append(Panel(f"{case.title}, {_machine(case.run)}", chart.svg()))
    return Figure(
        "ours:miou-speed",
        "mIoU against measured speed",
        tuple(panels),
        (),
        f"{name('tome')} at 3.4×; each model at the fastest way of running it that was measured.",
        total,
        "nsr bench tokens",
        ours=True,
    )


def bench_tables(book: Book) -> list[Table]:
    """Every number of every benchmark, one table a benchmark."""
    found = list(cases(book))
    tables = []
    for kind in dict.fromkeys(str(case.run.cell.get("bench")) for case in found):
        rows = [
            Row((_machine(case.run), case.title, title), _numbers(case, arm))
            for case in found
            if str(case.run.cell.get("bench")) == kind
            for title, arm in case.arms.items()
        ]
        columns = ("Median, ms", "Quartiles, ms", "Images a second", "Relative speed", "Peak memory, MiB")
        used = [i for i in range(len(columns)) if any(row.cells[i] != Cell() for row in rows)]
        tables.append(
            Table(
                f"ours:bench-{kind}",
                f"Benchmark: {kind}, the numbers",
                ("Machine", "Case", "Arm"),
                tuple(columns[i] for i in used),
                tuple(Row(row.names, tuple(row.cells[i] for i in used)) for row in rows),
                ours=True,
            )
        )
    return tables


def _numbers(case: Case, arm: dict[str, Any]) -> tuple[Cell, ...]:
    times, runs = arm["milliseconds"], (case.run,)

    def cell(value: Any, style: str) -> Cell:
        known = isinstance(value, int | float)
        return Cell(float(value), runs=runs, style=style, count=1) if known else Cell()

    quartiles = Cell()
    if {"low", "high"} <= times.keys():
        quartiles = Cell(text=f"{times['low']:.4g} – {times['high']:.4g}", runs=runs, count=1)
    memory = arm.get("peak_bytes")
    return (
        cell(times["median"], ".4g"),
        quartiles,
        cell(arm.get(RATE), ",.0f"),
        cell(arm.get("speed_up"), ".2f"),
        cell(memory / 2**20 if isinstance(memory, int | float) else None, ",.0f"),
    )
