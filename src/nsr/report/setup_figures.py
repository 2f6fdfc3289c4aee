"""The paper's figures on operating points and numerics: how large residuals are, and where tokens merge."""

from nsr.report.book import Book
from nsr.report.chart import Axis, Chart, Point, heat_map
from nsr.report.figure import Figure, Panel
from nsr.report.names import SEGMENTATION, name
from nsr.report.table import measured
from nsr.report.token_figures import MERGER_KEYS, MERGERS, operating_points


def setup_figures(book: Book) -> list[Figure]:
    """Residual magnitude by compression, and the layer-wise merge heat map."""
    return [_residual_magnitude(book), _layerwise(book)]


def _residual_magnitude(book: Book) -> Figure:
    panels, total = [], 0
    for dataset in SEGMENTATION:
        chart = Chart(
            f"Residual magnitude, {name(dataset)}",
            Axis(1.6, 4.0, "operating point, ×", (1.8, 2.4, 3.0, 3.4, 3.8)),
            Axis(0, 1, "‖Z‖ / ‖X‖"),
        )
        found = 0
        for merger, series in list(MERGERS.items())[:3]:
            centre: list[Point] = []
            lower: list[Point] = []
            upper: list[Point] = []
            for point in operating_points(dataset, merger):
                where = {"dataset": dataset, "merger": merger, "point": point}
                share = measured(book, "", "numerics", where, "residual_share")
                spread = measured(book, "", "numerics", where, "residual_share_std").value or 0.0
                if share.value is not None:
                    x = float(point.removesuffix("x"))
                    centre.append((x, share.value))
                    lower.append((x, max(share.value - spread, 0.0)))
                    upper.append((x, min(share.value + spread, 1.0)))
                    found += share.count
            if len(centre) > 1:
                chart.band(lower, upper, series)
            chart.line(centre, series)
            for x, y in centre:
                chart.dot((x, y), series, f"{name(merger)} {x:g}×: {y:.3f}")
        if found:
            panels.append(Panel(name(dataset), chart.svg()))
        total += found
    return Figure(
        "fig:nsr-residual-magnitude",
        "How large the residual is",
        tuple(panels),
        MERGER_KEYS,
        "Mean over the merging blocks of the trained NSR models, bands one standard deviation over blocks.",
        total,
        "nsr run numerics",
    )


def _layerwise(book: Book) -> Figure:
    grids: list[tuple[str, list[str], list[list[float]]]] = []
    total = 0
    for merger in list(MERGERS)[:3]:
        for dataset in SEGMENTATION:
            rows, values = [], []
            for point in operating_points(dataset, merger):
                runs = book.counted("operating-points", {"dataset": dataset, "merger": merger, "point": point})
                if runs and isinstance(runs[0].metrics.get("merged_share"), list):
                    rows.append(name(point))
                    values.append([float(share) for share in runs[0].metrics["merged_share"]])
                    total += 1
            if rows:
                grids.append((f"{name(merger)}, {name(dataset)}", rows, values))
    top = max((share for _, _, values in grids for row in values for share in row), default=0.0)
    panels = tuple(
        Panel(heading, heat_map(f"Tokens merged by block, {heading}", rows, values, top, "transformer block"))
        for heading, rows, values in grids
    )
    return Figure(
        "fig:layerwise-token-merging",
        "Where the tokens go",
        panels,
        (),
        "Share of the initial patch tokens merged in each block; full colour is "
        f"{100 * top:.0f} %, the same in every panel.",
        total,
        "nsr run operating-points",
    )
