"""A table: cells with our number, the paper's, the difference, and where ours comes from."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nsr.report import paper
from nsr.report.book import Book
from nsr.report.read import Run
from nsr.report.statistics import PairedTest, mean, paired_differences, paired_test, sample_std

Better = Literal["higher", "lower", ""]

NOT_RUN = "not run"
NO_DATA = "not run: data not at hand"
STOPPED = "stopped by a time limit"
# The paper evaluates on these; this project cannot redistribute them and its committed results do without.
DATA_NOT_AT_HAND = {"roman-empire", "amazon-ratings", "questions", "ade20k", "cityscapes"}


@dataclass(frozen=True)
class Cell:
    """One number of ours beside one of the paper, both in the paper's printed unit."""

    value: float | None = None
    spread: float | None = None
    runs: tuple[Run, ...] = ()
    paper: float | None = None
    paper_spread: float | None = None
    style: str = ".2f"  # format specification for both numbers
    signed: bool = False  # a gain is written with its sign
    note: str = ""  # why there is no number, or what else must be known
    text: str = ""  # shown instead of a number
    paper_text: str = ""
    test: PairedTest | None = None
    replicates: Mapping[str, float] = field(default_factory=dict)
    count: int = 0  # how many values the number is computed from
    best: bool = False
    paper_best: bool = False

    @property
    def note_is_bad(self) -> bool:
        """Whether the note tells of something that went wrong, not just of something that was not done."""
        return bool(self.note) and not self.note.startswith((NOT_RUN, STOPPED, "no "))

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.value is None or self.paper is None else self.value - self.paper

    @property
    def apart(self) -> str:
        """The difference in words: its sign and size, ``=`` where the printed digits agree."""
        if self.difference is None:
            return ""
        text = format(self.difference, "+" + self.style).replace("-", "−")
        return text if any(digit in text.partition("e")[0] for digit in "123456789") else "="

    def show(self, number: float | None) -> str:
        """A number in this cell's format."""
        return "" if number is None else format(number, "+" * self.signed + self.style).replace("-", "−")

    def plain(self, number: float | None) -> str:
        """A spread in this cell's format: never signed."""
        return "" if number is None else format(number, self.style)


@dataclass(frozen=True)
class Row:
    """What names the row, then its cells."""

    names: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def remark(self) -> str:
        """What holds for the row as a whole: that its data is out of reach and nothing was run."""
        notes = {cell.note for cell in self.cells if cell != Cell()}
        return NO_DATA if notes == {NO_DATA} else ""


@dataclass(frozen=True)
class Table:
    """A table of the paper, or one of ours when ``ours`` is set."""

    label: str
    title: str
    names: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    remark: str = ""
    ours: bool = False

    @property
    def numbers_of_the_paper(self) -> int:
        """How many cells the paper fills."""
        return sum(cell.paper is not None or bool(cell.paper_text) for row in self.rows for cell in row.cells)

    @property
    def numbers_of_both(self) -> int:
        """How many of them we fill too."""
        return sum(
            cell.difference is not None or bool(cell.text and cell.paper_text)
            for row in self.rows
            for cell in row.cells
        )


def measured(
    book: Book,
    label: str,
    experiment: str,
    where: Mapping[str, Any],
    metric: str,
    *,
    style: str = ".2f",
    scale: float = 1.0,
    paper_where: Mapping[str, Any] | None = None,
) -> Cell:
    """The cell of one configuration: mean and sample spread over its seeds or splits.

    Args:
        book: All results.
        label: The paper's table that holds the printed number; ``""`` where there is none.
        experiment: The experiment that makes ours.
        where: The configuration, without seed or split.
        metric: The metric's name in the results.
        style: Format specification.
        scale: Ours times this is in the printed unit (100 for per cent).
        paper_where: What names the paper's row, where that is not ``experiment`` and ``where``.
    """
    printed, printed_spread = (None, None)
    if label:
        printed, printed_spread = paper.value(label, paper_where or {"experiment": experiment, **where}, metric)
    counted = book.counted(experiment, where)
    runs = tuple(run for run in counted if isinstance(run.metrics.get(metric), int | float))
    cell = Cell(runs=runs, paper=printed, paper_spread=printed_spread, style=style, note=_why(book, experiment, where))
    if not runs:
        missing = (
            f"no `{metric}` in its result" if counted else NO_DATA if _out_of_reach(experiment, where) else NOT_RUN
        )
        return replace(cell, note=cell.note or missing)
    values = {run.replicate: scale * run.metrics[metric] for run in runs}
    numbers = list(values.values())
    settings = len({_settings(run) for run in runs})
    note = "; ".join(filter(None, [cell.note, f"of {settings} settings" if settings > 1 else ""]))
    return replace(
        cell, value=mean(numbers), spread=sample_std(numbers), replicates=values, count=len(numbers), note=note
    )


def _settings(run: Run) -> str:
    """The configuration of a run, without what tells replicates apart and how long it may take."""
    settings = {key: value for key, value in run.config.items() if key not in ("seed", "max_seconds")}
    return json.dumps(settings, sort_keys=True)


def _out_of_reach(experiment: str, where: Mapping[str, Any]) -> bool:
    if experiment == "operating-points" and where.get("merger") != "mpm":
        return False  # these follow from shapes alone
    return experiment in DATA_NOT_AT_HAND or where.get("dataset") in DATA_NOT_AT_HAND


def _why(book: Book, experiment: str, where: Mapping[str, Any]) -> str:
    """What keeps runs of this configuration from counting."""
    reasons = [f"{problem.path.name}: {problem.reason}" for problem in book.unusable(experiment, where)]
    stopped = 0
    for run in book.unfinished(experiment, where):
        if run.counts:
            stopped += 1
        else:
            reasons.append(f"{run.path.name}: {run.status}" + (f" ({run.error})" if run.error else ""))
    reasons += [f"{STOPPED} ({stopped})"] if stopped else []
    return "; ".join(reasons)


def pooled(cells: Sequence[Cell], reduce: Callable[[Iterable[float]], float]) -> Cell:
    """One number from all runs behind several cells, such as the largest of them all."""
    numbers = [number for cell in cells for number in cell.replicates.values()]
    runs = tuple(run for cell in cells for run in cell.runs)
    notes = dict.fromkeys(
        cell.note for cell in cells if cell.note and (not numbers or cell.note not in (NOT_RUN, NO_DATA))
    )
    value = reduce(numbers) if numbers else None
    return Cell(value, runs=runs, style=cells[0].style, count=len(numbers), note="; ".join(notes))


def gain(before: Cell, after: Cell, printed: float | None = None) -> Cell:
    """``after - before`` over the seeds or splits that both have, with a paired test from ten pairs on."""
    if printed is None and before.paper is not None and after.paper is not None:
        printed = after.paper - before.paper
    differences = paired_differences(before.replicates, after.replicates)
    note = "" if differences else before.note or after.note or "no seed or split in common"
    cell = Cell(paper=printed, style=after.style, signed=True, runs=before.runs + after.runs, note=note)
    if not differences:
        return replace(cell, runs=())
    return replace(
        cell,
        value=mean(differences),
        spread=sample_std(differences),
        test=paired_test(differences),
        count=len(differences),
    )


def contest(cells: Sequence[Cell], better: Better = "higher") -> tuple[Cell, ...]:
    """Mark the best of ours, and the best of the paper's, among cells that compete (two at least)."""
    sign = 1 if better == "higher" else -1

    def best(numbers: Iterable[float | None]) -> float | None:
        known = [number for number in numbers if number is not None]
        return max(known, key=lambda number: sign * number) if len(known) > 1 else None

    ours, theirs = best(cell.value for cell in cells), best(cell.paper for cell in cells)
    return tuple(
        replace(
            cell,
            best=ours is not None and cell.value == ours,
            paper_best=theirs is not None and cell.paper == theirs,
        )
        for cell in cells
    )
