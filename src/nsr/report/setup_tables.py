"""The paper's tables of operating points, numerical checks and training set-up."""

from dataclasses import replace

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.names import SEGMENTATION, name
from nsr.report.table import Cell, Row, Table, measured, pooled

MERGERS = ("tome", "pitome", "mpm")


def setup_tables(book: Book) -> list[Table]:
    """Null violation and the three tables of compression configurations."""
    return [
        _null_violation(book),
        _settings(book, "tome", "r", "Selected r", ".0f"),
        _settings(book, "pitome", "keep", "Retention q", ".3f"),
        _schedules(book),
    ]


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


def _settings(book: Book, merger: str, control: str, title: str, style: str) -> Table:
    """ToMe and PiToMe: their cost follows from the setting."""
    label = f"tab:{merger}-compression-configurations"
    rows = []
    for printed in paper.rows(label):
        where = {"dataset": printed["dataset"], "merger": merger, "point": printed["point"]}
        cells = tuple(
            measured(book, label, "operating-points", where, metric, style=digits, paper_where=where)
            for metric, digits in ((control, style), ("achieved", ".3f"), ("gflops_paper", ".4f"))
        )
        rows.append(Row((name(printed["dataset"]), name(printed["point"])), cells))
    columns = (title, "Achieved ×", "GFLOPs")
    return Table(label, f"Operating points of {name(merger)}", ("Data set", "Point"), columns, tuple(rows))


def _schedules(book: Book) -> Table:
    """MPM: its cost depends on the images, so search (training images) and trained model differ."""
    label = "tab:mpm-compression-configurations"
    rows = []
    for printed in paper.rows(label):
        where = {"dataset": printed["dataset"], "merger": "mpm", "point": printed["point"]}
        trained = {"merger": "mpm", "point": printed["point"], "variant": "original"}
        search = measured(book, label, "operating-points", where, "search", style=".3f", paper_where=where)
        final = [
            measured(book, label, printed["dataset"], trained, metric, style=digits, paper_where=where)
            for metric, digits in (("achieved", ".3f"), ("gflops_paper", ".4f"))
        ]
        cells = (
            _schedule(search, "blocks", printed["blocks"]),
            search,
            *final,
            _schedule(search, "blocks_found", ""),
        )
        rows.append(Row((name(printed["dataset"]), name(printed["point"])), cells))
    return Table(
        label,
        f"Operating points of {name('mpm')}",
        ("Data set", "Point"),
        ("Blocks", "Search ×", "Achieved ×", "GFLOPs", "Blocks our search finds"),
        tuple(rows),
        "Search: on training images with pretrained weights. Achieved: the trained model on validation images.",
    )


def _schedule(search: Cell, metric: str, printed: str) -> Cell:
    """An insertion schedule as text, from the runs behind ``search``."""
    found = {ranges(run.metrics[metric]) for run in search.runs if isinstance(run.metrics.get(metric), list)}
    if not found:
        return Cell(paper_text=printed, note=search.note if printed else "")
    return Cell(text=" or ".join(sorted(found)), paper_text=printed, runs=search.runs, count=search.count)


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
