"""A cell knows its number, its spread, how many runs it has, and why it has none."""

from pathlib import Path

import pytest
from example_results import document, write

from nsr.report.book import Book
from nsr.report.table import NO_DATA, NOT_RUN, Cell, contest, gain, measured

WHERE = {"merger": "tome", "point": "3.4x", "variant": "nsr"}


def book_of(folder: Path, scores: dict[int, float], variant: str = "nsr", **changes: object) -> Book:
    for seed, score in scores.items():
        write(folder, document("voc", {**WHERE, "variant": variant, "seed": seed}, {"miou": score}, **changes))
    return Book.read(folder)


def test_mean_spread_and_count(empty: Path) -> None:
    cell = measured(book_of(empty, {0: 0.48, 1: 0.5, 2: 0.52}), "tab:token-main", "voc", WHERE, "miou", scale=100)
    assert cell.value == pytest.approx(50.0)
    assert cell.spread == pytest.approx(2.0)
    assert (cell.count, len(cell.runs), cell.paper) == (3, 3, 49.82)
    assert cell.difference == pytest.approx(0.18)
    assert cell.apart == "+0.18"


def test_one_run_has_no_spread(empty: Path) -> None:
    cell = measured(book_of(empty, {0: 0.5}), "", "voc", WHERE, "miou")
    assert (cell.spread, cell.count, cell.paper) == (None, 1, None)


def test_missing_cells_say_why(empty: Path) -> None:
    book = Book.read(empty)
    assert measured(book, "tab:token-main", "voc", WHERE, "miou").note == NOT_RUN
    assert measured(book, "tab:token-main", "ade20k", WHERE, "miou").note == NO_DATA
    node = {"dataset": "questions", "backbone": "gcn", "variant": "nsr"}
    assert measured(book, "tab:heterophily-main", "heterophily", node, "test").note == NO_DATA
    assert "no `pixel_accuracy`" in measured(book_of(empty, {0: 0.5}), "", "voc", WHERE, "pixel_accuracy").note


def test_a_failed_run_is_not_averaged_and_is_named(empty: Path) -> None:
    book_of(empty, {0: 0.5})
    cell = measured(book_of(empty, {1: 0.1}, status="failed", error="loss was NaN"), "", "voc", WHERE, "miou")
    assert (cell.value, cell.count) == (0.5, 1)
    assert "failed (loss was NaN)" in cell.note


def test_a_stopped_run_counts_and_is_named(empty: Path) -> None:
    book_of(empty, {0: 0.5})
    cell = measured(book_of(empty, {1: 0.4}, status="stopped"), "", "voc", WHERE, "miou")
    assert (cell.value, cell.count) == (pytest.approx(0.45), 2)
    assert cell.note == "stopped by a time limit (1)"
    assert not cell.note_is_bad


def test_null_is_no_number(empty: Path) -> None:
    write(empty, document("voc", {**WHERE, "seed": 0}, {"miou": None, "params": 5}))
    book = Book.read(empty)
    cell = measured(book, "", "voc", WHERE, "miou")
    assert cell.value is None
    assert "not a finite number: miou" in cell.note
    assert measured(book, "", "voc", WHERE, "params").value == 5


def test_a_gain_is_over_common_seeds_only(empty: Path) -> None:
    book_of(empty, {0: 0.2, 1: 0.3}, "original")
    book = book_of(empty, {1: 0.5, 2: 0.9})
    base = measured(book, "", "voc", {**WHERE, "variant": "original"}, "miou", scale=100)
    delta = gain(base, measured(book, "", "voc", WHERE, "miou", scale=100))
    assert delta.value == pytest.approx(20.0)
    assert (delta.count, delta.test) == (1, None)
    assert delta.show(delta.value) == "+20.00"


def test_a_gain_without_common_seeds_says_so(empty: Path) -> None:
    book_of(empty, {0: 0.2}, "original")
    book = book_of(empty, {1: 0.5})
    base = measured(book, "", "voc", {**WHERE, "variant": "original"}, "miou")
    assert gain(base, measured(book, "", "voc", WHERE, "miou")).note == "no seed or split in common"


def test_the_best_is_marked_on_each_side() -> None:
    cells = contest([Cell(0.5, paper=0.7), Cell(0.6, paper=0.4), Cell()])
    assert [cell.best for cell in cells] == [False, True, False]
    assert [cell.paper_best for cell in cells] == [True, False, False]
    assert contest([Cell(0.5), Cell(0.4)], "lower")[1].best
    assert not contest([Cell(0.5), Cell()])[0].best  # nobody to compete with


def test_other_environments_are_lettered(empty: Path) -> None:
    book_of(empty, {0: 0.5, 1: 0.5})
    book = book_of(empty, {2: 0.5}, environment={"commit": "abc", "device": "elsewhere"})
    assert [book.mark(run) for run in book.counted("voc", WHERE)] == ["", "", "a"]


def test_what_nobody_asked_for_is_remembered(empty: Path) -> None:
    book = book_of(empty, {0: 0.5})
    assert len(book.not_asked_for()) == 1
    measured(book, "", "voc", WHERE, "miou")
    assert book.not_asked_for() == []
