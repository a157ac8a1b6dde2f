"""Tests that the page of the HTTP API has every endpoint, field and object of the OpenAPI document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.openapi_page import MARK, document, on_page_markdown, page
from tests.test_docs import ROOT


def names(schema: dict[str, Any]) -> Iterator[str]:
    """All field names in a schema, at any depth."""
    for key, value in schema.items():
        if key == "examples":
            continue
        if key == "properties":
            yield from value
        for part in value if isinstance(value, list) else value.values() if key == "properties" else [value]:
            if isinstance(part, dict):
                yield from names(part)


def test_it_has_every_endpoint_and_field() -> None:
    openapi = dict(document())
    text = page(openapi)
    sections = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    bodies = {
        f"{method.upper()} {path}": operation
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    }
    assert sections.keys() == bodies.keys() | openapi["components"]["schemas"].keys()
    for title, operation in {**bodies, **openapi["components"]["schemas"]}.items():
        told = set(re.findall(r"(\w+)(?:\[\])?`\*? \|", sections[title]))
        asked = names(operation.get("requestBody", operation))
        assert set(asked) <= told, title
    links = set(re.findall(r"\]\(#(\w+)\)", text))
    assert links <= {name.lower() for name in openapi["components"]["schemas"]}


def test_a_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    width = 0
    for line in page(document()).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not cells or not width or cells == width, line
        width = cells


def test_the_site_has_the_page() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text("utf-8")
    assert MARK in text and "### POST /v1/images/generations" in on_page_markdown(text)
    assert on_page_markdown("else") == "else"
    assert "- tests/openapi_page.py" in (ROOT / "mkdocs.yml").read_text("utf-8")
