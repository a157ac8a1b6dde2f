"""The playground's page as somebody uses it: what it shows, and what goes wrong on it."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.api.world import Api

PATIENCE_MS = 60_000.0
expect.set_options(timeout=PATIENCE_MS)

Text = str | re.Pattern[str] | list[str]


def has_text(page: Page, selector: str, text: Text) -> None:
    expect(page.locator(selector)).to_have_text(text)


def mentions(page: Page, selector: str, text: Text) -> None:
    expect(page.locator(selector)).to_contain_text(text)


def has(page: Page, count: int, selector: str) -> None:
    expect(page.locator(selector)).to_have_count(count)


def shows(page: Page, *selectors: str) -> None:
    for selector in selectors:
        expect(page.locator(selector)).to_be_visible()


def hides(page: Page, *selectors: str) -> None:
    for selector in selectors:
        expect(page.locator(selector)).to_be_hidden()


def focuses(page: Page, selector: str) -> None:
    expect(page.locator(selector)).to_be_focused()


def watched(page: Page) -> list[str]:
    """What goes wrong on a page from now on. That the service refuses a request is not wrong."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda said: (
            wrong.append(said.text) if said.type in ("error", "warning") and "status of 400" not in said.text else None
        ),
    )
    page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
    return wrong


def visit(page: Page, api: Api) -> None:
    page.goto(api.url)
    expect(page.locator("#state")).to_have_attribute("data-is", "ready")
    expect(page.locator("#plan-hint")).not_to_be_empty()


def ask(page: Page, prompt: str, done: int = 0) -> None:
    """Ask for a picture, and wait until there are so many."""
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    if done:
        has(page, done, ".tile.done")
