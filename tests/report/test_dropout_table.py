"""The table by dropout holds what was run with another one than an experiment's own, each beside the paper's number."""

from pathlib import Path

from example_results import document, write

from nsr.report.book import Book
from nsr.report.dropout_table import dropout_table
from nsr.report.graph_tables import graph_tables


def run(folder: Path, backbone: str, score: float, dropout: float, own: bool, split: int = 0) -> None:
    other = {} if own else {"dropout": dropout}
    cell = {"dataset": "tolokers", "backbone": backbone, "variant": "original", **other, "split": split}
    write(folder, document("heterophily", cell, {"test": score}, config={"dropout": dropout}))


def test_by_dropout_and_in_the_papers_order(empty: Path) -> None:
    for backbone, own, half in (("sage", 0.831, 0.84), ("gcn", 0.849, 0.856)):
        run(empty, backbone, own, 0.2, own=True)
        run(empty, backbone, half, 0.5, own=False)
    run(empty, "gcn", 0.854, 0.5, own=False, split=1)
    run(empty, "gin", 0.83, 0.2, own=True)  # tried with one dropout alone: not in this table
    cell = {"backbone": "gcn", "variant": "nsr", "dropout": 0.0, "seed": 0}
    write(empty, document("zinc", cell, {"test_mae": 0.3}, config={"dropout": 0.0}))
    table = dropout_table(Book.read(empty))
    assert table.columns == ("Dropout 0", "Dropout 0.2", "Dropout 0.5")
    assert [row.names for row in table.rows] == [
        ("Tolokers", "GCN", "Original"),
        ("Tolokers", "GraphSAGE", "Original"),
        ("ZINC", "GCN", "+ NSR"),
    ]
    none, usual, half = table.rows[0].cells
    assert (none.value, none.note, none.paper) == (None, "not run", 84.90)
    assert (round(usual.value or 0, 4), usual.count, usual.paper) == (84.9, 1, 84.90)
    assert (round(half.value or 0, 4), half.count) == (85.5, 2)
    assert (table.rows[2].cells[0].value, table.rows[2].cells[0].paper) == (0.3, 0.2947)


def test_without_another_dropout_there_is_no_table(results: Path) -> None:
    assert "ours:dropout" not in {table.label for table in graph_tables(Book.read(results))}
