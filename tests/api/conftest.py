"""Provides an API on a real Redis and a real port, per test or per module; world.Worker plays the workers.

Also a real browser: Chromium from the PATH, or Playwright's own. Without either, its tests are skipped.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, sync_playwright

from core.config import Settings
from deployment.redis import RedisServer
from tests.api.doors import House, Tenants, opened_house
from tests.api.easel import Easel
from tests.api.fixtures import easel
from tests.api.web.browsing import PATIENCE_MS, visit, watched
from tests.api.world import CARD, Api, Worker, client_of, opened, settings_of
from tests.servers import redis_server, redis_url

__all__ = ["easel", "redis_server", "redis_url"]


@pytest.fixture(scope="module")
def module_settings(
    request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    """Settings of an API of the module, with its `SETTINGS`."""
    given = {"max_queued": 1_000_000, **getattr(request.module, "SETTINGS", {})}
    return settings_of(redis_server.url, tmp_path_factory.mktemp("data"), **given)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, module_settings: Settings) -> Iterator[Api]:
    """One API with a ready worker, of the module's `OFFERED` or else `CARD`. Never flushed.

    For tests of a module that leave each other alone.
    """
    with opened(module_settings, getattr(request.module, "OFFERED", CARD)) as (api, _):
        yield api


@pytest.fixture(scope="module")
def house(module_settings: Settings) -> Iterator[House]:
    """One API with keys, of all doors, with a worker that draws and writes. Never flushed."""
    with opened_house(module_settings) as house:
        yield house


@pytest.fixture(scope="module")
def tenants(house: House) -> Tenants:
    return Tenants(house.key(), house.key(), house.key("admin"))


@pytest.fixture
def settings(redis_url: str, folder: Path) -> Settings:
    """Settings of an API of the test's own, over an empty Redis."""
    return settings_of(redis_url, folder)


@pytest.fixture
def alone(settings: Settings) -> Iterator[tuple[Api, Worker]]:
    """An API of the test's own over an empty Redis, and its worker, which is ready."""
    with opened(settings, CARD) as world:
        yield world


@pytest.fixture
def client(shared: Api) -> Iterator[openai.OpenAI]:
    with client_of(shared.url) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait."""
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        try:
            # No sandbox of its own: it needs rights that a container's root does not have.
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error:
            pytest.skip("there is no Chromium (apt install chromium, or playwright install chromium)")
        yield browser
        browser.close()


@pytest.fixture
def calls(shared: Api, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of child processes that read pictures, by function."""
    processes, counts = shared.server._service.pictures._processes, Counter[str]()
    call = processes.call

    def counted(function: str, *given: Any) -> Any:
        counts[function] += 1
        return call(function, *given)

    monkeypatch.setattr(processes, "call", counted)
    return counts


@pytest.fixture
def worker(shared: Api) -> Iterator[Worker]:
    """A second worker of `shared`, to be played by the test."""
    with Worker(shared.settings) as worker:
        yield worker


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    context.route("**/favicon.ico", lambda route: route.fulfill(status=204))  # of the API's own answers
    yield context
    context.close()


@pytest.fixture(scope="module")
def tab(context: BrowserContext) -> tuple[Page, list[str]]:
    """The page of all tests, and what goes wrong on it: each new one would be a process of the browser's."""
    page = context.new_page()
    return page, watched(page)


@pytest.fixture
def page(request: pytest.FixtureRequest, tab: tuple[Page, list[str]], shared: Api, easel: Easel) -> Iterator[Page]:
    """The page with nothing kept but the module's `KEY`. It says nothing on its console."""
    easel.step_s, easel.failing = 0.0, False
    easel.go.set(), easel.looked.set()
    page, wrong = tab
    page.goto(f"{shared.url}/healthz")  # of the same origin, without a script that would write meanwhile
    page.evaluate(
        "async (key) => { localStorage.clear(); sessionStorage.clear(); if (key) localStorage.setItem('diptych.key',"
        " key); await new Promise((done) => { const gone = indexedDB.deleteDatabase('diptych');"
        " gone.onsuccess = gone.onerror = done; }); }",
        getattr(request.module, "KEY", None),
    )
    wrong.clear()
    visit(page, shared)
    yield page
    seen = [*wrong]
    page.goto("about:blank")  # where no script goes on
    assert not seen
