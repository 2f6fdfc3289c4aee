"""Tables inside hand-written pages: what was asked for, as the results have it, or an error that names the place."""

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsr.cli import app
from nsr.report.build import renew
from nsr.report.excerpt import renewed
from nsr.report.table import Cell, Row, Table

ROOT = Path(__file__).parents[2]
END = "<!-- end of table -->"
TABLE = Table(
    "tab:fruit",
    "Fruit",
    ("Kind", "Ripe"),
    ("Sweet, raw", "Sour"),
    (
        Row(("Apple", "yes"), (Cell(1.0, spread=0.5, count=3, paper=2.0), Cell(note="not run"))),
        Row(("Plum", "yes"), (Cell(3.0, count=1, best=True), Cell(4.0, count=1, paper=4.0))),
        Row(("Plum", "no"), (Cell(5.0, count=1), Cell(6.0, count=1))),
    ),
)


def page(wishes: str = "", there: str = "") -> str:
    return f"Before.\n\n<!-- table tab:fruit{wishes}-->\n{there}{END}\n\nAfter."


def test_a_whole_table() -> None:
    assert renewed(page(" "), [TABLE]) == page(
        " ",
        "\n| Kind | Ripe | Sweet, raw | Sour |\n| :-- | :-- | --: | --: |\n"
        "| Apple | yes | 1.00 ± 0.50 [2.00] | _not run_ |\n| Plum | yes | **3.00** | 4.00 [4.00] |\n"
        "| Plum | no | 5.00 | 6.00 |\n\n",
    )


def test_rows_and_columns_are_chosen_and_names_that_never_differ_left_out() -> None:
    text = renewed(page("\nRipe: yes\ncolumns: Sour | Sweet, raw\n"), [TABLE])
    assert "| Kind | Sour | Sweet, raw |\n" in text
    assert "| Apple | _not run_ | 1.00 ± 0.50 [2.00] |\n| Plum | 4.00 [4.00] | **3.00** |\n\n" in text
    assert "5.00" not in text


def test_renewing_twice_changes_nothing() -> None:
    once = renewed(page("\nKind: Plum\n", "old\n"), [TABLE])
    assert "old" not in once
    assert renewed(once, [TABLE]) == once


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (page().replace("tab:fruit", "tab:tree"), "no table 'tab:tree'; the report has tab:fruit"),
        (page("\nKind: Pear | Plum\n"), "no row with Pear under 'Kind'"),
        (page("\ncolumns: Sweet\n"), "no column 'Sweet', but 'Sweet, raw', 'Sour'"),
        (page("\nSize: 3\n"), "no column 'Size', but 'Kind', 'Ripe'"),
        (page().replace(END, ""), "of 1 tables asked for, 0 have a line"),
        (page().replace(END, "") + page(), "of 2 tables asked for, 1 have a line"),
    ],
)
def test_what_cannot_be_had_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        renewed(text, [TABLE])


def test_the_command_names_the_page_that_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "page.md"
    wrong.write_text(page())
    done = CliRunner().invoke(app, ["report", "--results", str(tmp_path), "--renew", str(wrong)])
    assert isinstance(done.exception, ValueError)
    assert str(done.exception).startswith(f"{wrong}: there is no table 'tab:fruit'")
    assert wrong.read_text() == page()


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_our_pages_say_what_the_results_say(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    shutil.copy(ROOT / name, copy)
    assert renew(ROOT / "results", [copy]) == [], f"{name} is not what the results say now: run `make results`"
