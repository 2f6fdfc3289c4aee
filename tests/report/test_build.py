"""From a folder of results to a page: complete, escaped, small, quick, and honest about what is wrong."""

import csv
import json
import re
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from example_results import document, write
from typer.testing import CliRunner, Result

from nsr.report import paper
from nsr.report.build import build
from nsr.report.table import NO_DATA


class Page(HTMLParser):
    """Collects what the checks below need, and that every element is closed."""

    VOID = {"meta", "link", "br"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attrs)
        self.links += [str(values["href"])] if tag == "a" else []
        self.ids += [str(values["id"])] if "id" in values else []
        self.targets += [str(values["popovertarget"])] if "popovertarget" in values else []
        assert not any(name.startswith("on") for name in values), "no inline handlers"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html(results: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = results.parent / "report"
    outcome = build(results, out)
    assert (outcome.unfinished, outcome.problems) == (0, [])
    return outcome.page.read_text(), out


def test_the_page_is_whole(html: tuple[str, Path]) -> None:
    page = Page(html[0])
    assert len(page.ids) == len(set(page.ids))
    assert set(page.targets) <= set(page.ids)
    for link in set(page.links):
        assert link[1:] in page.ids if link.startswith("#") else (html[1] / link).is_file(), link


def test_the_page_needs_no_network_and_is_small(html: tuple[str, Path]) -> None:
    assert not re.search(r'(src|href)="(https?:)?//', html[0])
    assert "@import" not in html[0]
    assert len(html[0].encode()) <= 5_000_000


def test_every_table_of_the_paper_is_there(html: tuple[str, Path]) -> None:
    for label in paper.labels():
        if label.startswith("tab:"):
            assert label in html[0]


def test_ours_stands_beside_theirs(html: tuple[str, Path]) -> None:
    text = Page(html[0]).text
    assert "paper 64.23" in text
    assert "n=10" in text
    assert NO_DATA in text
    assert "not run" in text
    assert "p = 0.002" in text  # ten pairs of one sign: the least that Wilcoxon can say
    assert "nsr run voc --merger tome --point 1.8x --variant nsr --seed 0" in text


def test_another_device_is_marked(html: tuple[str, Path]) -> None:
    text = Page(html[0]).text
    assert "CPU, 2 cores" in text
    assert '<a class="mark" href="#environments"' in html[0]


def test_every_chart_is_well_formed(html: tuple[str, Path]) -> None:
    charts = re.findall(r'<svg class="chart".*?</svg>', html[0], re.DOTALL)
    assert len(charts) >= 20
    for chart in charts:
        ElementTree.fromstring(chart)


def test_markdown_and_csv_hold_the_same_numbers(html: tuple[str, Path]) -> None:
    markdown = (html[1] / "report.md").read_text()
    assert re.search(r"\| VOC \| ToMe \| 1\.8× \|.*\*\*6\d\.\d\d\*\* n=1 \[64\.23, ", markdown)
    with open(html[1] / "tables" / "tab-zinc-results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    gcn = next(row for row in rows if row["row"] == "GCN" and row["column"] == "+ NSR ↓")
    assert float(gcn["ours"]) == pytest.approx(0.2947, abs=0.01)
    assert (gcn["n"], gcn["paper"], gcn["paper_spread"]) == ("10", "0.2947", "0.005")
    assert len(gcn["files"].split()) == 10


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_a_tree_that_time_has_stopped_is_drawn_as_a_bound(empty: Path, tmp_path: Path, status: str) -> None:
    cell = {"depth": 5, "backbone": "gcn", "variant": "nsr", "seed": 11}
    write(empty, document("tree", cell, {"train_accuracy": 0.9}, status=status))
    build(empty, tmp_path / "out")
    html = (tmp_path / "out" / "index.html").read_text()
    told = "depth 5: 90.0 %, n = 1" + ("; stopped by a time limit (1)" if status == "stopped" else "")
    shape = "path" if status == "stopped" else "circle"
    assert re.search(rf"<{shape} class=\"dot [^>]*><title>GCN[^<]*{re.escape(told)}</title>", html)


def test_an_empty_folder_makes_a_page_too(empty: Path, tmp_path: Path) -> None:
    outcome = build(empty, tmp_path / "report")
    page = Page(outcome.page.read_text())
    assert outcome.runs == 0
    assert "No finished run yet" in page.text
    assert "paper 49.82" in page.text


HOSTILE = '"><script>alert(1)</script>|`*'


def test_strings_from_results_are_escaped(empty: Path, tmp_path: Path) -> None:
    cell = {"merger": "tome", "point": "3.4x", "variant": "nsr", "seed": HOSTILE}
    changes = {"command": HOSTILE, "environment": {"commit": HOSTILE, "device": HOSTILE}}
    write(empty, document("voc", cell, {"miou": 0.5}, **changes), "a'\"><img src=x onerror=alert(2)>&")
    write(empty, document("voc", {"other": HOSTILE}, {"miou": 0.5}, **changes), "unused")
    write(empty, document("voc", {**cell, "seed": 1}, {}, status="failed", error=HOSTILE), "failed")
    html = build(empty, tmp_path / "report").page.read_text()
    Page(html)
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert "<script>" not in (tmp_path / "report" / "report.md").read_text().replace("\\<", "")


def call(*arguments: str) -> Result:
    import typer

    from nsr.cli.report import report

    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(arguments))


def test_bad_files_are_told_by_page_line_and_code(empty: Path, tmp_path: Path) -> None:
    cell = {"merger": "tome", "point": "3.4x", "variant": "nsr"}
    good = document("voc", {**cell, "seed": 0}, {"miou": 0.5})
    write(empty, good)
    newer = write(empty, {**document("voc", {**cell, "seed": 1}, {"miou": 0.5}), "schema": 9}, "newer")
    write(empty, document("voc", {**cell, "seed": 2}, {"miou": float("nan")}), "nan")
    cut = json.dumps(document("voc", {**cell, "seed": 3}, {"miou": 0.5}))
    newer.with_name("cut.json").write_text(cut[: cut.index("metrics")])
    done = call("--results", str(empty), "--out", str(tmp_path / "report"))
    assert done.exit_code == 1
    last = done.stdout.strip().splitlines()[-1]
    assert "1 runs, 3 files do not count (voc/cut.json: truncated)" in last
    text = Page((tmp_path / "report" / "index.html").read_text()).text
    in_the_cell = "cut.json: truncated; nan.json: not a finite number: miou; newer.json: schema 9 is newer"
    assert in_the_cell in text
    assert "50.00 n=1" in text


def test_a_clean_report_ends_with_zero(results: Path, tmp_path: Path) -> None:
    done = call("--results", str(results), "--out", str(tmp_path))
    assert done.exit_code == 0
    assert re.fullmatch(r".*index\.html: \d+ runs", done.stdout.strip().splitlines()[-1])


def test_ten_thousand_files(empty: Path, tmp_path: Path) -> None:
    for i in range(10_000):
        cell = {"dataset": "minesweeper", "backbone": "gcn", "variant": ("original", "nsr")[i % 2], "split": i // 2}
        write(empty, document("heterophily", cell, {"test": 0.9 + i * 1e-6}))
    start = time.perf_counter()
    outcome = build(empty, tmp_path / "report")
    assert time.perf_counter() - start <= 60
    assert outcome.runs == 10_000
