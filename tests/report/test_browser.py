"""A real browser opens the page, at a desk and on a phone: everything shows, tables sort, links resolve."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from nsr.report.build import build

SIZES = {"desk": (1400, 1000), "phone": (390, 844)}
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
COMMITTED = Path(__file__).parents[2] / "results"


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return os.environ.get("NSR_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium`, or name one by NSR_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(results: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page from example results, from none, and from the committed ones."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "none").mkdir()
    sources = {"example": results, "empty": folder / "none", "committed": COMMITTED}
    return {name: build(source, folder / name).page for name, source in sources.items()}


@pytest.fixture(params=[(source, size) for source in ("example", "empty", "committed") for size in SIZES], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    source, size = request.param
    width, height = SIZES[size]
    opened = browser.new_page(viewport={"width": width, "height": height})
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("requestfailed", lambda asked: complaints.append(asked.url))
    opened.goto(pages[source].as_uri())
    yield opened
    opened.close()
    assert complaints == []


def test_the_page_fits_and_every_figure_shows(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    figures = page.locator("figure")
    assert figures.count() >= 8
    for i in range(figures.count()):
        drawn = figures.nth(i).locator("svg.chart, .not-yet")
        assert drawn.count() >= 1
        for j in range(drawn.count()):
            box = drawn.nth(j).bounding_box()
            assert box["width"] > 200
            assert box["height"] > 60


def test_tables_sort_both_ways(page: Any) -> None:
    table = page.locator("table.sortable").first
    heading = table.locator("thead button").nth(2)  # the operating points
    read = "rows => rows.map(row => Number(row.cells[2].dataset.v))"
    for _ in range(2):
        heading.click()
        values = table.locator("tbody tr").evaluate_all(read)
        order = heading.locator("xpath=..").get_attribute("aria-sort")
        assert values == sorted(values, reverse=order == "descending")
    assert order == "ascending"


def test_links_resolve(page: Any) -> None:
    links = set(page.locator("a[href]").evaluate_all("all => all.map(link => link.href)"))
    assert len(links) >= 10
    here = page.url
    for link in links:
        if link.startswith(here + "#"):
            assert page.locator(f"[id='{link.partition('#')[2]}']").count() == 1
        else:
            assert Path(unquote(urlsplit(link).path)).is_file(), link


def test_a_number_opens_its_runs(page: Any) -> None:
    values = page.locator("button.value")
    if values.count() == 0:
        assert page.get_by_text("not run").count() > 100  # then every cell says so
        return
    values.first.click()
    card = page.locator("[popover]:popover-open")
    assert card.count() == 1
    assert card.locator("li a").first.is_visible()
    assert "nsr run" in card.locator("code").first.inner_text()
    page.keyboard.press("Escape")
    assert page.locator("[popover]:popover-open").count() == 0


def test_dark_and_print(browser: Any, pages: dict[str, Path]) -> None:
    opened = browser.new_page(color_scheme="dark")
    opened.goto(pages["example"].as_uri())
    shade = "getComputedStyle(document.body).backgroundColor"
    assert opened.evaluate(shade) == "rgb(20, 23, 28)"
    opened.emulate_media(media="print")
    assert opened.evaluate(shade) == "rgb(255, 255, 255)"
    assert not opened.locator("nav").is_visible()
    opened.close()
