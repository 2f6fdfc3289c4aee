"""The paper's main claims in a line each, with what our runs say to them."""

from collections.abc import Sequence
from dataclasses import dataclass

from nsr.report.book import Book
from nsr.report.names import BACKBONES, name
from nsr.report.table import Cell, Table, measured


@dataclass(frozen=True)
class Claim:
    """A statement, the paper's figure for it, and ours (empty where nothing was run)."""

    text: str
    paper: str
    ours: str


def claims(book: Book, tables: Sequence[Table]) -> list[Claim]:
    """The claims, computed from the tables."""
    by_label = {table.label: table for table in tables}
    tokens = _column(by_label["tab:token-main"], "Δ NSR ↑")
    voc = {names: cell for names, cell in tokens.items() if names[0] == "VOC"}
    steep = tokens["VOC", "ToMe", "3.4×"]
    nodes = _column(by_label["tab:heterophily-main"], "Δ NSR ↑")
    zinc = _column(by_label["tab:zinc-results"], "NSR − original")
    return [
        Claim(
            "Merged models gain mIoU with NSR, all data sets", _positive(tokens, "paper"), _positive(tokens, "value")
        ),
        Claim("… on VOC alone", _positive(voc, "paper"), _positive(voc, "value")),
        Claim("Gain of ToMe at 3.4× on VOC, points of mIoU", steep.show(steep.paper), _one(steep)),
        Claim("Node classification improves", _positive(nodes, "paper"), _positive(nodes, "value")),
        Claim("ZINC error falls", _positive(zinc, "paper", -1), _positive(zinc, "value", -1)),
        Claim("All NSR backbones fit the tree task up to depth", "6", _deepest_fit(book)),
    ]


def _column(table: Table, title: str) -> dict[tuple[str, ...], Cell]:
    at = table.columns.index(title)
    return {row.names: row.cells[at] for row in table.rows if row.names[1:2] != ("Full-ViT",)}


def _positive(cells: dict[tuple[str, ...], Cell], field: str, sign: int = 1) -> str:
    numbers = [number for cell in cells.values() if (number := getattr(cell, field)) is not None]
    return f"{sum(sign * number > 0 for number in numbers)} of {len(numbers)}" if numbers else ""


def _one(cell: Cell) -> str:
    if cell.value is None:
        return ""
    spread = f" ± {cell.plain(cell.spread)}" if cell.spread is not None else ""
    return f"{cell.show(cell.value)}{spread} (n = {cell.count})"


def _deepest_fit(book: Book) -> str:
    """The deepest tree up to which every NSR backbone reaches 100 %, to the printed digit, in its best seed."""
    fitted, ran = 1, False
    for depth in range(2, 9):
        best = [
            max(measured(book, "", "tree", _tree(depth, backbone), "train_accuracy").replicates.values(), default=None)
            for backbone in BACKBONES
        ]
        ran = ran or any(value is not None for value in best)
        if any(value is None or value < 0.9995 for value in best):
            break
        fitted = depth
    if not ran:
        return ""
    return str(fitted) if fitted > 1 else f"none that all of {', '.join(map(name, BACKBONES))} fit"


def _tree(depth: int, backbone: str) -> dict[str, object]:
    return {"depth": depth, "backbone": backbone, "variant": "nsr"}
