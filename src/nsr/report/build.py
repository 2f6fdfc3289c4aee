"""From a folder of results to the report: one page, the tables as Markdown and CSV."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsr.report.bench import bench_figures, bench_tables
from nsr.report.book import Book
from nsr.report.claims import claims
from nsr.report.excerpt import renewed
from nsr.report.graph_figures import graph_figures
from nsr.report.graph_tables import graph_tables
from nsr.report.page import Part, render
from nsr.report.plain import write_csv, write_markdown
from nsr.report.setup_figures import setup_figures
from nsr.report.setup_tables import setup_tables
from nsr.report.table import Table
from nsr.report.token_figures import token_figures
from nsr.report.token_tables import ablation_tables, main_tables


@dataclass(frozen=True)
class Outcome:
    """What was written and what it was made from."""

    page: Path
    runs: int
    unfinished: int
    problems: list[str]


def build(results: Path, out: Path) -> Outcome:
    """Write ``out/index.html``, ``out/report.md`` and ``out/tables/*.csv``.

    Args:
        results: A folder of ``<experiment>/<name>.json``; it may be empty.
        out: Made where it does not exist.
    """
    book = Book.read(results)
    parts = _parts(book)
    tables = _tables(parts)
    (out / "tables").mkdir(parents=True, exist_ok=True)
    for table in tables:
        write_csv(table, out / "tables")
    write_markdown(tables, out / "report.md")
    page = out / "index.html"
    _replace(page, render(book, parts, claims(book, tables), out))
    counted = sum(run.counts for run in book.runs)
    reasons = [f"{problem.path.parent.name}/{problem.path.name}: {problem.reason}" for problem in book.problems]
    return Outcome(page, counted, len(book.runs) - counted, reasons)


def renew(results: Path, pages: Sequence[Path]) -> list[Path]:
    """Write the tables inside pages anew, see :mod:`nsr.report.excerpt`; gives back the pages that have changed."""
    tables = _tables(_parts(Book.read(results)))
    changed = []
    for page in pages:
        try:
            before = page.read_text(encoding="utf-8")
            after = renewed(before, tables)
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{page}: {error}") from error
        if after != before:
            _replace(page, after)
            changed.append(page)
    return changed


def _parts(book: Book) -> list[Part]:
    return [
        Part("tokens", "Token merging", [*main_tables(book), *token_figures(book), *ablation_tables(book)]),
        Part("operating-points", "Operating points and numerics", [*setup_figures(book), *setup_tables(book)]),
        Part("graphs", "Graph aggregation", [*graph_figures(book), *graph_tables(book)]),
        Part("speed", "Speed", [*bench_figures(book), *bench_tables(book)]),
    ]


def _tables(parts: Sequence[Part]) -> list[Table]:
    return [item for part in parts for item in part.items if isinstance(item, Table)]


def _replace(path: Path, text: str) -> None:
    """Write beside and rename, so that a page is whole or not there."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
