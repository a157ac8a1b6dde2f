"""Batches of texts by OpenAI's own client, written by the real text panel: lines in, lines out, each as it is alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from api.http import body
from core.config import Settings
from tests.api.batches.test_routes import ended, told
from tests.api.text.test_routes import ASK, BAD, CHAT, COMPLETE
from tests.api.world import Api, check_error
from tests.api.writing import written
from tests.llm import stage

LONG = {"messages": [{"role": "user", "content": "a long story"}], "max_tokens": 200, "logprobs": True,
        "top_logprobs": 20, "seed": 4}  # fmt: skip


@pytest.fixture(scope="module")
def shared(module_settings: Settings) -> Iterator[Api]:
    with written(module_settings, stage.small()) as api:
        yield api


def lines(url: str, *bodies: dict[str, Any]) -> bytes:
    asked = [{"custom_id": f"c{k}", "method": "POST", "url": url, "body": body} for k, body in enumerate(bodies)]
    return b"\n".join(json.dumps(line).encode() for line in asked)


def begin(client: openai.OpenAI, url: Any, *bodies: dict[str, Any]) -> Any:
    file = client.files.create(file=("asked.jsonl", lines(url, *bodies)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def done(client: openai.OpenAI, url: str, *bodies: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The batch as it ended, and what was told of each line, well and ill."""
    batch = ended(client, begin(client, url, *bodies).id)
    assert batch.status == "completed" and batch.endpoint == url
    files = (batch.output_file_id, batch.error_file_id)
    well, ill = ({line["custom_id"]: line for line in told(client, file)} if file else {} for file in files)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (len(well), len(ill))
    assert len(well) + len(ill) == batch.request_counts.total == len(bodies)
    return batch, well, ill


def whole(line: dict[str, Any]) -> dict[str, Any]:
    """What was answered to a line, once the rest of the line is as OpenAI's."""
    assert set(line) == {"id", "custom_id", "response", "error"} and line["error"] is None
    assert line["id"].startswith("batch_req_") and line["response"]["request_id"].startswith("job_")
    assert set(line["response"]) == {"status_code", "request_id", "body"} and line["response"]["status_code"] == 200
    return dict(line["response"]["body"])


def same(body: dict[str, Any], alone: dict[str, Any]) -> bool:
    """But for who and when, and for what of its prompt was remembered."""
    kept = ("object", "model", "choices", "system_fingerprint")
    usage = [{name: one["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
             for one in (body, alone)]  # fmt: skip
    return usage[0] == usage[1] and all(body[name] == alone[name] for name in kept)


def test_chats_are_answered_as_alone(shared: Api, client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": schema}}
    asked: list[dict[str, Any]] = [
        {**ASK, "model": stage.small().name},
        {**ASK, "n": 3, "logprobs": True, "top_logprobs": 2, "stream": False, "metadata": {"a": "b"}},
        {**ASK, "messages": [{"role": "developer", "content": "Be brief."}, *ASK["messages"]], "stop": ["x"]},
        {**ASK, "max_tokens": 60, "seed": 2, "response_format": wanted},
        LONG,
    ]
    _, well, ill = done(client, CHAT, *asked)
    assert not ill and list(well) == [f"c{k}" for k in range(len(asked))]
    for line, fields in zip(well.values(), asked, strict=True):
        made = whole(line)
        assert same(made, shared.post(CHAT, **fields).json())
        answer = ChatCompletion.model_validate(made)
        assert answer.id == "chatcmpl-" + line["response"]["request_id"].removeprefix("job_")
    logprobs = made["choices"][0]["logprobs"]["content"]
    assert len(json.dumps(logprobs)) > 16_384, "so much is laid beside Redis until the file is written"


def test_completions_are_answered_as_alone(shared: Api, client: openai.OpenAI) -> None:
    asked = {"prompt": ["one", "two"], "n": 2, "max_tokens": 6, "seed": 3, "logprobs": 1, "stop": "\n"}
    _, well, _ = done(client, COMPLETE, asked)
    made = whole(well["c0"])
    assert same(made, shared.post(COMPLETE, **asked).json())
    assert len(Completion.model_validate(made).choices) == 4


@pytest.mark.parametrize("url", [CHAT, COMPLETE])
def test_each_line_is_refused_as_alone(shared: Api, client: openai.OpenAI, url: str) -> None:
    """What the API sees and what only the worker sees, in the words of the single request; the rest is answered."""
    # A NUL is no JSON that is taken anywhere: the file is of no use then, as in test_routes.py.
    bad = [fields for path, fields, _, _ in BAD if path == url and "\\u0000" not in json.dumps(fields)]
    bad.append({**(ASK if url == CHAT else {"prompt": "a"}), "model": "gpt-none"})
    good = ASK if url == CHAT else {"prompt": "a", "seed": 1}
    _, well, ill = done(client, url, *bad, good)
    assert list(well) == [f"c{len(bad)}"] and len(ill) == len(bad)
    for k, fields in enumerate(bad):
        line, alone = ill[f"c{k}"], shared.post(url, **fields)
        assert line["error"] is None and line["response"]["status_code"] == alone.status_code
        assert line["response"]["body"] == alone.json()
        check_error(alone, 404 if "gpt" in str(fields.get("model")) else 400)
    said = {line["response"]["body"]["error"]["code"] for line in ill.values()}
    assert {"context_length_exceeded", "model_not_found"} <= said


def test_what_no_batch_takes(client: openai.OpenAI) -> None:
    refused: list[tuple[dict[str, Any], int, str | None]] = [
        ({**ASK, "stream": True}, 400, "stream"),
        ({**ASK, "stream": True, "stream_options": {"include_usage": True}}, 400, "stream"),
        ({**ASK, "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({**ASK, "user": "x" * body.MAX_BYTES}, 413, None),
    ]
    _, well, ill = done(client, CHAT, *(fields for fields, _, _ in refused))
    assert not well
    for line, (_, status, param) in zip(ill.values(), refused, strict=True):
        response = line["response"]
        assert (response["status_code"], response["body"]["error"]["param"]) == (status, param)
