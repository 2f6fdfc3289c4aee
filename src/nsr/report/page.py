"""The page: one HTML file with everything in it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nsr.report.book import Book, letter
from nsr.report.claims import Claim
from nsr.report.figure import Figure, Key
from nsr.report.statistics import p_value
from nsr.report.table import Cell, Table


@dataclass(frozen=True)
class Part:
    """A chapter of the page; ``contents`` in reading order."""

    id: str
    title: str
    items: Sequence[Table | Figure]
    text: str = ""


def render(book: Book, parts: Sequence[Part], claims: Sequence[Claim], out: Path) -> str:
    """The whole page as HTML; ``out`` is the folder that it will lie in, for relative links."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("nsr", "report"),
        autoescape=True,  # every string of a result, file names included, is data and never markup
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        anchor=lambda item: item.label.replace(":", "-") + ("-figure" if isinstance(item, Figure) else ""),
        is_apart=is_apart,
        link=_linker(out),
        mark=book.mark,
        marks=lambda cell: sorted({book.mark(run) for run in cell.runs} - {""}, key=lambda mark: (len(mark), mark)),
        p_value=p_value,
        swatch=swatch,
    )
    tables = [item for part in parts for item in part.items if isinstance(item, Table)]
    return environment.get_template("page.html.j2").render(
        css=_asset("page.css"),
        js=_asset("page.js"),
        parts=parts,
        claims=claims,
        problems=book.problems,
        others=book.not_asked_for(),
        counted=sum(run.counts for run in book.runs),
        unfinished=sum(not run.counts for run in book.runs),
        filled=sum(table.numbers_of_both for table in tables),
        printed=sum(table.numbers_of_the_paper for table in tables),
        environments=_environments(book),
    )


def is_apart(cell: Cell) -> bool:
    """Whether ours lies further from the paper's number than the paper's own spread."""
    return cell.difference is not None and cell.paper_spread is not None and abs(cell.difference) > cell.paper_spread


def swatch(key: Key) -> Any:
    """A legend's little drawing."""
    from markupsafe import Markup

    shape = {
        "line": f'<line class="line s{key.series}" x1="0" y1="6" x2="26" y2="6"/>',
        "dash": f'<line class="line dash s{key.series}" x1="0" y1="6" x2="26" y2="6"/>',
        "limit": '<line class="rule limit" x1="0" y1="6" x2="26" y2="6"/>',
        "dot": f'<circle class="dot s{key.series}" cx="13" cy="6" r="4"/>',
        "bound": f'<path class="dot s{key.series}" d="M8 10h10l-5 -9z"/>',
        "ring": f'<circle class="ring s{key.series}" cx="13" cy="6" r="4"/>',
        "bar": f'<rect class="bar s{key.series}" x="8" y="0" width="10" height="12" rx="2"/>',
        "hollow": f'<rect class="bar hollow s{key.series}" x="8" y="0" width="10" height="12" rx="2"/>',
    }[key.kind]
    return Markup(f'<svg viewBox="0 0 26 12" aria-hidden="true">{shape}</svg>')


def _linker(out: Path) -> Callable[[Path], str]:
    start = out.resolve()
    folders: dict[Path, str] = {}  # a relative path costs more than a page of them can afford: once a folder

    def link(path: Path) -> str:
        folder = path.parent
        if folder not in folders:
            folders[folder] = quote(Path(os.path.relpath(folder.resolve(), start)).as_posix())
        return f"{folders[folder]}/{quote(path.name)}"

    return link


def _environments(book: Book) -> list[dict[str, Any]]:
    return [
        {"mark": letter(i) if i else "", "commit": commit, "device": device, "runs": book.count((commit, device))}
        for i, (commit, device) in enumerate(book.environments)
    ]


def _asset(name: str) -> str:
    return files("nsr.report").joinpath(name).read_text(encoding="utf-8")
