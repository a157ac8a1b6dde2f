"""The playground where the server asks for a key, where it has a text model, or LoRAs: in a real browser."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from contract import students
from contract.card import TextOffer
from core.config import Settings
from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.web.browsing import PATIENCE_MS, ask, focuses, has, has_text, hides, mentions, shows
from tests.api.world import CARD, TEXT, Api, Worker, eventually, opened, token_of
from tests.api.writing import TextWorker
from tests.llm import stage


@pytest.fixture
def blank(browser: Browser) -> Iterator[Page]:
    """A page of a context of its own."""
    with browser.new_context(reduced_motion="reduce", permissions=["clipboard-read", "clipboard-write"]) as context:
        context.set_default_timeout(PATIENCE_MS)
        yield context.new_page()


def test_a_key_is_asked_for_and_kept(blank: Page, settings: Settings) -> None:
    token = token_of(settings)
    with opened(settings, CARD) as (api, worker), Easel(worker):
        blank.goto(api.url)
        shows(blank, "#key-dialog")
        blank.fill("#key-input", "dpt_another")
        blank.keyboard.press("Enter")
        has_text(blank, "#key-hint", "The service does not accept this key.")
        blank.fill("#key-input", token)
        blank.keyboard.press("Enter")
        expect(blank.locator("#state")).to_have_attribute("data-is", "ready")
        has(blank, 4, "#size option")
        ask(blank, "a cat", done=1)


def test_text_models_bring_the_chat_and_a_choice(blank: Page, settings: Settings) -> None:
    with ExitStack() as stack:
        worker, other, third = (stack.enter_context(Worker(settings, f"worker-{k}")) for k in range(3))
        api = stack.enter_context(Api(settings))
        worker.announce()
        other.announce(card=TEXT)
        third.announce(card=dataclasses.replace(TEXT, name="embedder", limits=TextOffer(generates=False)))
        eventually(lambda: len(api.models()) == 3)
        blank.goto(api.url)
        blank.click("#tab-chat")
        shows(blank, "#chat textarea")
        hides(blank, "#images-form", "#text-model")
        blank.keyboard.press("ArrowLeft")
        shows(blank, "#prompt")
        assert blank.locator("#model option").all_text_contents() == ["emoji-xl"]
        worker.announce(card=dataclasses.replace(TEXT, name="poet", expansion_instruction="Expand."))
        eventually(lambda: len(api.models()) == 4)
        blank.reload()
        blank.click("#tab-chat")
        mentions(blank, "#chat .about", "emoji-lm answers here")
        blank.select_option("#text-model", "poet")
        mentions(blank, "#chat .about", "poet is a prompt writer")
        has_text(blank, "#tab-chat", "Prompt writer")
        blank.fill("#chat textarea", "a cat")
        blank.keyboard.press("Enter")
        (id,) = eventually(worker.ids)
        assert worker.job(id).model == "poet"


def test_an_answer_is_stopped_copied_and_cleared(
    blank: Page, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a real engine, which is held in the middle of an answer until that was stopped."""
    model = dataclasses.replace(stage.small(), ends=frozenset())  # which does not end by itself
    with TextWorker(settings, model, kernels=stage.kernels()) as worker, Api(settings) as api:
        launch, go, launches = worker.runner.launch, threading.Event(), iter(range(10**6))

        def held(requests: Any) -> Any:
            if next(launches) > 15:
                go.wait(PATIENCE_MS / 1000)
            return launch(requests)

        monkeypatch.setattr(worker.runner, "launch", held)
        blank.goto(api.url)
        blank.click("#tab-chat")
        mentions(blank, "#chat .about", "answers here")
        blank.fill("#chat textarea", "a cat")
        blank.keyboard.press("Enter")
        line = blank.locator(".talk .assistant")
        expect(line).not_to_be_empty()
        expect(blank.get_by_role("button", name="Send")).to_be_hidden()
        blank.get_by_role("button", name="Stop").click()
        go.set()
        expect(blank.get_by_role("button", name="Send")).to_be_visible()
        with Worker(settings) as books:
            (id,) = books.ids()
            eventually(lambda: books.is_(id, JobState.CANCELLED))
        answer = line.evaluate("n => n.firstChild.textContent")
        blank.get_by_role("button", name="Copy", exact=True).click()
        expect(line).to_contain_text("Copied")
        assert blank.evaluate("navigator.clipboard.readText()") == answer
        blank.get_by_role("button", name="Clear").click()
        has(blank, 0, ".talk li")
        focuses(blank, "#chat textarea")


@pytest.mark.long
def test_what_a_card_offers_can_be_chosen(blank: Page, settings: Settings) -> None:
    """LoRAs, tuned plans and decoders; what one of two models alone offers is hidden for the other."""
    plans = {"fast": {"steps": 7, "guidance_interval": [0.0, 0.5], "deepcache": "off"}}
    card = dataclasses.replace(CARD, loras=("ink", "oil"), plans=plans, vaes=("full", "tiny"))
    with opened(settings, card) as (api, worker), Easel(worker) as easel, Worker(settings, "worker-2") as second:
        second.announce(card=dataclasses.replace(CARD, name="emoji-z"))
        eventually(lambda: len(api.models()) == 2)
        blank.goto(api.url)
        expect(blank.locator("#state")).to_have_attribute("data-is", "ready")
        blank.click("#more summary")
        blank.select_option("#model", "emoji-z")
        hides(blank, "#vae-field")
        blank.select_option("#model", "emoji-xl")
        hides(blank, "#lora-search")
        assert blank.locator("#lora-offered button").all_inner_texts() == ["+ ink", "+ oil"]
        blank.click("#lora-offered button >> nth=0")
        blank.fill("#lora-chips input", "0.8")
        blank.click("#lora-offered button")
        has(blank, 0, "#lora-offered button")
        has_text(blank, "#plan option", ["model default (off)", "off", "auto", "fast (2.5×)"])
        blank.select_option("#plan", "fast")
        blank.select_option("#vae", "tiny")
        worker.announce(card=dataclasses.replace(card, loras=("ink",)))
        eventually(lambda: api.get("/v1/models/emoji-xl").json()["diptych"]["loras"] == ["ink"])
        ask(blank, "a cat")
        has_text(blank, "#lora-field #error", "LoRA: there is no LoRA oil; it has ink")
        expect(blank.locator("#lora-field")).to_have_class(re.compile("wrong"))
        blank.click("[aria-label='Remove the LoRA oil']")
        ask(blank, "a cat", done=1)
        mentions(blank, ".tile.done", "plan fast")
        (claim,) = easel.seen
        expected = {"lora": "ink:0.8", "steps": 7, "guidance_interval": [0.0, 0.5], "deepcache": "off", "vae": "tiny"}
        assert expected.items() <= claim.parameters.items()
        blank.click(".tile.done .leaf")
        for fact in ("ink:0.8", "fast", "tiny"):
            mentions(blank, "#box-facts", fact)


@pytest.mark.long
def test_a_students_form_is_set_to_its_own_steps_and_guidance(blank: Page, settings: Settings) -> None:
    student = students.of_lora("sdxl_lightning_4step_lora")
    assert student is not None
    card = dataclasses.replace(CARD, defaults=student, loras=("lcm-lora",))
    with opened(settings, card) as (api, worker), Easel(worker) as easel:
        blank.goto(api.url)
        blank.click("#more summary")
        has_text(blank, "#steps-out", "4")
        has_text(blank, "#guidance-out", "off")
        ask(blank, "a cat", done=1)
        own = {"steps": 4, "guidance_scale": 1.0, "scheduler": "euler", "schedule_type": "trailing"}
        assert own.items() <= easel.last.items()
        blank.click("#lora-offered button")
        blank.select_option("#scheduler", "dpm++2m")
        blank.select_option("#schedule-type", "karras")
        blank.fill("#steps", "9")
        ask(blank, "a dog", done=2)
        chosen = {"steps": 9, "scheduler": "dpm++2m", "schedule_type": "karras"}
        assert chosen.items() <= easel.last.items()
        blank.click(".tile.done .leaf >> nth=0")
        mentions(blank, "#box-facts", "karras")
        blank.keyboard.press("Escape")
        blank.click(".tile.done .leaf >> nth=1")
        blank.click("#again")
        has(blank, 3, ".tile.done")
        assert own.items() <= easel.last.items()
