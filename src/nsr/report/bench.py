"""Benchmarks: one chart a case with the limit drawn in, growth with size, and all numbers as tables.

A benchmark's metrics are ``{case: {arm: {"milliseconds": {"median", "low", "high"}, ...}}}``, every arm of a case
measured in turns, in one run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nsr.report.book import Book
from nsr.report.chart import Axis, Chart, number
from nsr.report.figure import Figure, Key, Panel
from nsr.report.read import Run
from nsr.report.table import Cell, Row, Table, measured

RATE = "images_per_second"
SCALE = "scale"  # the benchmark whose cases are sizes
# What nobody can beat, by benchmark: how the arm's name begins, and what the line is called.
LIMITS = {
    "tokens": ("free drop", "limit: tokens dropped for free"),
    "train": ("free drop", "limit: tokens dropped for free"),
    "graph": ("GCN, compiled", "limit: no branch at all, the plain GCN compiled"),
}


@dataclass(frozen=True)
class Case:
    """One setting of one benchmark run, with its arms."""

    run: Run
    title: str
    arms: dict[str, dict[str, Any]]

    @property
    def kind(self) -> str:
        """Which benchmark."""
        return str(self.run.cell.get("bench"))

    @property
    def machine(self) -> str:
        """Where it ran."""
        return str(self.run.cell.get("machine") or self.run.environment.get("device") or "unknown machine")

    @property
    def limit(self) -> dict[str, Any] | None:
        """The arm that cannot be beaten, where there is one; of several, the fastest."""
        begin = LIMITS.get(self.kind, ("", ""))[0]
        limits = [arm for title, arm in self.arms.items() if begin and title.startswith(begin)]
        return min(limits, key=lambda arm: arm["milliseconds"]["median"], default=None)


def cases(book: Book) -> Iterator[Case]:
    """Every case of every benchmark that has been run, on every machine."""
    for run in book.experiment("bench"):
        for title, arms in run.metrics.items():
            if isinstance(arms, dict):
                timed = {arm: entry for arm, entry in arms.items() if _is_timed(entry)}
                if timed:
                    yield Case(run, title, timed)


def _is_timed(entry: Any) -> bool:
    times = entry.get("milliseconds") if isinstance(entry, dict) else None
    quartiles = [times.get(key) for key in ("median", "low", "high")] if isinstance(times, dict) else [None]
    return all(isinstance(time, int | float) and time > 0 for time in quartiles)


def is_ours(title: str) -> bool:
    """Whether an arm is the library's branch, rather than a peer or the branch as the paper words it."""
    return "NSR" in title and "as worded" not in title


def bench_figures(book: Book) -> list[Figure]:
    """Quality against measured speed, then one figure a benchmark."""
    found = list(cases(book))
    kinds = list(dict.fromkeys(case.kind for case in found)) or ["tokens", "graph"]
    return [_quality_by_speed(book, found), *(_figure(kind, [c for c in found if c.kind == kind]) for kind in kinds)]


def _figure(kind: str, own: list[Case]) -> Figure:
    rated = any(RATE in arm for case in own for arm in case.arms.values())
    if kind == SCALE:
        panels, keys, what = _growth(own)
    else:
        panels = tuple(Panel(f"{case.title}, {case.machine}", _bars(case)) for case in own)
        keys = (Key("NSR of this library", 1, "bar"), Key("peers", 0, "bar"))
        keys += (Key(LIMITS[kind][1], 5, "limit"),) if any(case.limit for case in own) else ()
        what = "Images a second, longer is better" if rated else "Milliseconds a step, shorter is better"
    return Figure(
        f"ours:bench-{kind}",
        f"Benchmark: {kind}",
        panels,
        keys,
        f"{what}. Medians over rounds in which the arms take turns, all in one run.",
        len({case.run.path for case in own}),
        f"nsr bench {kind}",
        ours=True,
    )


def _speed(arm: dict[str, Any]) -> float:
    """Images a second where that is measured, else milliseconds."""
    return arm.get(RATE) or arm["milliseconds"]["median"]


def _bars(case: Case) -> str:
    peers = {title: arm for title, arm in case.arms.items() if not title.startswith("free drop")}
    limit = _speed(case.limit) if case.limit else None
    top = 1.22 * max([_speed(arm) for arm in peers.values()] + [limit or 0.0])
    rows = len(peers)
    places = tuple(float(rows - i) for i in range(rows))
    unit = "images a second" if any(RATE in arm for arm in peers.values()) else "milliseconds"
    names = tuple(title.replace("compiled and captured", "comp. + captured") for title in peers)
    chart = Chart(
        f"{case.title}, {case.machine}",
        Axis(0, top, unit),
        Axis(0.4, rows + 0.6, "", places, names=names),
        height=56 + 21 * rows,
        left=min(190, 12 + round(6.1 * max(map(len, names)))),
    )
    if limit is not None:  # first: figures are written over it
        chart.rule((limit, 0.4), (limit, rows + 0.6))
    for place, (title, arm) in zip(places, peers.items(), strict=True):
        speed, times = _speed(arm), arm["milliseconds"]
        note = f"{title}: {speed:,.4g} {unit}, quartiles {times['low']:.4g} to {times['high']:.4g} ms"
        chart.bar((0, place), (speed, place), 11, 1 if is_ours(title) else 0, note)
        chart.say((speed, place), f"{speed:,.0f}" if speed >= 1000 else f"{speed:.3g}", shift=(4, 3.5))
    return chart.svg()


def _growth(own: list[Case]) -> tuple[tuple[Panel, ...], tuple[Key, ...], str]:
    """Milliseconds by members, both logarithmic, one panel a machine."""
    series = {arm: i for i, arm in enumerate(dict.fromkeys(title for case in own for title in case.arms))}
    panels = []
    for machine in dict.fromkeys(case.machine for case in own):
        here = {_members(case.title): case.arms for case in own if case.machine == machine and _members(case.title)}
        times = [arm["milliseconds"]["median"] for arms in here.values() for arm in arms.values()]
        if len(here) < 2:
            continue
        chart = Chart(
            f"Step time by members, {machine}",
            Axis(min(here), max(here), "members", logarithmic=True),
            Axis(min(times) / 1.5, 1.5 * max(times), "milliseconds a step", logarithmic=True),
        )
        for title, i in series.items():
            points = [
                (float(size), arms[title]["milliseconds"]["median"]) for size, arms in here.items() if title in arms
            ]
            chart.line(points, i % 6, "" if is_ours(title) else "dash")
            for size, time in points:
                chart.dot((size, time), i % 6, f"{title}, {size:,.0f} members: {time:.4g} ms")
        panels.append(Panel(machine, chart.svg()))
    keys = tuple(Key(title, i % 6, "line" if is_ours(title) else "dash") for title, i in series.items())
    return tuple(panels), keys, "Time of a training step by the number of members; slope one is linear growth"


def _members(title: str) -> int:
    digits = title.split(" ")[0].replace(",", "")
    return int(digits) if digits.isdecimal() else 0


def _quality_by_speed(book: Book, found: list[Case]) -> Figure:
    """mIoU on VOC against measured images a second: the full model, the merged one, and the one with NSR."""
    models = {
        "full": {"merger": "none", "point": "1.0x", "variant": "original"},
        "merged": {"merger": "tome", "point": "3.4x", "variant": "original"},
        "merged + NSR": {"merger": "tome", "point": "3.4x", "variant": "nsr"},
    }
    quality = {title: measured(book, "", "voc", where, "miou", scale=100) for title, where in models.items()}
    panels = []
    for case in found:
        if case.kind != "tokens" or not case.title.startswith("224x224"):
            continue
        rates = {
            title: max((_speed(arm) for name, arm in case.arms.items() if name.split(",")[0] == title), default=0.0)
            for title in models
        }
        shown = [title for title in models if rates[title] and quality[title].value is not None]
        if len(shown) < 2:
            continue
        chart = Chart(
            f"mIoU by images a second, {case.title}",
            Axis(0, 1.25 * max(rates.values()), "images a second"),
            Axis(0, 75, "mIoU on VOC, per cent"),
        )
        for title in shown:
            cell, series = quality[title], 1 if is_ours(title) else 0 if title == "merged" else 5
            at = (rates[title], cell.value or 0.0)
            note = f"{title}: {cell.value:.2f} at {number(round(rates[title]))} images a second, n = {cell.count}"
            chart.dot(at, series, note, radius=5)
            chart.say(at, title, "middle", (0, -10))
        panels.append(Panel(f"{case.title}, {case.machine}", chart.svg()))
    return Figure(
        "ours:miou-speed",
        "mIoU against measured speed",
        tuple(panels),
        (),
        "ToMe at 3.4×; each model at the fastest way of running it that was measured.",
        sum(cell.count for cell in quality.values()) if panels else 0,
        "nsr bench tokens",
        ours=True,
    )


COLUMNS = {
    "Median, ms": ".4g",
    "Quartiles, ms": "",
    "Images a second": ",.0f",
    "Relative speed": ".2f",
    "ns a member": ".3g",
    "Peak memory, MiB": ",.0f",
}


def bench_tables(book: Book) -> list[Table]:
    """Every number of every benchmark, one table a benchmark."""
    found = list(cases(book))
    tables = []
    for kind in dict.fromkeys(case.kind for case in found):
        own = [case for case in found if case.kind == kind]
        rows = [
            Row((case.machine, case.title, title), _numbers(case, arm))
            for case in own
            for title, arm in case.arms.items()
        ]
        used = [i for i in range(len(COLUMNS)) if any(row.cells[i] != Cell() for row in rows)]
        tables.append(
            Table(
                f"ours:bench-{kind}",
                f"Benchmark: {kind}, the numbers",
                ("Machine", "Case", "Arm"),
                tuple(list(COLUMNS)[i] for i in used),
                tuple(Row(row.names, tuple(row.cells[i] for i in used)) for row in rows),
                ours=True,
            )
        )
    return tables


def _numbers(case: Case, arm: dict[str, Any]) -> tuple[Cell, ...]:
    times, memory = arm["milliseconds"], arm.get("peak_bytes")
    values = {
        "Median, ms": times["median"],
        "Quartiles, ms": f"{times['low']:.4g} – {times['high']:.4g}",
        "Images a second": arm.get(RATE),
        "Relative speed": arm.get("speed_up"),
        "ns a member": arm.get("nanoseconds_per_member"),
        "Peak memory, MiB": memory / 2**20 if isinstance(memory, int | float) else None,
    }
    runs, cells = (case.run,), []
    for title, style in COLUMNS.items():
        value = values[title]
        if isinstance(value, str):
            cells.append(Cell(text=value, runs=runs, count=1))
        else:
            known = isinstance(value, int | float)
            cells.append(Cell(float(value or 0), runs=runs, style=style, count=1) if known else Cell())
    return tuple(cells)
