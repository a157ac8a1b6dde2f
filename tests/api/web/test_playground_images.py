"""The playground's input images, in a real browser: sources, masks, control images, image prompts, and what leaves it.

The worker draws from what a request says and brings, so that one image shows whether two requests were the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, expect

from contract.card import SizeRange
from contract.estimates import work_s
from contract.image_request import ImageRequest
from core.jobs.record import Claim
from tests.api.easel import Easel
from tests.api.pictures.test_edits import as_file
from tests.api.pictures.test_edits import pixels as noise
from tests.api.web.browsing import PATIENCE_MS, ask, has, has_text, hides, mentions, shows, visit, watched
from tests.api.world import CARD, Api, Worker, ok

KEY = "dpt_a_key_that_must_not_leave"
LORAS = ("ink", "oil", "sepia (v2)", *(f"style {k}" for k in range(9)))
OFFERED = dataclasses.replace(
    CARD,
    sizes=((64, 64), (128, 128), (96, 168)),
    size_range=SizeRange(8, 64, 256, 256 * 256),
    loras=LORAS,
    vaes=("full", "tiny"),
    upscalers=("nearest4",),
    refiners=("polish",),
    controls=("edges", "union"),
    preprocessors=("canny",),
    image_prompts=("face",),
    plans={"fast": {"steps": 7, "deepcache": "auto", "guidance_interval": [0.0, 0.5]}},
)


class Drafter(Easel):
    """Draws a colour that stands for all that a request says and brings, and keeps what a mask keeps."""

    def _picture(self, claim: Claim, k: int, side: int) -> bytes:  # type: ignore[override]
        p = {name: value for name, value in claim.parameters.items() if name not in ("n", "preview_every")}
        if p.get("deepcache") == "off":  # which is the default
            del p["deepcache"]
        p["seed"] += k
        colour = tuple(hashlib.sha256(json.dumps(p, sort_keys=True, default=str).encode()).digest()[:3])
        image = Image.new("RGB", (side, p["height"] if side == p["width"] else side), colour)
        edit = p.get("edit")
        if edit and edit.get("mask") and side == p["width"]:
            source, mask = (Image.open(io.BytesIO(self.worker.artifacts.get(edit[name]))) for name in ("image", "mask"))
            image = Image.composite(image, source.convert("RGB"), mask.convert("L"))
        return as_file(np.asarray(image))


@pytest.fixture(scope="module")
def easel(shared: Api) -> Iterator[Drafter]:
    with Worker(shared.settings) as worker, Drafter(worker) as easel:
        yield easel


def picture(seed: int, width: int = 64, height: int = 64, kind: str = "PNG") -> bytes:
    """Noise, so that no two pixels are alike by chance."""
    return as_file(noise(width, height, seed=seed), kind)


def bring(page: Page, role: str, data: bytes, name: str = "image.png", kind: str = "image/png") -> Locator:
    """Choose a file for a role, by the dialog; returns its item."""
    items = page.locator(f".source[data-role={role}]")
    count = items.count()
    with page.expect_file_chooser() as chooser:
        page.click(f"#add-{role}")
    chooser.value.set_files({"name": name, "mimeType": kind, "buffer": data})
    item = items.nth(count)  # not the last, which is another one until this file was read
    expect(item.locator(".thumb img")).to_be_visible()
    return item


def drawn(page: Page, count: int = 1) -> bytes:
    """The bytes of the newest image, once there are so many."""
    expect(page.locator(".tile.done")).to_have_count(count)
    return stored(page.locator(".tile.done img").first)


def draw(page: Page, prompt: str, count: int = 1) -> bytes:
    """Ask for an image; its bytes, once there are so many."""
    ask(page, prompt)
    return drawn(page, count)


def stored(image: Locator) -> bytes:
    """The bytes of the image of a tile."""
    return bytes(
        image.evaluate("async (n) => [...new Uint8Array(await n.closest('.tile').picture.blob.arrayBuffer())]")
    )


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def paint(page: Page, item: Locator) -> Locator:
    """Open the mask's dialog; returns its canvas."""
    item.get_by_role("button", name="mask").first.click()
    canvas = page.locator("#mask-canvas")
    expect(canvas).to_be_visible()
    expect(canvas).to_be_focused()
    return canvas


def edited(api: Api, files: dict[str, Any], **fields: str) -> bytes:
    """The first image of the API's own edit."""
    data = {"prompt": "a hat", "seed": "5", "response_format": "url", "steps": "20", **fields}
    answer = ok(api.client.post("/v1/images/edits", data=data, files=files))
    return api.get(answer.json()["data"][0]["url"]).content


# -- images in -----------------------------------------------------------------------------------------------------


@pytest.mark.quick(0, 2)
@pytest.mark.parametrize(("kind", "type"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("BMP", "image/bmp")])
def test_an_edit_is_the_apis_own(page: Page, shared: Api, kind: str, type: str) -> None:
    """From a file of each kind: those that the API takes as they are, others as the PNG of their pixels."""
    data = picture(1, 96, 64, kind)
    bring(page, "source", data, f"image.{kind.lower()}", type)
    expect(page.locator("#size")).to_have_value("auto")
    page.fill("#seed", "5")
    ask(page, "a hat")
    image = ("image.png", picture(1, 96, 64), "image/png") if kind == "BMP" else ("image", data, type)
    assert drawn(page) == edited(shared, {"image": image}, size="auto")


def test_outside_of_a_painted_mask_pixels_are_kept(page: Page, easel: Drafter) -> None:
    """Also after undo, erasing and a second look at the mask; what the browser sends is the API's convention."""
    data = picture(2, 128, 128)
    item = bring(page, "source", data)
    canvas = paint(page, item)
    page.fill("#mask-size", "20")
    box = canvas.bounding_box()
    assert box

    def stroke(*points: tuple[float, float]) -> None:
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        page.mouse.move(*places[0])
        page.mouse.down()
        for place in places[1:]:
            page.mouse.move(*place, steps=4)
        page.mouse.up()

    stroke((0.25, 0.25), (0.75, 0.25))
    stroke((0.1, 0.9), (0.9, 0.9))
    page.click("#mask-undo")
    page.check("#mask-erase", force=True)
    stroke((0.6, 0.0), (0.6, 0.5))
    page.click("#mask-save")
    hides(page, "#mask-dialog")
    expect(item.locator(".field", has_text="Strength").locator("output")).to_have_text("1")
    page.fill("#seed", "5")
    ask(page, "a hat")
    before, after = pixels(data), pixels(drawn(page))
    changed = (before != after).any(axis=2)
    assert changed[32, 40] and changed[32, 92], "what was painted"
    assert not changed[32, 77] and not changed[115].any(), "what was erased, and what was taken back"
    rows, columns = np.nonzero(changed)
    assert rows.min() >= 18 and rows.max() <= 46 and columns.min() >= 18 and columns.max() <= 110
    # It can be gone on with: nothing is lost, and inverting it swaps what is kept. However long its encoding takes.
    page.evaluate(
        "() => { const of = HTMLCanvasElement.prototype, encode = of.toBlob;"
        " of.toBlob = function (...rest) { setTimeout(() => encode.apply(this, rest), 500); }; }"
    )
    paint(page, item)
    page.click("#mask-invert")
    page.click("#mask-save")
    ask(page, "a hat")
    other = (before != pixels(drawn(page, 2))).any(axis=2)
    assert (changed ^ other).mean() == 1.0
    paint(page, item)
    page.click("#mask-clear")
    page.click("#mask-save")
    expect(item.get_by_role("button", name="Paint a mask")).to_be_visible()
    draw(page, "a hat", 3)
    assert "mask" not in easel.last["edit"] and easel.last["edit"]["strength"] == 0.8


@pytest.mark.long
def test_a_mask_is_painted_by_keys_and_by_touch(page: Page) -> None:
    item = bring(page, "source", picture(3))
    canvas = paint(page, item)
    covered = lambda: canvas.evaluate(  # noqa: E731
        "n => { const copy = new OffscreenCanvas(n.width, n.height).getContext('2d'); copy.drawImage(n, 0, 0);"
        " const {data} = copy.getImageData(0, 0, n.width, n.height);"
        " let sum = 0; for (let k = 3; k < data.length; k += 4) sum += data[k] > 127; return sum; }"
    )
    page.keyboard.press("Space")
    dot = covered()
    assert dot > 50
    for _ in range(4):
        page.keyboard.press("Shift+ArrowRight")
    assert covered() > dot
    page.keyboard.press("Control+z")
    canvas.dispatch_event(
        "pointerdown", {"pointerId": 7, "pointerType": "touch", "isPrimary": True, "clientX": 500, "clientY": 400}
    )
    canvas.dispatch_event("pointerup", {"pointerId": 7, "pointerType": "touch", "isPrimary": True})
    second = {"pointerId": 8, "pointerType": "touch", "isPrimary": False, "clientX": 600, "clientY": 500}
    touched = covered()
    canvas.dispatch_event("pointerdown", second)
    assert covered() == touched, "a second finger paints nothing"
    page.click("#mask-dialog button[value=cancel]")
    expect(item.get_by_role("button", name="Paint a mask")).to_be_focused()
    paint(page, item)
    page.keyboard.press("Space")
    page.focus("#mask-size")
    page.keyboard.press("Enter")
    expect(item.get_by_role("button", name="Edit mask")).to_be_focused()


def test_every_role_reaches_the_api(page: Page, shared: Api, easel: Drafter) -> None:
    """A source with outpaint and fit, control images with their fields, an image prompt: as by the API's form."""
    source, edges, face = picture(4, 96, 96), picture(5, 64, 64), picture(6, 80, 80)
    item = bring(page, "source", source)
    item.locator("summary").click()
    item.get_by_label("Fit to the size").select_option("crop")
    item.get_by_label("right", exact=True).fill("32")
    first = bring(page, "control", edges)
    expect(first.get_by_label("Preprocessor")).to_have_value("canny")
    first.get_by_label("Strength").fill("0.6")
    first.locator("summary").click()
    first.get_by_label("To step").fill("0.5")
    second = bring(page, "control", face)
    second.get_by_label("Model").select_option("union")
    second.get_by_label("Preprocessor").select_option("")
    second.locator("summary").click()
    second.get_by_label("Mode,").fill("3")
    bring(page, "prompt", face).get_by_label("Strength").fill("0.5")
    page.fill("#seed", "5")
    page.click("#more summary")
    page.select_option("#size", "128x128")
    page.select_option("#upscale", "nearest4")
    page.fill("#scale", "2")
    page.select_option("#refiner", "polish")
    ask(page, "a hat")
    control = [
        {"model": "edges", "preprocessor": "canny", "strength": 0.6, "end": 0.5}, {"model": "union", "mode": 3},
    ]  # fmt: skip
    expected = edited(
        shared,
        [("image", ("a.png", source)), ("control_image", ("b.png", edges)), ("control_image", ("c.png", face)),
         ("image_prompt", ("d.png", face))],
        size="128x128", outpaint='{"right": 32}', fit="crop", control=json.dumps(control),
        image_prompts='[{"model": "face", "strength": 0.5}]', upscale='{"model": "nearest4", "scale": 2}',
        refiner='{"model": "polish", "from": 0.8}',
    )  # fmt: skip
    assert drawn(page) == expected
    # Its images stay with its tile: the same again, and by another seed, also after the form was emptied and left.
    for label in ("source image", "control image", "control image", "image prompt"):
        page.get_by_label(f"Remove the {label}").first.click()
    page.reload()
    has(page, 1, ".tile.done")
    page.click(".tile.done .leaf")
    has(page, 4, "#box-sources img")
    page.click("#again")
    assert drawn(page, 2) == expected
    has(page, 4, ".source")
    assert {name for name in easel.last if name in ("edit", "control", "image_prompts")} == {
        "edit", "control", "image_prompts",
    }  # fmt: skip
    assert shared.get("/v1/files").json()["data"] == [], "what was uploaded for a job is deleted"


@pytest.mark.long
def test_an_image_of_the_gallery_becomes_a_source(page: Page, shared: Api) -> None:
    page.fill("#seed", "9")
    first = draw(page, "a cat")
    for role in ("source", "control", "prompt"):
        page.click(".tile.done .leaf >> nth=0")
        page.click(f"#use-{role}")
        shows(page, f".source[data-role={role}]")
    for role in ("control image", "image prompt"):
        page.get_by_label(f"Remove the {role}").click()
    page.fill("#seed", "5")
    ask(page, "a hat")
    assert drawn(page, 2) == edited(shared, {"image": ("a.png", first, "image/png")}, size="auto")


@pytest.mark.long
def test_images_are_dropped_and_pasted_and_kept(page: Page) -> None:
    """By events as a browser makes them; a reload keeps what is there, with its fields."""
    transfer = page.evaluate_handle(
        "(bytes) => { const t = new DataTransfer();"
        " t.items.add(new File([new Uint8Array(bytes)], 'a.png', {type: 'image/png'})); return t; }",
        list(picture(7)),
    )
    page.dispatch_event("#pictures", "dragover", {"dataTransfer": transfer})
    assert page.locator("body").get_attribute("data-dropping") == "any"
    page.dispatch_event("#pictures", "drop", {"dataTransfer": transfer})
    shows(page, ".source[data-role=source]")
    page.dispatch_event("#add-prompt", "drop", {"dataTransfer": transfer})
    shows(page, ".source[data-role=prompt]")
    page.evaluate(
        "(t) => document.querySelector('#prompt').dispatchEvent("
        "new ClipboardEvent('paste', {clipboardData: t, bubbles: true, cancelable: true}))",
        transfer,
    )
    # The source is there, so that the next role that is free takes what is pasted.
    shows(page, ".source[data-role=control]")
    page.locator(".source[data-role=source]").get_by_label("Strength").fill("0.35")
    page.wait_for_timeout(600)  # drafts are written a moment later
    page.reload()
    has(page, 3, ".source")
    expect(page.locator(".source[data-role=source] output").first).to_have_text("0.35")


@pytest.mark.long
def test_errors_stand_beside_their_field(page: Page) -> None:
    with page.expect_file_chooser() as chooser:
        page.click("#add-source")
    chooser.value.set_files({"name": "notes.png", "mimeType": "image/png", "buffer": b"no image"})
    has_text(
        page,
        "#sources #error",
        "notes.png: this browser cannot read it as an image. Save it as PNG, JPEG or WebP first.",
    )
    item = bring(page, "source", picture(8, 96, 64))
    item.locator("summary").click()
    item.get_by_label("Fit to the size").select_option("exact")
    page.click("#more summary")
    page.select_option("#size", "64x64")
    ask(page, "a hat")
    expect(item.locator("#error")).to_contain_text("Source image: is 96x64, and the picture 64x64")
    item.get_by_label("Fit to the size").select_option("contain")
    item.get_by_label("left", exact=True).fill("4097")
    page.click("#draw")
    expect(item.locator("#error")).to_contain_text("Outpaint: must be at most 4096")
    assert "GET /v1" not in page.inner_text("body")
    page.get_by_label("Remove the source image").click()  # and what stood beside it
    has(page, 0, "#error")
    page.click("#draw")
    drawn(page)


@pytest.mark.long
def test_what_the_api_does_not_take_is_reduced(page: Page, easel: Drafter) -> None:
    """A photo of more pixels than a file may have, on its side as cameras store it; it is sent upright."""
    stream = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    photo = Image.new("RGB", (3600, 5000), (200, 30, 30))
    photo.paste((30, 30, 200), (0, 2500, 3600, 5000))
    photo.save(stream, "JPEG", exif=turned)
    item = bring(page, "source", stream.getvalue(), "photo.jpg", "image/jpeg")
    expect(item.locator("small")).to_have_text("2413 × 1737, reduced from 5000 × 3600")
    draw(page, "a hat")
    source = pixels(easel.worker.artifacts.get(easel.last["edit"]["image"]))
    left, right = source[64, 10], source[64, 117]
    assert left[2] > 150 > left[0] and right[0] > 150 > right[2], "what was below is on the left"


def test_uploads_of_a_page_that_went_are_deleted(page: Page, shared: Api) -> None:
    answer = shared.client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("a.png", picture(17))})
    id = answer.json()["id"]
    page.evaluate("(id) => sessionStorage.setItem('diptych.uploads', JSON.stringify([id]))", id)
    page.reload()
    page.wait_for_function("() => sessionStorage.getItem('diptych.uploads') === '[]'")
    assert shared.get(f"/v1/files/{id}").status_code == 404


# -- what leaves the page ------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), min_size=1, max_size=60)
_TEXTS = _TEXT.map(str.strip).filter(bool)
_FORMS = st.fixed_dictionaries(
    {"prompt": _TEXTS, "n": st.sampled_from([1, 2, 4, 8])},
    optional={
        "negative_prompt": st.text("ab '\"&=#%+<>\\é語", min_size=1, max_size=20).map(str.strip).filter(bool),
        "seed": st.integers(0, 2**53 - 1), "steps": st.integers(1, 60),
        "size": st.sampled_from(["64x64", "96x168", "72x88"]),
        "guidance_scale": st.integers(0, 30).map(lambda half: half / 2), "scheduler": st.just("dpm++2m"),
        "schedule_type": st.sampled_from(["karras", "beta"]), "plan": st.sampled_from(["off", "auto", "fast"]),
        "vae": st.sampled_from(["full", "tiny"]), "output_format": st.sampled_from(["webp", "jpeg"]),
        "lora": st.lists(st.sampled_from(LORAS), unique=True, min_size=1, max_size=8).flatmap(
            lambda names: st.tuples(*(st.sampled_from(["", ":0.8", ":-0.35", ":3.5", ":0.333"]) for _ in names)).map(
                lambda scales: ",".join(map("".join, zip(names, scales, strict=True)))
            )
        ),
        "upscale": st.sampled_from([{"model": "nearest4"}, {"model": "nearest4", "scale": 2.5}]),
        "refiner": st.sampled_from([0.25, 0.8]).map(lambda share: {"model": "polish", "from": share}),
    },
)  # fmt: skip
_ROUND = """async (fields) => {
  const [form, share] = await Promise.all([import('/web/form.js'), import('/web/share.js')]);
  const left = form.fill(fields);
  const first = form.request().fields;
  const link = share.link(first);
  form.fill({});
  left.push(...form.fill(share.decode(new URL(link).hash)));
  return { left, first, second: form.request().fields, link };
}"""


@pytest.mark.long
def test_a_link_brings_the_whole_form(page: Page) -> None:
    """Property: a form that is filled in, made a link, emptied and filled in from the link is the same."""

    @given(_FORMS)
    def check(fields: dict[str, Any]) -> None:
        found = page.evaluate(_ROUND, fields)
        assert found["left"] == [] and found["first"] == found["second"]
        usual = {"steps": 20, "guidance_scale": 5}
        for name, value in fields.items():  # the model's own are left to a plan or a LoRA
            assert found["first"].get(name, usual.get(name)) == value, name
        assert KEY not in found["link"]

    check()


@pytest.mark.long
def test_a_link_is_copied_and_opened(page: Page, context: BrowserContext, shared: Api) -> None:
    prompt = "it's “a cat” & 100% <b>bold</b>\nnot #1"
    page.fill("#prompt", prompt)
    page.fill("#seed", "77")
    page.click("#more summary")
    page.fill("#lora-search", "sepia")
    page.keyboard.press("Enter")
    page.fill("#lora-chips input", "0.35")
    page.click("#form-link")
    has_text(page, "#notice", "Link copied.")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(f"{shared.url}/#") and KEY not in link
    other = context.new_page()
    wrong = watched(other)
    other.goto(link)
    expect(other.locator("#lora-chips .name")).to_have_text("sepia (v2)")
    assert other.input_value("#prompt") == prompt and other.input_value("#seed") == "77"
    assert other.url == f"{shared.url}/", "it is taken out of the address"
    expect(other.locator(".tile")).to_have_count(0)  # nothing is drawn unasked
    other.reload()
    expect(other.locator("#lora-chips output")).to_have_text("0.35")
    assert other.input_value("#prompt") == prompt, "it is kept over a reload"
    assert not wrong
    other.close()


HOSTILE = [
    "#prompt=<img src=x onerror=alert(1)>&model=<script>alert(1)</script>&lora=<svg/onload=alert(1)>:9",
    "#__proto__[polluted]=1&constructor=x&__proto__=y&toString=z&prompt=ok",
    "#prompt=%E0%A4%A&seed=1e400&steps=NaN&n=-1&guidance_scale=Infinity&size=99999999x1",
    "#size=1x1&scheduler=javascript:alert(1)&upscale=a:b:c&refiner=:1&vae=&plan=__proto__",
    "#diptych.key=dpt_mine&key=dpt_mine&Authorization=x&prompt=ok&webhook_url=http://x&type=edit&images=1",
    "#prompt=" + "x" * 70_000,
    "#prompt=a%00b%1b[31m&lora=" + "ink:1," * 200,
]


def test_hostile_links_are_harmless(page: Page) -> None:
    """They fill in text at most: no script runs, no prototype changes, the key stays, and the form still works."""
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    page.on("request", note)

    def check(fragment: str) -> None:
        page.evaluate("(hash) => { location.hash = hash; }", fragment)
        page.wait_for_function("() => true")
        found = page.evaluate(
            "async () => { const form = await import('/web/form.js'); return { polluted: {}.polluted ?? null,"
            " key: localStorage.getItem('diptych.key'), fields: form.request().fields,"
            " tags: document.querySelectorAll('img[src=x], svg[onload], body script').length }; }"
        )
        assert (found["polluted"], found["key"], found["tags"]) == (None, KEY, 0)
        fields = found["fields"]
        assert len(fields["prompt"]) <= 10_000 and 1 <= fields["n"] <= 8
        assert not re.search(r"[^\n\t\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f]", fields["prompt"]), "no control characters"
        assert fields["model"] == "emoji-xl" and fields["size"] in ("64x64", "128x128", "96x168")
        assert set(fields) <= {
            "prompt", "n", "steps", "guidance_scale", "preview_every", "model", "size", "seed", "lora",
            "negative_prompt",
        }  # fmt: skip

    for fragment in HOSTILE:
        check(fragment)
    settings(max_examples=15)(given(st.text(max_size=200).map("#".__add__))(check))()
    page.remove_listener("request", note)
    assert not [url for url in asked if not url.startswith((page.url.split("#")[0], "blob:"))]
    page.evaluate("location.hash = '#prompt=a%20cat&seed=3'")
    expect(page.locator("#prompt")).to_have_value("a cat")
    page.click("#draw")
    drawn(page)


def run(command: str, folder: Path) -> bytes:
    """Run a command as somebody does who pastes it, without proxies; returns the image that its answer names."""
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        capture_output=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "DIPTYCH_API_KEY": "x"},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "data" in answer, answer
    return httpx2.get(answer["data"][0]["url"]).content


@pytest.mark.long
def test_curl_draws_the_same(page: Page, tmp_path: Path) -> None:
    page.fill("#prompt", '@/etc/passwd it\'s a "cat" $HOME `id` \\ !x %s\n; <é語>')
    page.fill("#seed", "11")
    page.click("#draw")
    expected = drawn(page)
    page.click(".tile.done .leaf")
    page.click("#copy-curl")
    mentions(page, "#notice", "Command copied.")
    command = page.evaluate("navigator.clipboard.readText()")
    assert KEY not in command and "$DIPTYCH_API_KEY" in command
    assert run(command, tmp_path) == expected
    page.keyboard.press("Escape")


@pytest.mark.long
def test_curl_sends_the_images(page: Page, tmp_path: Path) -> None:
    """From the files that the page offers beside the command."""
    item = bring(page, "source", picture(12, 64, 64))
    paint(page, item)
    page.keyboard.press("Space")
    page.click("#mask-save")
    bring(page, "control", picture(13, 64, 64))
    page.fill("#seed", "11")
    expected = draw(page, "it's a hat")
    page.click("#form-curl")
    command = page.evaluate("navigator.clipboard.readText()")
    links = page.locator("#notice a")
    expect(links).to_have_text(["source-1.png", "mask-2.png", "control-3.png"])
    for k in range(3):
        with page.expect_download() as download:
            links.nth(k).click()
        download.value.save_as(tmp_path / download.value.suggested_filename)
    assert run(command, tmp_path) == expected


@pytest.mark.long
def test_all_are_downloaded_as_they_are(page: Page, tmp_path: Path) -> None:
    page.check("input[name=n][value='4']", force=True)
    page.fill("#seed", "21")
    draw(page, "a cat: Katze/猫 ..", 4)
    page.check("input[name=n][value='1']", force=True)
    draw(page, "a cat: Katze/猫 ..", 5)
    with page.expect_download() as download:
        page.click("#download-all")
    download.value.save_as(tmp_path / "all.zip")
    images = [stored(page.locator(".tile.done img").nth(k)) for k in range(5)]
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert [archive.read(name) for name in names] == images
        assert sorted(names) == sorted(
            [f"a-cat-Katze-猫-{seed}.png" for seed in range(21, 25)] + ["a-cat-Katze-猫-21-2.png"]
        )
        assert all(info.date_time >= (2020, 1, 1) for info in archive.infolist())


# -- words and costs -----------------------------------------------------------------------------------------------

_PLANS = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, 30), "guidance_interval": st.sampled_from([[0.0, 0.35], [0.25, 1.0]]),
        "deepcache": st.one_of(
            st.sampled_from(["off", "auto"]),
            st.fixed_dictionaries(
                {"interval": st.integers(1, 4), "depth": st.sampled_from(["block", "resnet"])},
                optional={"first": st.integers(0, 3), "last": st.integers(0, 3)},
            ),
        ),
        "vae": st.just("tiny"),
    },
)  # fmt: skip


@pytest.mark.long
def test_a_plans_speed_is_the_estimators(page: Page) -> None:
    """Property: what the page says of a plan is the ratio that the service's own estimate of work has."""
    costs = dataclasses.replace(
        OFFERED.costs, vae_tiny_s=0.02, shallow_row_step_s={"block": {"128x128": 0.01}, "resnet": {"64x64": 0.002}}
    )

    @given(_PLANS, st.sampled_from(["128x128", "64x64", "96x168"]), st.sampled_from([1.0, 5.0, 7.5]))
    def check(plan: dict[str, Any], size: str, guidance: float) -> None:
        card = dataclasses.replace(OFFERED, costs=costs, plans={"p": plan})
        fields = {"size": size, "guidance_scale": guidance}

        def seconds(name: str) -> float:
            return work_s(card, ImageRequest(prompt="x", plan=name, **fields).complete(card.offer))

        ratio = seconds("off") / seconds("p")
        data = dataclasses.asdict(card) | {"native_size": "128x128"}
        label = page.evaluate(
            "async ([card, fields]) => (await import('/web/cards.js')).planChoices(card, fields).at(-1)[1]",
            [data, fields],
        )
        assert label == ("p" if abs(ratio - 1) < 0.05 else f"p ({ratio:.1f}×)") or abs(ratio * 20 % 1 - 0.5) > 0.49

    check()


@pytest.mark.long
def test_a_long_prompt_is_counted(page: Page) -> None:
    page.fill("#prompt", "x" * 8_000)
    has_text(page, "#prompt-count", "8000 of 10000 characters")
    box = page.locator("#prompt").bounding_box()
    assert box and box["height"] <= 0.35 * 900
    assert page.locator("#prompt").evaluate(
        "n => n.scrollHeight > n.clientHeight && getComputedStyle(n).overflowY === 'auto'"
    )


@pytest.mark.long
def test_a_jobs_error_of_the_prompt_keeps_it(page: Page, easel: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(claim: Claim) -> None:
        easel.worker.store.leases.fail(
            claim.id, claim.attempt, "invalid_request", "prompt: has 840 tokens in 12 chunks"
        )

    monkeypatch.setattr(easel, "_draw", refuse)
    ask(page, "a cat")
    has_text(page, ".prompt-field #error", "Prompt: has 840 tokens in 12 chunks")
    mentions(page, ".tile.failed", "Prompt: has 840 tokens")
    has_text(page, "#bar-title", "No finished image yet")
    assert page.input_value("#prompt") == "a cat"
    monkeypatch.undo()
    page.click("#draw")
    drawn(page)
    has_text(page, "#bar-title", "1 image")


@pytest.mark.long
def test_refused_and_flagged_images(page: Page, easel: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = easel.worker.store.leases
    succeed = leases.succeed

    def check(id: str, attempt: int, result: dict[str, Any]) -> object:
        for image, action in zip(result["images"], ("tag", "blur", None), strict=True):
            image["content"] = {"flagged": action is not None, "labels": {"nsfw": 0.97}, "action": action}
        return succeed(id, attempt, result)

    monkeypatch.setattr(easel, "refused", {0})
    monkeypatch.setattr(leases, "succeed", check)
    page.check("input[name=n][value='4']", force=True)
    draw(page, "a cat", 3)
    has_text(page, "#told", "3 images are done. 1 refused.")
    has_text(page, "#bar-title", "3 images")
    mentions(page, ".tile.failed", "refused by this service's checker")
    has_text(page, ".flag", ["flagged by the checker", "blurred by the checker"])
    page.reload()
    has(page, 2, ".flag")
    page.click(".tile.done:has(.flag) .leaf")
    mentions(page, "#box-facts", "flagged by the checker, nsfw 0.97")
    page.keyboard.press("Escape")
    monkeypatch.undo()


def test_many_jobs_leave_connections(page: Page, easel: Drafter) -> None:
    """A browser opens six to a host: with more jobs under way the page still asks, draws and stops."""
    easel.go.clear()
    page.fill("#prompt", "a cat")
    for count in range(1, 10):
        page.press("#prompt", "Enter")
        expect(page.locator(".tile")).to_have_count(count)
    assert page.evaluate("fetch('/v1/models').then((answer) => answer.status)") == 200
    page.locator(".tile .stop").first.click()
    has(page, 8, ".tile")
    easel.go.set()
    drawn(page, 8)


def test_a_full_browser_is_told_of(page: Page) -> None:
    """The image is there as long as the page; what was kept can still be deleted."""
    draw(page, "a cat")
    page.evaluate(  # as it is where a disk is full: the request succeeds, and its transaction does not
        "() => { const { put } = IDBObjectStore.prototype; IDBObjectStore.prototype.put = function (...given) {"
        " const request = put.apply(this, given); request.onsuccess = () => this.transaction.abort();"
        " return request; }; }"
    )
    draw(page, "a dog", 2)
    mentions(page, "#notice", "This browser has no room for more images")
    page.locator(".tile.done .leaf").last.click()
    page.click("#remove")
    has_text(page, "#told", "The image is deleted.")  # of the store too, not only of the page
    page.reload()
    expect(page.locator("#state")).to_have_attribute("data-is", "ready")
    has(page, 0, ".tile")


@pytest.mark.long
def test_on_a_phone(browser: Browser, shared: Api, easel: Drafter) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    wrong = watched(page)
    visit(page, shared)
    expect(page.locator("#prompt")).not_to_be_focused()  # which would open the keyboard
    for hidden in page.locator(".by-key").all():
        expect(hidden).to_be_hidden()
    draw = page.locator("#draw-bar")
    box = draw.bounding_box()
    assert box and box["y"] + box["height"] <= 844 and box["height"] >= 44, "Draw is within reach"
    easel.go.clear()
    page.fill("#prompt", "a night sky")
    draw.tap()
    expect(page.locator(".tile.waits")).to_be_in_viewport(ratio=0.9)
    expect(page.locator("#prompt")).not_to_be_focused()
    easel.go.set()
    expect(page.locator(".tile.done")).to_be_in_viewport(ratio=0.9)
    page.locator(".tile.done .leaf").tap()
    close = page.locator("#box-close")
    contrast = close.evaluate(
        "n => { const of = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => { x /= 255;"
        " return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });"
        " return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };"
        " const s = getComputedStyle(n); const [a, b] = [of(s.color), of(s.backgroundColor)].sort();"
        " return (b + 0.05) / (a + 0.05); }"
    )
    assert contrast >= 7, "on a ground of its own, whatever the image"
    small = page.locator("#lightbox button:visible, #lightbox a:visible").evaluate_all(
        "all => all.filter((n) => n.getBoundingClientRect().height < 44).map((n) => n.textContent)"
    )
    assert small == []
    close.tap()
    assert page.locator("html").evaluate("n => n.scrollWidth") <= 390
    assert not wrong
    context.close()
