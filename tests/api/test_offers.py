"""The playground where the server asks for a key, where it has a text model, or LoRAs: in a real browser."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from playwright.sync_api import Browser, expect

from core.jobs.keyring import Keyring
from tests.api.easel import Easel
from tests.api.test_playground import PATIENCE_MS, ask
from tests.api.world import CARD, TEXT, Api, Worker, eventually, settings_of


def test_a_key_is_asked_for_and_kept(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    keyring = Keyring.of(settings)
    _, token = keyring.add("me")
    keyring.close()
    with Worker(settings) as worker, Api(settings) as api, Easel(worker):
        worker.announce()
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(api.url)
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key-input", token)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_attribute("data-is", "ready")
        expect(page.locator("#size option")).to_have_count(4)
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        context.close()


def test_a_text_model_brings_the_chat(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with Worker(settings) as worker, Worker(settings, "worker-2") as other, Api(settings) as api:
        worker.announce()
        other.announce(card=TEXT)
        eventually(lambda: len(api.client.get("/v1/models").json()["data"]) == 2)
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(api.url)
        page.click("#tab-chat")
        expect(page.locator("#chat textarea")).to_be_visible()
        expect(page.locator("#pictures-form")).to_be_hidden()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#prompt")).to_be_visible()
        assert page.locator("#model option").all_text_contents() == ["emoji-xl"]
        context.close()


def test_loras_can_be_named_where_there_are_any(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with Worker(settings) as worker, Api(settings) as api, Easel(worker) as easel:
        worker.announce(card=dataclasses.replace(CARD, loras=("ink", "oil")))
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(api.url)
        expect(page.locator("#state")).to_have_attribute("data-is", "ready")
        page.click("#more summary")
        expect(page.locator("#lora-hint")).to_have_text("Such as ink:0.8, several with commas.")
        assert page.locator("#loras option").evaluate_all("found => found.map((one) => one.value)") == ["ink", "oil"]
        page.fill("#lora", "gone:0.5")
        ask(page, "a cat")
        expect(page.locator("#error")).to_contain_text("gone")
        expect(page.locator("#lora")).to_have_class("wrong")
        page.fill("#lora", "ink:0.8")
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        assert [claim.parameters["lora"] for claim in easel.seen] == ["ink:0.8"]
        page.click(".tile.done .leaf")
        expect(page.locator("#box-facts")).to_contain_text("ink:0.8")
        context.close()
