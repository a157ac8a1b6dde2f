"""Tools of chats: the unmodified OpenAI client against real engines whose models have templates of each format."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from api.errors import ApiError
from api.text import drafts as text_drafts
from api.text.answers import TextAnswers
from api.text.drafts import CHAT
from api.text.writers import ChatWriter
from contract.card import TextOffer
from contract.chat import ChatFields
from contract.tools import HERMES, JSON, PLAIN
from core.config import Settings
from core.jobs.record import Job
from llm.checkpoints.load import TextModel
from tests.api.test_round_trips import chunks_of, job_of, result_of, whole_of
from tests.api.world import Api, check_error
from tests.api.writing import written
from tests.llm import stage

pytest.importorskip("llguidance")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "mood", "description": "Sets the mood.",
        "parameters": {"type": "object", "properties": {"happy": {"type": "boolean"}}, "required": ["happy"]},
    },
}  # fmt: skip
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
MOOD: dict[str, Any] = {"type": "function", "function": {"name": "mood"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a cat"}], "max_tokens": 120, "seed": 1}
_TURNS = (
    "{% for m in messages %}{{ '<|user|>' }}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.name }} {{ m.tool_call_id }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' }}"
)
TEMPLATES = {
    HERMES: "{% if tools %}<tools>{{ tools | tojson }}</tools>\n<tool_call> name, arguments{% endif %}" + _TURNS,
    JSON: "{% if tools %}{{ tools | tojson }}\n" + '{"name": function name, "parameters": dictionary of arguments}'
    "{% endif %}" + _TURNS,
}  # fmt: skip


def with_template(name: str, template: str | None) -> TextModel:
    model = stage.small()
    tokenizer = copy.deepcopy(model.tokenizer)
    if template is not None:
        tokenizer.chat_template = template
    return replace(model, name=name, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def shared(module_settings: Settings) -> Iterator[Api]:
    """Models of each format, and one whose calls are in none that is read."""
    templates = {**TEMPLATES, PLAIN: None, "other": "{{ tools }}[TOOL_CALLS]" + _TURNS}
    with written(module_settings, *(with_template(*template) for template in templates.items())) as api:
        yield api


@pytest.mark.quick(0, 3)
@pytest.mark.parametrize("choice", ["required", MOOD])
@pytest.mark.parametrize("model", [HERMES, JSON, PLAIN])
def test_a_required_call_is_one_whole_and_streamed(client: openai.OpenAI, model: str, choice: Any) -> None:
    ask: dict[str, Any] = {**ASK, "model": model, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    made = client.chat.completions.create(**ask)
    (told,) = made.choices
    assert told.finish_reason == "tool_calls" and told.message.content is None and told.message.tool_calls is not None
    (call,) = told.message.tool_calls
    assert call.type == "function" and call.function.name == "mood"
    assert json.loads(call.function.arguments).keys() == {"happy"}
    chunks = list(client.chat.completions.create(**ask, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert deltas[0].role == "assistant" and not any(delta.content for delta in deltas)
    functions = [piece.function for piece in pieces if piece.function is not None]
    assert "".join(function.arguments or "" for function in functions) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # What was answered is taken as history, with the call's result.
    history = [
        *ASK["messages"],
        told.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    after = client.chat.completions.create(**{**ask, "messages": history, "tool_choice": "auto"})
    assert after.choices[0].finish_reason in ("stop", "length")


def test_a_model_without_tools_answers_text_and_says_so(shared: Api) -> None:
    answer = shared.post(CHAT, **ASK, model=PLAIN, tools=[TOOL, OTHER]).json()
    assert "tool_calls" not in answer["choices"][0]["message"] and answer["choices"][0]["message"]["content"]
    assert answer["warnings"][0].startswith("tools: ")
    without = shared.post(CHAT, **ASK, model=PLAIN).json()
    assert answer["choices"][0]["message"] == without["choices"][0]["message"]
    assert "warnings" not in shared.post(CHAT, **ASK, model=PLAIN, tools=[TOOL], tool_choice="none").json()


def test_the_template_gets_tools_and_results(client: openai.OpenAI) -> None:
    """The prompt is what transformers makes of it, counted in tokens."""
    call = {"id": "1", "type": "function", "function": {"name": "mood", "arguments": '{"happy":  true}'}}
    messages = [
        {"role": "user", "content": "a cat"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]},
    ]  # fmt: skip
    called = {**call, "function": {"name": "mood", "arguments": {"happy": True}}}
    read: list[Any] = [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "done", "tool_call_id": "1", "name": "mood"},
    ]  # fmt: skip
    for name in (HERMES, JSON):
        ask: dict[str, Any] = {"model": name, "messages": messages, "max_tokens": 1}
        for tools in ([TOOL], None):
            made = client.chat.completions.create(**ask, **({"tools": tools} if tools else {}))
            ids = with_template(name, TEMPLATES[name]).tokenizer.apply_chat_template(
                read, tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert made.usage is not None and made.usage.prompt_tokens == len(ids)


def function(**fields: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": {"name": "a", **fields}}


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [TOOL], "tool_choice": function(name="none")}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL] * 129}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools.type"),
    ({"tools": [function(name="a b")]}, "tools.function.name"),
    ({"tools": [function(parameters={"type": "string"})]}, "tools"),
    ({"tools": [function(parameters={"enum": [*range(2001)]})]}, "tools"),
    ({"tools": [function(description="x\x07")]}, "tools"),
    ({"tools": [function(description="<|end|>")]}, "tools"),
    ({"tools": [function(name=f"f{k}", description="x" * 9000) for k in range(30)]}, "tools"),
    ({"model": "other", "tools": [TOOL]}, "tools"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x",
                    "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{}"}}]}]},
     "messages.tool_calls"),
    *(({"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": text}}]}]},
       "messages" if "<" in text else "messages.tool_calls.function")
      for text in ("[]", '{"a": NaN}', '{"a": 1e999}', '{"a":' + "[" * 60 + "]" * 60 + "}", '{"a": "<|end|>"}')),
    ({"tools": [function(parameters={"properties": {"b": {"type": "nothing"}}})], "tool_choice": "required"}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)))
def test_what_is_refused(shared: Api, number: int) -> None:
    fields, param = BAD[number]
    error = check_error(shared.post(CHAT, **{**ASK, "model": HERMES, **fields}), 400, param)
    assert "sometimes" not in error["message"]


def test_workers_of_an_older_version_get_no_tools() -> None:
    job = text_drafts.read(CHAT, {**ASK, "tools": [TOOL]}).job
    with pytest.raises(ValueError, match="older version"):
        job.check(TextOffer(context=512))


def answers(text: str, format: str, finish: str = "stop", **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A choice of a whole answer, and what a client puts together of a streamed one."""
    job: Job = job_of(CHAT, {**ASK, "tools": [TOOL, OTHER], **fields})
    job = replace(job, parameters={**job.parameters, "tool_format": format})
    result = result_of([text])
    result["choices"][0]["finish_reason"] = finish
    events, writer = TextAnswers(job), ChatWriter(job)
    pieces = [{"index": 0, "at": at, "text": character} for at, character in enumerate(text)]
    chunks = chunks_of(writer, [*events.progress({"pieces": pieces}), *events.result(result)])
    return whole_of(CHAT, job, result)["choices"][0], [chunk["choices"][0] for chunk in chunks]


def test_text_before_calls_is_content() -> None:
    text = 'So:\n<tool_call>\n{"name": "mood", "arguments": {"happy": true}}\n</tool_call>\n' \
           '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'  # fmt: skip
    whole, chunks = answers(text, HERMES)
    calls = whole["message"]["tool_calls"]
    assert whole["message"]["content"] == "So:" and whole["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in calls] == ["mood", "stop"] and calls[0]["id"] != calls[1]["id"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "So:"
    single, _ = answers(text, HERMES, parallel_tool_calls=False)
    assert len(single["message"]["tool_calls"]) == 1


def test_a_call_that_is_cut_off_is_told_as_far_as_it_goes() -> None:
    whole, chunks = answers('{"name": "mood", "parameters": {"hap', JSON, "length")
    assert whole["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"hap'


def test_a_chat_without_tools_is_not_searched_for_calls() -> None:
    job = text_drafts.read(CHAT, {**ASK, "tools": [TOOL], "tool_choice": "none"}).job
    assert job.tools is None
    text = '{"name": "mood", "parameters": {}}'
    whole = whole_of(CHAT, job_of(CHAT, ASK), result_of([text]))["choices"][0]
    assert whole["message"]["content"] == text and whole["finish_reason"] == "stop"


def test_a_named_tool_is_the_only_one() -> None:
    job = text_drafts.read(CHAT, {**ASK, "tools": [TOOL, OTHER], "tool_choice": MOOD}).job
    assert job.tools == [TOOL] and job.tools_required and job.parallel_tool_calls is False
    assert ChatFields.model_validate({**ASK, "tools": [TOOL]}).job().tools == [TOOL]
    with pytest.raises(ApiError, match="at most"):
        schema = {"properties": {f"p{n}": {} for n in range(40)}}
        many = [function(name=f"f{k}", parameters=schema) for k in range(60)]
        text_drafts.read(CHAT, {**ASK, "tools": many, "tool_choice": "required"})
