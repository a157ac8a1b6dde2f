"""The report in a real browser: it draws itself without asking anybody for anything, and its slider and themes work."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import cli
from tests.evaluation.conftest import QUICK, table

HOSTILE = (
    "</script><script>window.broken = 1</script>",
    '<img src="http://example.com/x">',
    "a & b <!--title-->",
    '-here"',
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A report over captions that would break a careless page, opened; `asked` are the addresses that it wanted."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    folder = tmp_path_factory.mktemp("page")
    words = ["--prompts", str(table(folder, HOSTILE)), *QUICK, "--out"]
    assert cli.main(["evaluate", "sweep", *words, f"{folder}/runs", "--variants", "fp32", "fp32+2"]) == 0
    # All is drawn: the run is scored, and gets a page of its own.
    assert cli.main(["evaluate", *words, f"{folder}/runs/fp32", "--precision", "fp32"]) == 0
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error:
            pytest.skip("no Chromium here")
        opened = browser.new_page(color_scheme="dark", viewport={"width": 420, "height": 800})
        opened.asked, opened.wrong = [], []
        opened.on("request", lambda request: opened.asked.append(request.url))
        opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
        opened.alone = (folder / "runs" / "fp32" / "report.html").as_uri()
        opened.goto((folder / "runs" / "report.html").as_uri())
        yield opened
        browser.close()


def test_it_asks_nobody_and_runs_nothing_of_a_captions(page: Any) -> None:
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == [] and page.wrong == []
    assert page.evaluate("window.broken") is None
    shown = page.locator(".cell p").all_text_contents()
    assert shown == list(HOSTILE)


def test_its_slider_wipes_between_the_runs_that_are_chosen(page: Any) -> None:
    wipe = page.locator(".wipe").first
    under, over = wipe.locator("img").nth(0), wipe.locator("img").nth(1)
    page.select_option("#left", "0")
    page.select_option("#right", "1")
    assert under.get_attribute("src") != over.get_attribute("src")
    assert page.evaluate("document.querySelector('.wipe img').naturalWidth") == 32
    wipe.scroll_into_view_if_needed()
    box = wipe.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 20)
    assert float(wipe.evaluate("one => one.style.getPropertyValue('--x').replace('%', '')")) == pytest.approx(25, abs=2)
    slider = wipe.locator("input")
    slider.focus()
    before = float(slider.input_value())
    page.keyboard.press("ArrowRight")
    assert float(slider.input_value()) > before
    page.select_option("#right", "0")
    assert under.get_attribute("src") == over.get_attribute("src")


def test_it_follows_light_and_dark_and_fits_a_phone(page: Any) -> None:
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


@pytest.mark.long
def test_a_single_runs_page_shows_its_pictures_and_nothing_to_compare(page: Any) -> None:
    """Last in this file: it leaves the page of the comparison."""
    page.goto(page.alone)
    test_it_asks_nobody_and_runs_nothing_of_a_captions(page)
    assert page.evaluate("[...document.querySelectorAll('.cell img')].map((one) => one.naturalWidth)") == [32] * 4
    assert page.locator("select, input, .chip").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
