"""Writes the endpoints of the OpenAPI document into a page, when `make docs` builds the site: a hook of mkdocs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]
MARK = "<!-- openapi -->"
_FIRST = ("images", "jobs", "text", "batches", "models")  # of tags; others follow as they come
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}",
           "maxLength": "≤ {} characters", "maxItems": "≤ {} items"}  # fmt: skip


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the mark of a page by the endpoints. mkdocs calls it for each page."""
    return markdown.replace(MARK, page(document())) if MARK in markdown else markdown


@functools.cache
def document() -> Json:
    """Return the OpenAPI document that a service serves at /openapi.json."""
    from api.app import create_app
    from core.config import Settings

    return create_app(Settings(redis_url="redis://127.0.0.1:1/0")).openapi()


def page(openapi: Json) -> str:
    """Return a section for each endpoint, by tags, and one for each schema of responses."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).extend(endpoint(method, path, operation))
    ordered = sorted(by_tag, key=lambda tag: (*_FIRST, tag).index(tag))
    lines = [line for tag in ordered for line in (f"## {tag.capitalize()}", "", *by_tag[tag])]
    lines += ["## Objects in responses", ""]
    for name, schema in openapi["components"]["schemas"].items():
        lines += [f"### {name}", "", *paragraph(schema), *table(schema)]
    return "\n".join(lines)


def endpoint(method: str, path: str, operation: Json) -> Iterator[str]:
    """Yield the lines of an endpoint: what it does, what it takes and what it answers."""
    yield from (f"### {method.upper()} {path}", "", f"{operation['summary']}.".replace("?.", "?"), "")
    yield from paragraph(operation)
    if parameters := operation.get("parameters"):
        yield from ("| parameter | in | type | |", "|---|---|---|---|")
        for each in parameters:
            yield row(f"`{each['name']}`", each["in"], kind(each["schema"]), each.get("description", ""))
        yield ""
    for content_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from (f"Body, `{content_type}`:", "")
        schema = content["schema"]
        for each in schema.get("oneOf", [schema]):
            yield from table(each)
        if examples := schema.get("examples"):
            yield from (
                "For example:",
                "",
                f"```json\n{json.dumps(examples[0], indent=2, ensure_ascii=False)}\n```",
                "",
            )
    answers = [
        f"{status} {answer.get('description', '')}".strip() + "".join(sorted(objects(answer)))
        for status, answer in operation["responses"].items()
    ]
    yield from (f"Answers: {'; '.join(answers)}.", "")


def objects(answer: Json) -> set[str]:
    """Return the schemas of a response's bodies, as links."""
    bodies = answer.get("content", {}).values()
    return {f" ({kind(body['schema'])})" for body in bodies if "$ref" in body.get("schema", {})}


def paragraph(described: Json) -> list[str]:
    """Return a description as lines of Markdown."""
    text = described.get("description", "")
    return [text, ""] if text else []


def table(schema: Json) -> list[str]:
    """Return the table of a schema's fields; those of an object in it follow it, as `outer.inner`."""
    rows = list(fields(schema))
    return ["| field | type | |", "|---|---|---|", *rows, ""] if rows else []


def fields(schema: Json, prefix: str = "") -> Iterator[str]:
    """Yield the rows of a schema's fields."""
    required = schema.get("required", [])
    for name, each in schema.get("properties", {}).items():
        yield row(f"`{prefix}{name}`{'*' if name in required else ''}", kind(each), each.get("description", ""))
        yield from inner(each, f"{prefix}{name}")


def inner(schema: Json, prefix: str) -> Iterator[str]:
    """Yield the rows of the objects that a field may be, or hold."""
    yield from fields(schema, f"{prefix}.")
    for choice in ("anyOf", "oneOf"):
        for part in schema.get(choice, []):
            yield from inner(part, prefix)
    if "items" in schema:
        yield from inner(schema["items"], f"{prefix}[]")


def kind(schema: Json) -> str:
    """Return a schema's type in words, with its bounds and default."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            parts = [kind(part) for part in schema[choice] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts)) + default(schema)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")])) + default(schema)
    name = str(schema.get("type", "any"))
    if name == "array":
        name = f"list of {kind(schema.get('items', {}))}"
    bounds = [words.format(number(schema[key])) for key, words in _BOUNDS.items() if schema.get(key) is not None]
    return ", ".join([name, *bounds]) + default(schema)


def number(value: float) -> str:
    """Return a bound in words; a large one as it is, without a loss of digits."""
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def default(schema: Json) -> str:
    """Return a schema's default in words; "" without one."""
    return f"; default `{schema['default']}`" if schema.get("default") not in (None, "") else ""


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"
