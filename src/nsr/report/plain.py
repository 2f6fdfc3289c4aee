"""The tables once more, as Markdown for people and CSV for programs."""

import csv
from collections.abc import Sequence
from pathlib import Path

from nsr.report.table import Cell, Table


def write_markdown(tables: Sequence[Table], path: Path) -> None:
    """All tables in one file: ours first, the paper's number and the difference in brackets."""
    lines = ["# Results beside the paper", ""]
    lines += [
        "Ours ± sample standard deviation, number of runs; in brackets the paper's number and the difference.",
        "",
    ]
    for table in tables:
        lines += [f"## {_plain(table.title)} (`{table.label}`)", ""]
        lines += [_plain(table.remark), ""] if table.remark else []
        lines += [*table_lines(table), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def table_lines(table: Table, *, brief: bool = False) -> list[str]:
    """A table in Markdown; ``brief`` leaves out the number of runs and the difference to the paper."""
    rows = [[*map(_plain, row.names), *(_words(cell, brief) for cell in row.cells)] for row in table.rows]
    heading = [*map(_plain, (*table.names, *table.columns))]
    rule = "|" + " :-- |" * len(table.names) + " --: |" * len(table.columns)
    first, *others = ["| " + " | ".join(row) + " |" for row in [heading, *rows]]
    return [first, rule, *others]


def _words(cell: Cell, brief: bool) -> str:
    words: list[str] = []
    if cell.value is not None or cell.text:
        number = _plain(cell.text) or cell.show(cell.value)
        words.append(f"**{number}**" if cell.best else number)
        words += [f"± {cell.plain(cell.spread)}"] if cell.spread else []
        words += [] if brief else [f"n={cell.count}"]
    if cell.note:
        words.append(f"_{_plain(cell.note)}_")
    if cell.paper is not None:
        spread = f" ± {cell.plain(cell.paper_spread)}" if cell.paper_spread is not None else ""
        apart = f", {cell.apart}" if cell.apart and not brief else ""
        words.append(f"[{cell.show(cell.paper)}{spread}{apart}]")
    elif cell.paper_text:
        words.append(f"[{_plain(cell.paper_text)}]")
    return " ".join(words)


def _plain(text: str) -> str:
    """Strings from results must not become markup, nor break the row."""
    for character in "\\`*_|<>[]":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


HEADER = (
    "row", "column", "ours", "spread", "n", "paper", "paper_spread", "difference", "p_t_test", "p_wilcoxon", "note",
    "files", "command",
)  # fmt: skip


def write_csv(table: Table, folder: Path) -> None:
    """One line a cell, numbers unrounded, in ``folder/<label>.csv``."""
    with open(folder / f"{table.label.replace(':', '-')}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for row in table.rows:
            for title, cell in zip(table.columns, row.cells, strict=True):
                if cell == Cell():
                    continue
                ours: float | str | None = cell.text or cell.value
                theirs: float | str | None = cell.paper_text or cell.paper
                tests = (cell.test.t_test, cell.test.wilcoxon) if cell.test else (None, None)
                names = " ".join(f"{run.experiment}/{run.path.name}" for run in cell.runs)
                command = cell.runs[0].command if cell.runs else ""
                writer.writerow(
                    [" / ".join(row.names), title, ours, cell.spread, cell.count, theirs, cell.paper_spread,
                     cell.difference, *tests, cell.note, names, command]
                )  # fmt: skip
