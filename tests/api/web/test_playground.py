"""The playground, in a real browser: drawing with previews, the queue, the gallery, keys, errors, keyboard, themes.

What else the server may offer, or ask for, is in test_offers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from api.playground import _FILES
from tests.api.easel import Easel
from tests.api.web.browsing import PATIENCE_MS, ask, focuses, has, has_text, hides, mentions, shows, watched
from tests.api.world import Api, Worker


@pytest.fixture(scope="module")
def easel(shared: Api) -> Iterator[Easel]:
    with Worker(shared.settings) as worker, Easel(worker) as easel:
        yield easel


def test_a_first_visit(page: Page, easel: Easel) -> None:
    """It begins calmly; images come step by step, and stay."""
    focuses(page, "#prompt")
    shows(page, "#empty")
    hides(page, "#bar", "#tabs", "#key", "#error", "#chat")
    has(page, 3, "#bar, #tabs, #key")
    assert page.locator("#size option").all_text_contents() == ["64 × 64", "96 × 168", "128 × 128", "168 × 96"]
    assert page.input_value("#size") == "128x128" and page.input_value("#scheduler") == "euler"
    easel.looked.clear()
    page.check("input[name=n][value='2']", force=True)
    ask(page, "a red heart")
    tiles = page.locator(".tile")
    for k in range(2):
        expect(tiles.nth(k).locator("img.look")).to_be_visible()
    expect(tiles.first.locator(".progress")).to_contain_text(re.compile(r"step \d+ of 20|finishing"))
    easel.looked.set()
    has(page, 2, ".tile.done")
    assert easel.last["preview_every"] == easel.last["n"] == 2
    has_text(page, "#told", "2 images are done.")
    page.reload()
    has(page, 2, ".tile.done")
    assert all(page.locator(".tile.done img").nth(k).evaluate("image => image.naturalWidth") for k in range(2))


def test_the_queue_is_told_found_again_and_left(page: Page, easel: Easel, shared: Api) -> None:
    easel.go.clear()
    ahead = shared.order(priority=0)
    ask(page, "a sunflower")
    mentions(page, ".tile .progress", re.compile(r"1 ahead, (a moment|about \d+ s)"))
    page.reload()
    mentions(page, ".tile.waits", "a sunflower")
    ask(page, "a cactus")
    has(page, 2, ".tile")
    page.locator(".tile", has_text="a cactus").locator(".leaf").focus()
    page.keyboard.press("Escape")
    has(page, 1, ".tile")
    with Worker(shared.settings) as worker:
        jobs = [worker.job(id) for id in worker.ids()]
        assert [job.state for job in jobs if job.parameters["prompt"] == "a cactus"] == ["cancelled"]
        worker.store.cancel(ahead)
    easel.go.set()
    has(page, 1, ".tile.done")


def test_errors_are_told_where_they_belong(page: Page, easel: Easel) -> None:
    page.press("#prompt", "Enter")
    has_text(page, "#error", "Enter a prompt first.")
    page.fill("#seed", "many")
    ask(page, "a cat")
    mentions(page, "#error", "A seed is a whole number")
    expect(page.locator("#seed")).to_have_class("wrong")
    page.fill("#seed", "")
    page.fill("#prompt", "😀" * 10_001)
    page.click("#draw")
    mentions(page, ".prompt-field #error", "Prompt: has 10001 characters; the model reads at most 10000")
    easel.failing = True
    ask(page, "a cat")
    hides(page, "#error")
    mentions(page, ".tile.failed", "the engine failed at this job")
    page.click(".tile.failed .stop")
    has(page, 0, ".tile")


@pytest.mark.long
def test_side_by_side(page: Page, easel: Easel) -> None:
    """A row for each seed and a column for each variant, also after a reload, and less what is deleted."""
    boxes = page.locator("#variants label")
    assert boxes.all_inner_texts() == ["fp32", "fp32 + DeepCache"]
    for k in range(2):
        boxes.nth(k).click()
    page.check("input[name=n][value='4']", force=True)
    page.fill("#seed", "71")
    ask(page, "a rocket")
    has(page, 8, ".side .tile.done")
    one, other = (claim.parameters for claim in easel.seen[-2:])
    assert one["seed"] == other["seed"] and {one.get("deepcache"), other.get("deepcache")} == {"off", "auto"}
    plain, cached = "fp32", "fp32 + DeepCache"
    rows = [(f"a rocket, {label}, seed {seed}, 20 steps") for seed in range(71, 75) for label in (plain, cached)]
    for _ in range(2):
        leaves = page.locator(".side .tile.done .leaf")
        assert leaves.evaluate_all("all => all.map((leaf) => leaf.getAttribute('aria-label'))") == rows
        assert page.locator(".side-seed").all_inner_texts() == [f"seed {seed}" for seed in range(71, 75)]
        boxes_at = [leaves.nth(k).bounding_box() for k in range(8)]
        heads = [page.locator(".side-heads span").nth(k).bounding_box() for k in (1, 2)]
        for k, box in enumerate(boxes_at):
            head, beside = heads[k % 2], boxes_at[k - k % 2]
            assert box and head and beside and box["x"] == head["x"] and box["y"] == beside["y"]
        page.reload()
        has(page, 8, ".side .tile.done")
    page.locator(".side .leaf").nth(2).focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".side .leaf").nth(4)).to_be_focused()
    page.keyboard.press("Enter")
    mentions(page, "#box-facts", re.compile(r"Job took\d+\.\d s for 4 images"))
    page.keyboard.press("Delete")
    mentions(page, "#box-facts", "fp32 + DeepCache")
    page.keyboard.press("Delete")
    has_text(page, ".side-seed", ["seed 71", "seed 72", "seed 74"])


@pytest.mark.long
def test_by_keyboard_alone(page: Page, easel: Easel) -> None:
    """The gallery, its images at large, the same again and another."""
    page.fill("#seed", "77")
    for k, prompt in enumerate(("one", "two", "three")):
        ask(page, prompt, done=k + 1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    shows(page, "#help-dialog")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    focuses(page, "#prompt")
    page.focus(".tile .leaf >> nth=0")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".leaf").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    has_text(page, "#box-title", "two")
    page.keyboard.press("ArrowRight")
    has_text(page, "#box-title", "one")
    expect(page.locator("#lightbox dd").first).to_have_text("77")
    page.keyboard.press("Delete")
    has_text(page, "#box-title", "two")
    page.keyboard.press("Escape")
    hides(page, "#lightbox")
    expect(page.locator(".leaf").nth(1)).to_be_focused()
    has(page, 2, ".tile")
    page.keyboard.press("Enter")
    page.click("#again")
    has(page, 3, ".tile.done")
    again, first = easel.last, easel.seen[-3].parameters
    assert again.pop("deepcache") == "off" and again == first, "down to the last field, and what was the worker's"
    page.click(".tile.done .leaf >> nth=0")
    page.keyboard.press("v")
    has(page, 4, ".tile.done")
    assert easel.last["seed"] != 77 and easel.last["prompt"] == "two"


@pytest.mark.long
def test_light_and_dark(page: Page) -> None:
    colour = lambda: page.evaluate_handle("document.body").evaluate(  # noqa: E731
        "() => getComputedStyle(document.documentElement).backgroundColor"
    )
    page.emulate_media(color_scheme="light")
    light = colour()
    page.emulate_media(color_scheme="dark")
    dark = colour()
    assert light != dark
    page.click("#theme")
    assert colour() == light
    page.reload()
    assert colour() == light, "a choice is kept"


@pytest.mark.long
def test_everything_can_be_named(page: Page) -> None:
    """What has a role has a name; what is a field has a label; nothing is wider than a telephone."""
    ask(page, "a cat", done=1)
    page.click("#more summary")
    for node in page.locator("button:visible, input:visible, select:visible, textarea:visible, a:visible").all():
        name = node.evaluate(
            "n => n.getAttribute('aria-label') || n.labels?.[0]?.textContent.trim() || n.textContent.trim()"
        )
        assert name, node
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.locator("html").evaluate("n => n.scrollWidth") <= 360


def test_nothing_comes_from_elsewhere(shared: Api) -> None:
    for name, data in _FILES.items():
        if "swagger-ui" not in name:  # whose texts name many; what it asks for is looked at in a browser, below
            assert not re.search(r"(?<!xmlns=\")https?://", data.decode()), name
        answer = shared.get("/" if name == "index.html" else f"/web/{name}")
        assert answer.status_code == 200 and answer.content == data
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        again = shared.get(answer.url.path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
    for path in ("/web/", "/web/app.py", "/web/..%2fapp.py", "/web/%2e%2e%2fapp.py"):
        assert shared.get(path).status_code == 404


def test_the_reference_asks_no_other_host_and_calls_the_api(browser: Browser, shared: Api) -> None:
    """Swagger UI from the package, in a browser that reaches this server alone, under a policy that names no other."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    context.route(lambda url: not url.startswith((shared.url, "data:")), lambda route: route.abort())
    page = context.new_page()
    wrong = watched(page)
    answer = page.goto(f"{shared.url}/docs")
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy and "unsafe" not in policy
    expect(page.locator(".opblock")).to_have_count(
        sum(len(path) for path in shared.get("/openapi.json").json()["paths"].values())
    )
    block = page.locator(".opblock-get", has=page.locator('[data-path="/v1/models"]'))
    block.locator(".opblock-summary").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    expect(block.locator(".live-responses-table .response-col_status")).to_contain_text(["200"])
    assert page.locator(".opblock-summary-method").first.evaluate("n => getComputedStyle(n).fontWeight") == "700"
    assert {url for url in asked if not url.startswith(("data:", "blob:"))} >= {f"{shared.url}/openapi.json"}
    assert [url for url in asked if not url.startswith((shared.url, "data:"))] == [] and wrong == []
    assert shared.get("/redoc").status_code == 404
    context.close()
