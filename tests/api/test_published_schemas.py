"""The published document against the service: a body by its schema has the right form, and the events of a stream are
its endpoint's.

Goes over all operations of the document, so that a new one is covered by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.pictures.test_conditions import inline
from tests.api.pictures.test_edits import pixels
from tests.api.test_openapi import TEXT, Document
from tests.api.world import PATIENCE_S, SERVE, Worker, ok, process, settings_of

CASES = 6  # of an operation
WRONG_FORM = {"invalid_type", "unknown_parameter", "missing_required_parameter", "invalid_body", "repeated_field"}
"""Codes of errors that the schema rules out; what a model does not offer has others."""
BETWEEN_FIELDS = (
    "width", "height", "input.image", "init_images", "messages.content", "messages.content.text",
    "messages.content.refusal", "input.content", "input.content.text", "input.content.refusal", "input.output.text",
)  # fmt: skip
"""Fields that are required or not by what others are, which schemas do not say."""
SOUND = {"prompt": "a cat", "inputs": "a cat", "model": "emoji-xl", "version": "emoji-xl"}
"""Values in place of drawn ones, which would be refused for their content before the form of others is looked at."""
OPEN = {"input": ("prompt",), "parameters": ()}
"""Objects whose schema names a part of what is taken, and that part."""
PICTURE = inline(pixels())["image_url"]
PICTURES = dict.fromkeys(("image", "input_image", "mask", "image_url"), PICTURE)
PREVIEWED: dict[str, Any] = {"prompt": "a cat", "steps": 6, "partial_images": 2, "stream": True}
STREAMS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "POST /v1/images/generations": (PREVIEWED, {"image_generation.partial_image", "image_generation.completed"}),
    "POST /v1/images/edits": (
        {**PREVIEWED, "images": [{"image_url": PICTURE}]},
        {"image_edit.partial_image", "image_edit.completed"},
    ),
    "GET /v1/jobs/{id}/events": ({}, {*JobState, "progress"}),
    "GET /v1/predictions/{id}/stream": ({}, {"logs", "output", "error", "done"}),
}
"""The operations that stream but those of texts: a body that makes them, and the names of their events."""


@pytest.fixture(scope="module")
def easel(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Easel]:
    """A worker that draws at once."""
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), max_queued=1_000_000, sdapi=True)
    with Worker(settings) as worker, Easel(worker) as easel:
        worker.announce()
        yield easel


@pytest.fixture(scope="module")
def document(easel: Easel) -> Iterator[Document]:
    """The document of an API with all routes."""
    with process(SERVE, easel.worker.settings) as (_, client):
        document = Document(str(client.base_url))
        body = {"type": "image", "prompt": "a cat", "steps": 2}
        document.job = document.session.post(f"{document.url}/v1/jobs", json=body, timeout=PATIENCE_S).json()["id"]
        yield document


def with_values(body: Any, values: dict[str, str]) -> Any:
    """The body with these values in place of the texts of these names, at any depth."""
    if not isinstance(body, dict):
        return [with_values(inner, values) for inner in body] if isinstance(body, list) else body
    return {
        name: values[name] if isinstance(inner, str) and name in values else with_values(inner, values)
        for name, inner in body.items()
    }


def error_of(answer: requests.Response) -> tuple[str, str]:
    """The code, and the field, of an error in OpenAI's form, huggingface_hub's or the two of AUTOMATIC1111's."""
    content = answer.json()
    if isinstance(detail := content.get("detail"), list):
        return detail[0]["type"], detail[0]["loc"][-1]
    if isinstance(error := content["error"], dict):
        return error["code"], error["param"] or ""
    if "code" in content:
        return content["code"], content["param"] or ""
    return error, str(content["detail"]).partition(":")[0]


def has_json(operation: Any) -> bool:
    return any(body.media_type == "application/json" for body in operation.body)


def test_a_body_by_its_schema_has_the_right_form(document: Document) -> None:
    """No value that a client generated from the document sends is of a wrong type, unknown or missing."""
    statuses: dict[str, set[int]] = {}
    for operation in document.operations.values():
        if not has_json(operation):
            continue
        cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)

        @settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(cases, st.booleans())
        def send(case: Case, whole: bool) -> None:
            if case.media_type != "application/json":
                return
            case.body = with_values(case.body, PICTURES if whole else PICTURES | SOUND)
            for name, known in OPEN.items():
                if isinstance(case.body.get(name), dict):
                    case.body[name] = {k: v for k, v in case.body[name].items() if k in known}
            answer = case.call(base_url=document.url, session=document.session, timeout=PATIENCE_S)
            statuses.setdefault(case.operation.label, set()).add(answer.status_code)
            if answer.status_code >= 400:
                note(f"{case.operation.label} {case.body} {answer.text}")
                code, field = error_of(answer)
                assert code not in WRONG_FORM or field.endswith(BETWEEN_FIELDS)

        send()
    assert len(statuses) > 12 and sum(min(seen) < 300 for seen in statuses.values()) > 6, statuses


def streams(operation: Any) -> bool:
    return "text/event-stream" in str(operation.definition.raw["responses"])


def test_every_stream_has_the_events_of_its_endpoint(document: Document, easel: Easel) -> None:
    assert {label for label, operation in document.operations.items() if streams(operation)} == STREAMS.keys() | TEXT
    for label, (body, names) in STREAMS.items():
        method, path = label.split()
        url = document.url + path.format(id=document.job)
        easel.looked.clear()
        with document.session.request(method, url, json=body or None, timeout=PATIENCE_S, stream=True) as answer:
            lines = ok(answer).iter_lines(chunk_size=1, decode_unicode=True)
            events = easel.previewed(line[7:] for line in lines if line.startswith("event: "))
        assert len(events) > 1 and names >= {*events}, label
