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
from tests.api.world import Api, Worker

PATIENCE_MS = 30_000.0
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def easel(shared: Api) -> Iterator[Easel]:
    with Worker(shared.settings) as worker, Easel(worker) as easel:
        yield easel


@pytest.fixture
def page(browser: Browser, shared: Api, easel: Easel) -> Iterator[Page]:
    """The page as somebody sees it for the first time. It may say nothing wrong on its console."""
    easel.step_s, easel.failing = 0.0, False
    easel.go.set()
    context = browser.new_context(viewport={"width": 1280, "height": 820}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(shared.url)
    expect(page.locator("#state")).to_have_attribute("data-is", "ready")
    expect(page.locator("#scheduler")).to_have_value("euler")  # from the model's card, which comes after that
    yield page
    assert not wrong
    context.close()


def ask(page: Page, prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def test_it_begins_calmly(page: Page) -> None:
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator("#bar, #tabs, #key")).to_have_count(3)
    for hidden in ("#bar", "#tabs", "#key", "#error", "#chat"):
        expect(page.locator(hidden)).to_be_hidden()
    assert page.locator("#size option").all_text_contents() == ["64 × 64", "96 × 168", "128 × 128", "168 × 96"]
    assert page.input_value("#size") == "128x128" and page.input_value("#scheduler") == "euler"


def test_a_picture_comes_step_by_step_and_stays(page: Page, easel: Easel) -> None:
    easel.step_s = 0.05
    page.check("input[name=n][value='2']", force=True)
    ask(page, "a red heart")
    tiles = page.locator(".tile")
    expect(tiles).to_have_count(2)
    for k in range(2):
        expect(tiles.nth(k).locator("img.look")).to_be_visible()
    expect(tiles.first.locator(".progress")).to_contain_text(re.compile(r"step \d+ of 20|finishing"))
    expect(page.locator(".tile.done")).to_have_count(2)
    claim = easel.seen[-1]
    assert claim.parameters["preview_every"] == 2 and claim.parameters["n"] == 2
    expect(page.locator("#told")).to_have_text("2 images are done.")
    page.reload()
    expect(page.locator(".tile.done")).to_have_count(2)
    assert all(page.locator(".tile.done img").nth(k).evaluate("image => image.naturalWidth") for k in range(2))


@pytest.mark.long
def test_the_same_again_and_another(page: Page, easel: Easel) -> None:
    page.fill("#seed", "77")
    ask(page, "a blue whale")
    expect(page.locator(".tile.done")).to_have_count(1)
    page.click(".tile.done .leaf")
    box = page.locator("#lightbox")
    expect(box).to_contain_text("a blue whale")
    expect(box.locator("dd").first).to_have_text("77")
    page.click("#again")
    expect(page.locator(".tile.done")).to_have_count(2)
    first, second = (claim.parameters for claim in easel.seen[-2:])
    assert second.pop("deepcache") == "off" and first == second, "down to the last field, and what was the worker's"
    page.click(".tile.done .leaf >> nth=0")
    page.keyboard.press("v")
    expect(page.locator(".tile.done")).to_have_count(3)
    assert easel.seen[-1].parameters["seed"] != 77 and easel.seen[-1].parameters["prompt"] == "a blue whale"


def test_the_queue_is_told_and_left(page: Page, easel: Easel, shared: Api) -> None:
    easel.go.clear()
    ahead = shared.order(priority=0)
    ask(page, "a cactus")
    words = page.locator(".tile .progress")
    expect(words).to_contain_text(re.compile(r"1 ahead, (a moment|about \d+ s)"))
    page.focus(".tile .leaf")
    page.keyboard.press("Escape")
    expect(page.locator(".tile")).to_have_count(0)
    expect(page.locator("#empty")).to_be_visible()
    with Worker(shared.settings) as worker:
        cancelled = [id for id in worker.ids() if worker.job(id).parameters["prompt"] == "a cactus"]
        assert [worker.job(id).state.value for id in cancelled] == ["cancelled"]
        worker.store.cancel(ahead)


def test_what_is_under_way_is_found_again(page: Page, easel: Easel) -> None:
    easel.go.clear()
    ask(page, "a sunflower")
    expect(page.locator(".tile.waits")).to_have_count(1)
    page.reload()
    expect(page.locator(".tile.waits")).to_contain_text("a sunflower")
    easel.go.set()
    expect(page.locator(".tile.done")).to_have_count(1)


def test_errors_are_told_where_they_belong(page: Page, easel: Easel) -> None:
    page.press("#prompt", "Enter")
    expect(page.locator("#error")).to_have_text("Enter a prompt first.")
    page.fill("#seed", "many")
    ask(page, "a cat")
    expect(page.locator("#error")).to_contain_text("A seed is a whole number")
    expect(page.locator("#seed")).to_have_class("wrong")
    page.fill("#seed", "")
    page.fill("#prompt", "x" * 10_001)
    page.click("#draw")
    expect(page.locator("#error")).to_contain_text("Prompt: has 10001 characters")
    easel.failing = True
    ask(page, "a cat")
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator(".tile.failed")).to_contain_text("the engine failed at this job")
    page.click(".tile.failed .stop")
    expect(page.locator(".tile")).to_have_count(0)


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
    expect(page.locator(".side .tile.done")).to_have_count(8)
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
        expect(page.locator(".side .tile.done")).to_have_count(8)
    page.locator(".side .leaf").nth(2).focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".side .leaf").nth(4)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#box-facts")).to_contain_text(re.compile(r"Job took\d+\.\d s for 4 images"))
    page.keyboard.press("Delete")
    expect(page.locator("#box-facts")).to_contain_text("fp32 + DeepCache")
    page.keyboard.press("Delete")
    expect(page.locator(".side-seed")).to_have_text(["seed 71", "seed 72", "seed 74"])


@pytest.mark.long
def test_by_keyboard_alone(page: Page) -> None:
    for prompt in ("one", "two", "three"):
        ask(page, prompt)
        expect(page.locator(".tile.done .caption b").first).to_have_text(prompt)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("#help-dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    page.focus(".tile .leaf >> nth=0")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".leaf").nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#box-title")).to_have_text("two")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#box-title")).to_have_text("one")
    page.keyboard.press("Delete")
    expect(page.locator("#box-title")).to_have_text("two")
    page.keyboard.press("Escape")
    expect(page.locator("#lightbox")).to_be_hidden()
    expect(page.locator(".leaf").nth(1)).to_be_focused()
    expect(page.locator(".tile")).to_have_count(2)


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
    ask(page, "a cat")
    expect(page.locator(".tile.done")).to_have_count(1)
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
        answer = shared.client.get("/" if name == "index.html" else f"/web/{name}")
        assert answer.status_code == 200 and answer.content == data
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        again = shared.client.get(answer.url.path, headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
    for path in ("/web/", "/web/app.py", "/web/..%2fapp.py", "/web/%2e%2e%2fapp.py"):
        assert shared.client.get(path).status_code == 404


def test_the_reference_asks_no_other_host_and_calls_the_api(browser: Browser, shared: Api) -> None:
    """Swagger UI from the package, in a browser that reaches this server alone, under a policy that names no other."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    context.route(lambda url: not url.startswith((shared.url, "data:")), lambda route: route.abort())
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    answer = page.goto(f"{shared.url}/docs")
    assert answer is not None
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy and "unsafe" not in policy
    expect(page.locator(".opblock")).to_have_count(
        sum(len(path) for path in shared.client.get("/openapi.json").json()["paths"].values())
    )
    block = page.locator(".opblock-get", has=page.locator('[data-path="/v1/models"]'))
    block.locator(".opblock-summary").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    expect(block.locator(".live-responses-table .response-col_status")).to_contain_text(["200"])
    assert page.locator(".opblock-summary-method").first.evaluate("n => getComputedStyle(n).fontWeight") == "700"
    assert {url for url in asked if not url.startswith(("data:", "blob:"))} >= {f"{shared.url}/openapi.json"}
    assert [url for url in asked if not url.startswith((shared.url, "data:"))] == [] and wrong == []
    assert shared.client.get("/redoc").status_code == 404
    context.close()
