"""The paper's tables of operating points, numerical checks and training set-up."""

from dataclasses import replace

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.names import SEGMENTATION, name
from nsr.report.table import Cell, Row, Table, measured, pooled

MERGERS = ("tome", "pitome", "mpm")


def setup_tables(book: Book) -> list[Table]:
    """Null violation and the three tables of compression configurations."""
    return [_null_violation(book), *(_operating_points(book, merger) for merger in MERGERS)]


def _null_violation(book: Book) -> Table:
    label = "tab:nsr-null-violation"
    rows = []
    for dataset in SEGMENTATION:
        cells = []
        for merger in MERGERS:
            points = dict.fromkeys(
                row["point"]
                for row in paper.rows("tab:token-main")
                if (row["experiment"], row["merger"]) == (dataset, merger)
            )
            measurements = [
                measured(
                    book,
                    "",
                    "numerics",
                    {"dataset": dataset, "merger": merger, "point": point},
                    "null_violation",
                    style=".2e",
                )
                for point in points
            ]
            printed, _ = paper.value(label, {"dataset": dataset, "merger": merger}, "null_violation")
            cells.append(replace(pooled(measurements, max), paper=printed))
        rows.append(Row((name(dataset),), tuple(cells)))
    return Table(
        label,
        "Largest violation of the null space",
        ("Data set",),
        tuple(map(name, MERGERS)),
        tuple(rows),
        "‖AZ‖∞ of the trained NSR models, the maximum over operating points and blocks.",
    )


# What sets the strength of each merger: its name in the results, in the paper, and its format.
CONTROLS = {
    "tome": ("r", "Selected r", ".0f"),
    "pitome": ("keep", "Retention q", ".3f"),
    "mpm": ("blocks", "Blocks", ""),
}


def _operating_points(book: Book, merger: str) -> Table:
    label = f"tab:{merger}-compression-configurations"
    control, title, style = CONTROLS[merger]
    rows = []
    for printed in paper.rows(label):
        where = {"dataset": printed["dataset"], "merger": merger, "point": printed["point"]}

        def cell(metric: str, style: str, where: dict[str, str] = where) -> Cell:
            return measured(book, label, "operating-points", where, metric, style=style, paper_where=where)

        chosen = _blocks(book, where, printed["blocks"]) if merger == "mpm" else cell(control, style)
        rows.append(
            Row(
                (name(printed["dataset"]), name(printed["point"])),
                (chosen, cell("achieved", ".3f"), cell("gflops_paper", ".4f")),
            )
        )
    return Table(
        label,
        f"Operating points of {name(merger)}",
        ("Data set", "Point"),
        (title, "Achieved ×", "GFLOPs"),
        tuple(rows),
    )


def _blocks(book: Book, where: dict[str, str], printed: str) -> Cell:
    """MPM's insertion schedule, as text."""
    cell = measured(book, "", "operating-points", where, "achieved")
    cell = replace(cell, paper_text=printed, value=None, spread=None)
    schedules = {ranges(run.metrics["blocks"]) for run in cell.runs if isinstance(run.metrics.get("blocks"), list)}
    return replace(cell, text=" or ".join(sorted(schedules))) if schedules else replace(cell, runs=())


def ranges(blocks: list[int]) -> str:
    """Consecutive blocks as the paper writes them.

    >>> ranges([0, 1, 2, 4, 6, 7])
    '0–2, 4, 6–7'
    """
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
