"""What merging costs and what NSR gives back, drawn: mIoU by GFLOPs, the Pareto front, gap closure."""

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.chart import Axis, Chart, Point
from nsr.report.figure import Figure, Key, Panel
from nsr.report.names import SEGMENTATION, name
from nsr.report.table import Cell, measured
from nsr.report.token_tables import gap_closure

MERGERS = {"tome": 0, "pitome": 1, "mpm": 2, "algm": 3, "dtem": 4}
MERGER_KEYS = tuple(Key(name(merger), series) for merger, series in list(MERGERS.items())[:3])
VARIANT_KEYS = (Key("original", 5, "dash"), Key("with NSR", 5, "line"), Key("the paper", 5, "ring"))
TABLE = "tab:token-main"


def token_figures(book: Book) -> list[Figure]:
    """Quality by cost, the Pareto front, gap closure."""
    return [_quality_by_cost(book), _pareto(book), _gap_closure(book)]


def operating_points(experiment: str, merger: str) -> list[str]:
    """The labels of a merger's operating points in the paper."""
    rows = [row for row in paper.rows(TABLE) if row["experiment"] == experiment and row["merger"] == merger]
    return list(dict.fromkeys(row["point"] for row in rows))


def _miou_and_cost(book: Book, experiment: str, merger: str, point: str, variant: str) -> tuple[Cell, Cell]:
    where = {"merger": merger, "point": point, "variant": variant}
    return (
        measured(book, TABLE, experiment, where, "miou", scale=100),
        measured(book, TABLE, experiment, where, "gflops_paper"),
    )


def _cost_axis(experiment: str) -> Axis:
    costs = [row["gflops_paper"] for row in paper.rows(TABLE) if row["experiment"] == experiment]
    return Axis(min(costs) / 1.08, max(costs) * 1.05, "GFLOPs, logarithmic", logarithmic=True)


def _quality_axis(experiment: str) -> Axis:
    scores = [row["miou"] for row in paper.rows(TABLE) if row["experiment"] == experiment]
    low = 10 * (min(scores) // 10)
    return Axis(low, 10 * (max(scores) // 10 + 1), "mIoU, per cent")


def _quality_by_cost(book: Book) -> Figure:
    panels, total = [], 0
    for experiment in SEGMENTATION:
        chart = Chart(f"mIoU by GFLOPs, {name(experiment)}", _cost_axis(experiment), _quality_axis(experiment))
        full, cost = _miou_and_cost(book, experiment, "none", "1.0x", "original")
        for merger, series in list(MERGERS.items())[:3]:
            for variant in ("original", "nsr"):
                ours: list[Point] = []
                theirs: list[Point] = []
                for point in operating_points(experiment, merger):
                    miou, gflops = _miou_and_cost(book, experiment, merger, point, variant)
                    what = f"{name(merger)} {name(point)} {name(variant)}"
                    if miou.paper is not None and gflops.paper is not None:
                        theirs.append((gflops.paper, miou.paper))
                        note = f"paper, {what}: {miou.paper:.2f} at {gflops.paper:.3f} GFLOPs"
                        chart.dot(
                            (gflops.paper, miou.paper), series, note, "ring" if variant == "nsr" else "ring hollow"
                        )
                    if miou.value is not None and gflops.value is not None:
                        ours.append((gflops.value, miou.value))
                        total += miou.count
                        note = f"{what}: {miou.value:.2f} at {gflops.value:.3f} GFLOPs, n = {miou.count}"
                        chart.dot((gflops.value, _inside(miou.value, chart.y)), series, note)
                chart.line(theirs, series, "faint dash" if variant == "original" else "faint")
                chart.line([(x, _inside(y, chart.y)) for x, y in ours], series, "dash" if variant == "original" else "")
        if full.paper is not None and cost.paper is not None:
            chart.dot((cost.paper, full.paper), 5, f"paper, Full-ViT: {full.paper:.2f}", "ring", 4)
        if full.value is not None and cost.value is not None:
            total += full.count
            chart.dot((cost.value, full.value), 5, f"Full-ViT: {full.value:.2f}, n = {full.count}", radius=4)
            chart.say((cost.value, full.value), "Full-ViT", "end", (-8, -6))
        panels.append(Panel(name(experiment), chart.svg()))
    return Figure(
        "ours:miou-gflops",
        "mIoU against GFLOPs",
        tuple(panels),
        (*MERGER_KEYS, *VARIANT_KEYS),
        "GFLOPs in the paper's convention. Rings and faint lines are the paper's numbers.",
        total,
        "nsr run voc",
        ours=True,
    )


def _inside(value: float, axis: Axis) -> float:
    """Keep a point on the chart; its note tells the true number."""
    return min(max(value, axis.low), axis.high)


def pareto_front(points: list[Point]) -> list[Point]:
    """The points that no other one beats in both, cheaper first (cost falls left, quality rises up).

    >>> pareto_front([(1.0, 5.0), (2.0, 4.0), (3.0, 6.0)])
    [(1.0, 5.0), (3.0, 6.0)]
    """
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front


def _pareto(book: Book) -> Figure:
    panels, total = [], 0
    for experiment in SEGMENTATION:
        chart = Chart(f"Pareto front, {name(experiment)}", _cost_axis(experiment), _quality_axis(experiment))
        for source in ("paper", "ours"):
            clouds: dict[str, list[Point]] = {"original": [], "nsr": []}
            for merger in MERGERS:
                for point in operating_points(experiment, merger):
                    for variant, cloud in clouds.items():
                        miou, gflops = _miou_and_cost(book, experiment, merger, point, variant)
                        x, y = (gflops.paper, miou.paper) if source == "paper" else (gflops.value, miou.value)
                        if x is not None and y is not None:
                            cloud.append((x, y))
                            total += miou.count if source == "ours" else 0
            for series, (variant, cloud) in enumerate(clouds.items()):
                front = [(x, _inside(y, chart.y)) for x, y in pareto_front(cloud)]
                chart.line(_steps(front, chart.x.high), series, "faint" if source == "paper" else "")
                for x, y in front:
                    note = f"{source}, {name(variant)}: {y:.2f} at {x:.3f} GFLOPs"
                    chart.dot((x, y), series, note, "ring" if source == "paper" else "")
        panels.append(Panel(name(experiment), chart.svg()))
    return Figure(
        "ours:pareto",
        "The best mIoU that a budget buys",
        tuple(panels),
        (Key("any merger, original", 0), Key("any merger with NSR", 1), Key("the paper", 5, "ring")),
        "At each GFLOPs budget the best model of all three mergers that fits into it.",
        total,
        "nsr run voc",
        ours=True,
    )


def _steps(front: list[Point], end: float) -> list[Point]:
    """A front as stairs: quality stays until the next point is affordable."""
    stairs: list[Point] = []
    for i, (x, y) in enumerate(front):
        stairs += [(x, y), (front[i + 1][0] if i + 1 < len(front) else end, y)]
    return stairs


def _gap_closure(book: Book) -> Figure:
    panels, total = [], 0
    for experiment in SEGMENTATION:
        bars = [
            (merger, point, gap_closure(book, experiment, {"merger": merger, "point": point}))
            for merger in list(MERGERS)[:3]
            for point in operating_points(experiment, merger)
        ]
        numbers = [n for *_, cell in bars for n in (cell.value, cell.paper) if n is not None]
        low = min(0.0, *(20 * (n // 20) for n in numbers))
        high = max(100.0, *(20 * (n // 20 + 1) for n in numbers))
        middle = tuple(float(i) for i in range(len(bars)))
        names = tuple(point.removesuffix("x") for _, point, _ in bars)
        chart = Chart(
            f"Gap closure, {name(experiment)}",
            Axis(-0.6, len(bars) - 0.4, "operating point, ×", middle, names=names),
            Axis(low, high, "gap closed, per cent"),
        )
        chart.rule((chart.x.low, 100), (chart.x.high, 100))
        for i, (merger, point, cell) in enumerate(bars):
            what = f"{name(merger)} {name(point)}"
            if cell.paper is not None:
                note = f"paper, {what}: {cell.paper:.1f} %"
                chart.bar((i - 0.2, 0), (i - 0.2, cell.paper), 8, MERGERS[merger], note, "hollow")
            if cell.value is not None:
                total += cell.count
                note = f"{what}: {cell.value:.1f} %, n = {cell.count}"
                chart.bar((i + 0.2, 0), (i + 0.2, cell.value), 8, MERGERS[merger], note)
        chart.rule((chart.x.low, 0), (chart.x.high, 0), "zero")
        panels.append(Panel(name(experiment), chart.svg()))
    return Figure(
        "ours:gap-closure",
        "How much of the loss comes back",
        tuple(panels),
        (
            *(Key(key.text, key.series, "bar") for key in MERGER_KEYS),
            Key("the paper", 5, "hollow"),
            Key("as good as Full-ViT", 5, "limit"),
        ),
        "(NSR − base) / (full − base) in mIoU.",
        total,
        "nsr run voc",
        ours=True,
    )
