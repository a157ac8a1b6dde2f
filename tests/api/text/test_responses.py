"""The Responses API: the unmodified OpenAI client gets what the same chat gets, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from api.text import drafts as text_drafts
from api.text.drafts import CHAT, COMPLETIONS, RESPONSES
from contract.tools import HERMES
from core.config import Settings
from tests.api.text.test_tools import TEMPLATES, TOOL, with_template
from tests.api.world import Api, check_error
from tests.api.writing import written

ASK: dict[str, Any] = {"input": "a cat", "max_output_tokens": 12, "extra_body": {"seed": 1}}
FUNCTION: dict[str, Any] = {"type": "function", **TOOL["function"]}


@pytest.fixture(scope="module")
def shared(module_settings: Settings) -> Iterator[Api]:
    with written(module_settings, with_template(HERMES, TEMPLATES[HERMES])) as api:
        yield api


def test_it_answers_as_the_chat_does(client: openai.OpenAI) -> None:
    made = client.responses.create(model=HERMES, **ASK)
    chat = client.chat.completions.create(
        model=HERMES, max_tokens=12, seed=1, messages=[{"role": "user", "content": "a cat"}]
    )
    assert made.output_text == chat.choices[0].message.content and made.id.startswith("resp_")
    assert made.usage is not None and chat.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens
    assert made.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")


def test_its_events_make_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=HERMES, **ASK)
    with client.responses.stream(model=HERMES, **ASK) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text and events[-1].type == f"response.{whole.status}"
    assert whole.usage is not None
    assert events[-1].response.usage.model_dump(exclude={"input_tokens_details"}) == whole.usage.model_dump(
        exclude={"input_tokens_details"}
    )


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    ask: dict[str, Any] = {**ASK, "max_output_tokens": 120, "model": HERMES, "tools": [FUNCTION]}
    named = {"type": "function", "name": "mood"}
    for choice in ("required", named):
        made = client.responses.create(**ask, tool_choice=choice, parallel_tool_calls=False)
        (call,) = made.output
        assert made.status == "completed" and call.type == "function_call" and call.name == "mood"
        assert json.loads(call.arguments).keys() == {"happy"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for again in (call, call.model_dump(), call.to_dict()):  # with every field of openai's, as null, and without
            after = client.responses.create(**{**ask, "input": [{"role": "user", "content": "a cat"}, again, result]})
            assert after.status in ("completed", "incomplete")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"), ({}, "input"), ({"input": [{"role": "tool", "content": "x"}]}, "input.role"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "conversation": "conv_1"}, "conversation"), ({"input": "a", "background": True}, "background"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.content.type"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"role": "user", "content": "x"}] * 1000, "instructions": "y"}, "input"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": NaN}'}]}, "input"),
    ({"input": "a", "top_logprobs": 1}, "top_logprobs"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools.type"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"input": [{"type": "computer_call", "id": "1"}]}, "input"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"), ({"input": "a", "magic": 1}, "magic"),
    ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens"), ({"input": "word " * 2_000}, "input"),
    ({"input": "word " * 2_000, "stream": True}, "input"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_is_refused(shared: Api, number: int) -> None:
    fields, param = BAD[number]
    check_error(shared.post(RESPONSES, model=HERMES, **fields), 400, param)


def test_it_means_the_same_job_as_the_chat() -> None:
    schema = TOOL["function"]["parameters"]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"role": "user", "content": "b"},
    ]  # fmt: skip
    format = {"type": "json_schema", "name": "mood", "schema": schema, "strict": True}
    told = [("system", "Be brief."), ("user", "a"), ("assistant", "yes"), ("user", "b")]
    common = {"tool_choice": "required", "top_p": 0.5}
    response = {"input": items, "instructions": "Be brief.", "tools": [FUNCTION], "text": {"format": format}, **common}
    chat = {
        "messages": [{"role": role, "content": content} for role, content in told], "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}, **common,
    }  # fmt: skip
    assert text_drafts.read(RESPONSES, response).job == text_drafts.read(CHAT, chat).job


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_the_documents_examples_are_read(shared: Api, path: str) -> None:
    content = shared.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]["content"]
    examples = content["application/json"]["schema"]["examples"]
    assert len(examples) > 1
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for example in examples:
        assert shared.post(path, **{limit: 8, **example}).status_code == 200
