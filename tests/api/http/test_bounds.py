"""All lists, texts and objects of requests are bounded, and an invalid body costs few errors, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from api import schemas
from api.app import create_app
from api.batches.routes import BatchFields
from api.dialects.inference import InferenceBody
from api.dialects.predictions.routes import PredictionBody
from api.errors import ApiError
from contract.chat import ChatFields
from contract.embeddings import EmbeddingFields
from contract.responses import ResponseFields
from contract.text import CompletionFields
from tests.api.world import Api, check_error, settings_of

MODELS: list[type[BaseModel]] = [
    schemas.ImageRequest, schemas.EditRequest, schemas.EditBody, schemas.JobFields, schemas.EditJobFields,
    PredictionBody, ChatFields, CompletionFields, EmbeddingFields, ResponseFields, InferenceBody, BatchFields,
]  # fmt: skip
WHOLE: list[type[BaseModel]] = [schemas.EditJobFields, *MODELS[-6:]]  # all parts
MAX_ERRORS = 100  # pydantic builds, for any body
# Any JSON, bounded by the body's bytes, values and depth alone.
FREE = {
    "InferenceRequest.parameters.*", "InferenceRequest.options.*", "JsonSchema.schema.*", "CompletionRequest.prompt[]",
    "EmbeddingRequest.input[]",
    "ChatRequest.prediction", "ChatRequest.prompt_cache_options", "Message.annotations", "Message.reasoning",
    "Message.reasoning_content", "Message.reasoning_details", "Message.thinking_blocks",
    "Message.provider_specific_fields", "TextPart.annotations", "TextPart.prompt_cache_breakpoint",
    "TextPart.cache_control", "PredictionRequest.input.*", "PredictionRequest.context.*",
    "ChatRequest.chat_template_kwargs.*",
    "Message.parsed", "CalledFunction.parsed_arguments", "ToolCall.extra_content", "Function.parameters.*",
    "FunctionTool.parameters.*", "TextFormat.schema.*", "InputPart.annotations", "InputPart.logprobs",
    "ReasoningItem.summary", "ReasoningItem.content", "ReasoningItem.encrypted_content", "ResponseRequest.conversation",
    "ResponseRequest.prompt", "ResponseRequest.include", "ResponseRequest.reasoning", "ResponseRequest.stream_options",
    "ResponseRequest.max_tool_calls",
    "ResponseRequest.prompt_cache_options",
}  # fmt: skip


def unbounded(schema: dict[str, Any], parts: dict[str, Any], at: str) -> Iterator[str]:
    """Where in this JSON schema a text, a list or an object has no upper bound."""
    if "$ref" in schema:
        part = parts[schema["$ref"].rpartition("/")[2]]
        yield from unbounded(part, parts, part.get("title", at))
        return
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from unbounded(choice, parts, at)
    kind = schema.get("type")
    if kind is None and not schema.keys() & {"anyOf", "oneOf", "enum", "const"} and at not in FREE:
        yield f"{at}: anything"
    if kind == "string" and not schema.keys() & {"maxLength", "enum", "const"} and schema.get("format") != "binary":
        yield f"{at}: a string without maxLength"
    if kind == "array":
        if "maxItems" not in schema:
            yield f"{at}: an array without maxItems"
        yield from unbounded(schema.get("items", {}), parts, f"{at}[]")
    if kind == "object":
        more = schema.get("additionalProperties", True)
        if more is not False:
            if "maxProperties" not in schema:
                yield f"{at}: an object without maxProperties"
            yield from unbounded({} if more is True else more, parts, f"{at}.*")
        for name, inner in schema.get("properties", {}).items():
            yield from unbounded(inner, parts, f"{at}.{name}")


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_model_has_no_field_without_a_bound(kind: type[BaseModel]) -> None:
    schema = kind.model_json_schema()
    assert list(unbounded(schema, schema.get("$defs", {}), schema["title"])) == []


def test_the_document_has_no_body_of_another_model(tmp_path: Path) -> None:
    """Every JSON body of the published document is that of a model above."""
    known = {kind.model_json_schema()["title"] for kind in MODELS}
    document = create_app(settings_of("redis://127.0.0.1:1/0", tmp_path)).openapi()
    found = set()
    for operation in chain.from_iterable(path.values() for path in document["paths"].values()):
        for kind, described in operation.get("requestBody", {}).get("content", {}).items():
            choices = described["schema"].get("oneOf", [described["schema"]])
            found |= {choice["title"] for choice in choices if kind == "application/json" or "title" in choice}
    assert len(found) >= 8 and found <= known


def items(schema: dict[str, Any], parts: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema rejects, in many places at once: long lists and objects of what is wrong."""
    if "$ref" in schema:
        return items(parts[schema["$ref"].rpartition("/")[2]], parts)
    if choices := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        return st.one_of([items(choice, parts) for choice in choices])
    many = st.sampled_from([1, 3, 900, 2000])
    strangers = st.builds(lambda n: {f"x{k}": 1 for k in range(n)}, many)
    if schema.get("type") == "array":
        inner = st.one_of(items(schema.get("items", {}), parts), strangers, st.just({}), st.none())
        return st.builds(lambda item, n: [item] * n, inner, many)
    if schema.get("type") == "object":
        named = {
            name: st.one_of(items(inner, parts), st.just([])) for name, inner in schema.get("properties", {}).items()
        }
        return st.one_of(strangers, st.fixed_dictionaries({}, optional=named))
    return st.one_of(st.just([1] * 2000), st.just({}), st.just("a"), st.none())


@pytest.mark.parametrize("kind", WHOLE, ids=lambda kind: kind.__name__)
def test_an_invalid_body_costs_few_errors(kind: type[BaseModel]) -> None:
    schema = kind.model_json_schema()

    @settings(max_examples=40)
    @given(items(schema, schema.get("$defs", {})))
    def check(body: Any) -> None:
        try:
            kind.model_validate(body)
        except ValidationError as error:
            assert error.error_count() <= MAX_ERRORS
        try:
            schemas.read(kind, body)
        except ApiError as error:
            assert error.status == 400 and len(str(error)) < 1000

    check()


HELLO = {"role": "user", "content": "hello"}
CHAT, JOBS = "/v1/chat/completions", "/v1/jobs"
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [{}] * 999}, "messages.role", "must be given"),
    (CHAT, {"messages": [HELLO] * 1001}, "messages", "has 1001 entries, at most 1000 are allowed"),
    (CHAT, {"metadata": {f"{k}": 1 for k in range(17)}}, "metadata", "has 17 entries, at most 16 are allowed"),
    (CHAT, {"stop": ["a" * 257]}, "stop", "has 257 characters, at most 256 are allowed"),
    (CHAT, {f"x{k}": 1 for k in range(99)}, "x0", "is not known"),
    (JOBS, {"control": [{}] * 9999}, "control.model", "must be given"),
    (JOBS, {"control": [{f"x{k}": 1 for k in range(99)}]}, "control.x0", "is not known"),
    (JOBS, {"image_prompts": [{"model": "a"}] * 5}, "image_prompts", "at most 4"),
    (JOBS, {"webhook_url": "http://a.example/" + "x" * 2048}, "webhook_url", "at most 2048 are allowed"),
]


@pytest.mark.parametrize("path, body, field, words", CASES)
def test_what_is_too_long_is_named(shared: Api, path: str, body: dict[str, Any], field: str, words: str) -> None:
    required = {"messages": [HELLO]} if path == CHAT else {"type": "image", "prompt": "a"}
    error = check_error(shared.post(path, **required | body), 400, field)
    assert words in error["message"] and error["message"].startswith(f"{field}: ")
