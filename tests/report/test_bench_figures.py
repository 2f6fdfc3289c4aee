"""Benchmarks as they are written become charts with their limit, tables, and mIoU against speed."""

from pathlib import Path

import pytest
from example_results import document, write

from nsr.report.bench import bench_figures, bench_tables, cases
from nsr.report.book import Book


def test_every_case_of_the_examples(results: Path) -> None:
    book = Book.read(results)
    assert {"224x224 batch 256", "512x512 batch 32", "tolokers", "10,000 members"} <= {c.title for c in cases(book)}
    figures = {figure.label: figure for figure in bench_figures(book)}
    assert figures["ours:bench-tokens"].panels[0].svg.count('class="rule limit"') == 1
    graph = figures["ours:bench-graph"].panels[0].svg
    assert graph.count('class="rule limit"') == 1
    assert graph.count('class="bar s1') == 2  # what the paper words is a peer
    assert "kernel errors" not in graph
    assert "free drop" not in figures["ours:bench-tokens"].panels[0].svg  # the limit is a line, not a peer
    assert figures["ours:bench-scale"].panels[0].svg.count("<circle") == 8
    assert figures["ours:miou-speed"].panels[0].svg.count("<circle") == 3


def test_the_numbers_stand_in_a_table(results: Path) -> None:
    tables = {table.label: table for table in bench_tables(Book.read(results))}
    row = next(row for row in tables["ours:bench-tokens"].rows if row.names[2].startswith("merged + NSR"))
    columns = dict(zip(tables["ours:bench-tokens"].columns, row.cells, strict=True))
    assert columns["Images a second"].value == 82000
    assert columns["Relative speed"].value == pytest.approx(82000 / 60900)
    assert columns["Peak memory, MiB"].value == 1024
    assert "Images a second" not in tables["ours:bench-graph"].columns


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"case": 3},
        {"case": {"arm": {}}},
        {"case": {"arm": {"milliseconds": {"median": 0}}}},
        {"case": {"arm": None}},
    ],
)
def test_what_is_no_measurement_is_left_out(empty: Path, metrics: dict[str, object]) -> None:
    write(empty, document("bench", {"bench": "tokens", "machine": "m"}, metrics))
    assert bench_tables(Book.read(empty)) == []
    assert all(figure.panels == () for figure in bench_figures(Book.read(empty)))
