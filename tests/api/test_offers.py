"""The playground where the server asks for a key, where it has a text model, or LoRAs: in a real browser."""

from __future__ import annotations

import dataclasses
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from contract import students
from contract.card import TextOffer
from core.jobs.keyring import Keyring
from core.jobs.record import JobState
from tests.api.easel import Easel
from tests.api.test_playground import PATIENCE_MS, ask
from tests.api.world import CARD, TEXT, Api, Worker, eventually, opened, settings_of
from tests.api.writing import TextWorker
from tests.llm import stage


def visit(browser: Browser, api: Api) -> Page:
    """The page in a context of its own, which is the test's to close."""
    context = browser.new_context(reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(api.url)
    return page


def test_a_key_is_asked_for_and_kept(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    keyring = Keyring.of(settings)
    _, token = keyring.add("me")
    keyring.close()
    with opened(settings) as (api, worker), Easel(worker):
        worker.announce()
        page = visit(browser, api)
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key-input", "dpt_another")
        page.keyboard.press("Enter")
        expect(page.locator("#key-hint")).to_have_text("The service does not accept this key.")
        page.fill("#key-input", token)
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_have_attribute("data-is", "ready")
        expect(page.locator("#size option")).to_have_count(4)
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        page.context.close()


def test_text_models_bring_the_chat_and_a_choice(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with ExitStack() as stack:
        worker, other, third = (stack.enter_context(Worker(settings, f"worker-{k}")) for k in range(3))
        api = stack.enter_context(Api(settings))
        worker.announce()
        other.announce(card=TEXT)
        third.announce(card=dataclasses.replace(TEXT, name="embedder", limits=TextOffer(generates=False)))
        eventually(lambda: len(api.client.get("/v1/models").json()["data"]) == 3)
        page = visit(browser, api)
        page.click("#tab-chat")
        expect(page.locator("#chat textarea")).to_be_visible()
        expect(page.locator("#images-form")).to_be_hidden()
        expect(page.locator("#text-model")).to_be_hidden()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#prompt")).to_be_visible()
        assert page.locator("#model option").all_text_contents() == ["emoji-xl"]
        worker.announce(card=dataclasses.replace(TEXT, name="poet", expansion_instruction="Expand."))
        eventually(lambda: len(api.client.get("/v1/models").json()["data"]) == 4)
        page.reload()
        page.click("#tab-chat")
        expect(page.locator("#chat .about")).to_contain_text("emoji-lm answers here")
        page.select_option("#text-model", "poet")
        expect(page.locator("#chat .about")).to_contain_text("poet is a prompt writer")
        expect(page.locator("#tab-chat")).to_have_text("Prompt writer")
        page.fill("#chat textarea", "a cat")
        page.keyboard.press("Enter")
        (id,) = eventually(worker.ids)
        assert worker.job(id).model == "poet"
        page.context.close()


@pytest.mark.long
def test_a_model_that_writes_prompts_is_called_so(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings, dataclasses.replace(TEXT, expansion_instruction="Expand.")) as (api, _):
        page = visit(browser, api)
        expect(page.locator("#tab-chat")).to_have_text("Prompt writer")
        page.click("#tab-chat")
        expect(page.locator("#chat .about")).to_contain_text("emoji-lm is a prompt writer")
        page.context.close()


def test_an_answer_is_stopped_copied_and_cleared(
    browser: Browser, redis_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a real engine, which is held in the middle of an answer until that was stopped."""
    settings = settings_of(redis_url, folder)
    model = dataclasses.replace(stage.small(), ends=frozenset())  # which does not end by itself
    with TextWorker(settings, model, kernels=stage.kernels()) as worker, Api(settings) as api:
        launch, go, launches = worker.runner.launch, threading.Event(), iter(range(10**6))

        def held(requests: Any) -> Any:
            if next(launches) > 15:
                go.wait(PATIENCE_MS / 1000)
            return launch(requests)

        monkeypatch.setattr(worker.runner, "launch", held)
        page = visit(browser, api)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#tab-chat")
        expect(page.locator("#chat .about")).to_contain_text("answers here")
        page.fill("#chat textarea", "a cat")
        page.keyboard.press("Enter")
        line = page.locator(".talk .assistant")
        expect(line).not_to_be_empty()
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        page.get_by_role("button", name="Stop").click()
        go.set()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        with Worker(settings) as books:
            (id,) = books.ids()
            eventually(lambda: books.is_(id, JobState.CANCELLED))
        answer = line.evaluate("n => n.firstChild.textContent")
        page.get_by_role("button", name="Copy", exact=True).click()
        expect(line).to_contain_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == answer
        page.get_by_role("button", name="Clear").click()
        expect(page.locator(".talk li")).to_have_count(0)
        expect(page.locator("#chat textarea")).to_be_focused()
        page.context.close()


@pytest.mark.long
def test_loras_can_be_named_where_there_are_any(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    with opened(settings) as (api, worker), Easel(worker) as easel:
        worker.announce(card=dataclasses.replace(CARD, loras=("ink", "oil")))
        page = visit(browser, api)
        expect(page.locator("#state")).to_have_attribute("data-is", "ready")
        page.click("#more summary")
        expect(page.locator("#lora-search")).to_be_hidden()
        assert page.locator("#lora-offered button").all_inner_texts() == ["+ ink", "+ oil"]
        page.click("#lora-offered button >> nth=0")
        page.fill("#lora-chips input", "0.8")
        page.click("#lora-offered button")
        expect(page.locator("#lora-offered button")).to_have_count(0)
        worker.announce(card=dataclasses.replace(CARD, loras=("ink",)))
        eventually(lambda: api.client.get("/v1/models").json()["data"][0]["diptych"]["loras"] == ["ink"])
        ask(page, "a cat")
        expect(page.locator("#error")).to_have_text("LoRA: there is no LoRA oil; it has ink")
        expect(page.locator("#lora-field")).to_have_class(re.compile("wrong"))
        expect(page.locator("#lora-field #error")).to_be_visible()
        page.click("[aria-label='Remove the LoRA oil']")
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        assert [claim.parameters["lora"] for claim in easel.seen] == ["ink:0.8"]
        page.click(".tile.done .leaf")
        expect(page.locator("#box-facts")).to_contain_text("ink:0.8")
        page.context.close()


@pytest.mark.long
def test_a_students_form_is_set_to_its_own_steps_and_guidance(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    student = students.of_lora("sdxl_lightning_4step_lora")
    assert student is not None
    card = dataclasses.replace(CARD, defaults=student, loras=("lcm-lora",))
    with opened(settings) as (api, worker), Easel(worker) as easel:
        worker.announce(card=card)
        page = visit(browser, api)
        page.click("#more summary")
        expect(page.locator("#steps-out")).to_have_text("4")
        expect(page.locator("#guidance-out")).to_have_text("off")
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        made = easel.seen[-1].parameters
        assert (made["steps"], made["guidance_scale"], made["scheduler"]) == (4, 1.0, "euler")
        assert made["schedule_type"] == "trailing"
        page.click("#lora-offered button")
        page.select_option("#scheduler", "dpm++2m")
        page.select_option("#schedule-type", "karras")
        page.fill("#steps", "9")
        ask(page, "a dog")
        expect(page.locator(".tile.done")).to_have_count(2)
        made = easel.seen[-1].parameters
        assert (made["steps"], made["scheduler"], made["schedule_type"]) == (9, "dpm++2m", "karras")
        page.click(".tile.done .leaf >> nth=0")
        expect(page.locator("#box-facts")).to_contain_text("karras")
        page.keyboard.press("Escape")
        page.click(".tile.done .leaf >> nth=1")
        page.click("#again")
        expect(page.locator(".tile.done")).to_have_count(3)
        made = easel.seen[-1].parameters
        assert (made["steps"], made["scheduler"], made["schedule_type"]) == (4, "euler", "trailing")
        page.context.close()


@pytest.mark.long
def test_a_tuned_plan_can_be_chosen(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    card = dataclasses.replace(CARD, plans={"fast": {"steps": 7, "guidance_interval": [0.0, 0.5], "deepcache": "off"}})
    with opened(settings) as (api, worker), Easel(worker) as easel:
        worker.announce(card=card)
        page = visit(browser, api)
        page.click("#more summary")
        expect(page.locator("#plan option")).to_have_text(["model default (off)", "off", "auto", "fast (2.5×)"])
        page.select_option("#plan", "fast")
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        made = easel.seen[-1].parameters
        assert (made["steps"], made["guidance_interval"], made["deepcache"]) == (7, [0.0, 0.5], "off")
        expect(page.locator(".tile.done")).to_contain_text("plan fast")
        page.click(".tile.done .leaf")
        expect(page.locator("#box-facts")).to_contain_text("fast")
        page.context.close()


@pytest.mark.long
def test_a_tiny_decoder_can_be_chosen_where_there_is_one(browser: Browser, redis_url: str, folder: Path) -> None:
    settings = settings_of(redis_url, folder)
    other = dataclasses.replace(CARD, name="emoji-z")
    with (
        Worker(settings) as worker,
        Worker(settings, "worker-2") as second,
        Api(settings) as api,
        Easel(worker) as easel,
    ):
        worker.announce(card=dataclasses.replace(CARD, vaes=("full", "tiny")))
        second.announce(card=other)
        eventually(lambda: len(api.client.get("/v1/models").json()["data"]) == 2)
        page = visit(browser, api)
        expect(page.locator("#state")).to_have_attribute("data-is", "ready")
        page.click("#more summary")
        page.select_option("#model", "emoji-z")
        expect(page.locator("#vae-field")).to_be_hidden()
        page.select_option("#model", "emoji-xl")
        page.select_option("#vae", "tiny")
        ask(page, "a cat")
        expect(page.locator(".tile.done")).to_have_count(1)
        assert [claim.parameters.get("vae") for claim in easel.seen] == ["tiny"]
        page.click(".tile.done .leaf")
        expect(page.locator("#box-facts")).to_contain_text("tiny")
        page.context.close()
