"""The Responses API: the unmodified OpenAI client gets what the same chat gets, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from api import text_drafts
from api.text_drafts import CHAT, COMPLETIONS, RESPONSES
from contract.tools import HERMES
from deployment.redis import RedisServer
from tests.api.test_tools import TEMPLATES, TOOL, with_template
from tests.api.world import Api, check_error, settings_of
from tests.api.writing import TextWorker
from tests.llm import stage

ASK: dict[str, Any] = {"input": "a cat", "max_output_tokens": 12, "extra_body": {"seed": 1}}
FUNCTION: dict[str, Any] = {"type": "function", **TOOL["function"]}


@pytest.fixture(scope="module")
def api(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    settings = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), max_queued=1_000_000)
    model = with_template(HERMES, TEMPLATES[HERMES])
    with TextWorker(settings, model, kernels=stage.kernels()), Api(settings) as api:
        yield api


@pytest.fixture
def client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_answers_as_the_chat_does(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "a cat"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"role": "user", "content": "a dog"},
    ]  # fmt: skip
    made = client.responses.create(model=HERMES, instructions="Be brief.", **{**ASK, "input": items})
    chat = client.chat.completions.create(
        model=HERMES, max_tokens=12, seed=1,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a cat"},
                  {"role": "assistant", "content": "yes"}, {"role": "user", "content": "a dog"}],
    )  # fmt: skip
    assert made.output_text == chat.choices[0].message.content and made.id.startswith("resp_")
    assert made.usage is not None and chat.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens,
    )  # fmt: skip
    assert made.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")


def test_its_events_make_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=HERMES, **ASK)
    with client.responses.stream(model=HERMES, **ASK) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text and events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output[0].content[0].text == text
    assert events[-1].response.usage.model_dump(exclude={"input_tokens_details"}) == (
        whole.usage.model_dump(exclude={"input_tokens_details"}) if whole.usage else None
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
        with client.responses.stream(**ask, tool_choice=choice, parallel_tool_calls=False) as stream:
            events = list(stream)
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [call.arguments]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        for again in (call, call.model_dump(), call.to_dict()):  # with every field of openai's, as null, and without
            after = client.responses.create(**{**ask, "input": [{"role": "user", "content": "a cat"}, again, result]})
            assert after.status in ("completed", "incomplete")


def test_a_schema_holds_the_answer(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {**TOOL["function"]["parameters"], "additionalProperties": False}
    text: Any = {"format": {"type": "json_schema", "name": "mood", "schema": schema, "strict": True}}
    made = client.responses.create(model=HERMES, **{**ASK, "max_output_tokens": 60}, text=text)
    assert json.loads(made.output_text).keys() == {"happy"}


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
def test_what_is_refused(api: Api, number: int) -> None:
    fields, param = BAD[number]
    check_error(api.post(RESPONSES, model=HERMES, **fields), 400, param)


def test_it_means_the_same_job_as_the_chat() -> None:
    job = text_drafts.read(RESPONSES, {"input": "a", "tools": [FUNCTION], "tool_choice": "required", "top_p": 0.5}).job
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": "required", "top_p": 0.5}
    assert job == text_drafts.read(CHAT, chat).job


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_the_documents_examples_are_read(api: Api, path: str) -> None:
    content = api.client.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]["content"]
    examples = content["application/json"]["schema"]["examples"]
    assert len(examples) > 1
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    for example in examples:
        assert api.post(path, **{limit: 8, **example}).status_code == 200
