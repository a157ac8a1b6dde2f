"""What the service writes it reads: answers as requests, events by their endpoint, numbers that every client holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion

from api.text.answers import TextAnswers
from api.text.drafts import CHAT, COMPLETIONS, WRITERS, read
from api.text.events import Event
from api.text.writers import ChatWriter, CompletionWriter, TextWriter
from contract.bounds import MAX_EXACT
from contract.card import ImageLimits, TextOffer
from contract.image_request import ImageRequest
from core.jobs.record import Job, JobState
from tests.api.easel import Easel
from tests.api.pictures.test_conditions import KINDS, inline
from tests.api.pictures.test_edits import as_file, hole, pixels
from tests.api.test_openapi import numbers
from tests.api.world import BATCH, CARD, TEXT, Api, Sent, Worker, eventually, ok, parsed

OFFERED = replace(CARD, controls=KINDS["control"][1:], image_prompts=KINDS["image_prompts"][1:])
DRAW, EDIT = "/v1/images/generations", "/v1/images/edits"
PROMPT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=40)


# -- pictures ----------------------------------------------------------------------------------------------------------


def sent(answer: httpx2.Response) -> list[Sent]:
    """A stream's events."""
    return list(parsed(iter([*answer.text.split("\n"), ""])))


def pictured(kind: str) -> dict[str, Any]:
    return {kind: [{"model": KINDS[kind][1], "image": inline(pixels())}]}


@pytest.mark.parametrize(
    ("path", "fields", "files"),
    [
        (DRAW, {}, {}),
        (DRAW, pictured("control") | pictured("image_prompts"), {}),
        (EDIT, {"images": [inline(pixels())], "mask": inline(hole())} | pictured("control"), {}),
        (EDIT, {}, {"image": as_file(pixels()), "mask": as_file(hole())}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_events_are_named_after_their_endpoint(
    shared: Api, easel: Easel, path: str, fields: dict[str, Any], files: dict[str, bytes]
) -> None:
    """Whatever pictures a request brings along: clients tell previews from results by the name."""
    easel.looked.clear()
    body: dict[str, Any] = {"prompt": "a hat", "size": "128x128", "steps": 8, "partial_images": 2, "stream": True}
    if files:
        form = {name: json.dumps(value) if value is True else str(value) for name, value in body.items()}
        request: dict[str, Any] = {"data": form, "files": files}
    else:
        request = {"json": body | fields}
    with shared.client.stream("POST", path, **request) as answer:
        events = easel.previewed(parsed(answer.iter_lines()))
    kind = "image_edit" if path == EDIT else "image_generation"
    assert {event.type for event in events[:-1]} == {f"{kind}.partial_image"}
    assert events[-1].type == f"{kind}.completed" and all(event.data["type"] == event.type for event in events)


def drawn_job(api: Api, id: str) -> dict[str, Any]:
    return eventually(lambda: (job := api.job(id))["status"] == "succeeded" and job) or {}


def test_a_jobs_request_is_taken_where_it_belongs(shared: Api, easel: Easel) -> None:
    """By POST and PUT of jobs as it is, and without what only jobs have by the endpoint that waits."""
    fields = {"n": 2, "num_inference_steps": 3, "style": "vivid", "output_format": "webp", "output_compression": 7}
    id = shared.order(**fields, guidance_interval=[0, 0.5], prompt_weighting="a1111", width=64, height=64)
    job = drawn_job(shared, id)
    request = job["request"]
    ok(shared.client.put("/v1/jobs/again", json=request), 202)
    drawn = shared.post(DRAW, **{name: value for name, value in request.items() if name != "type"}).json()
    assert drawn_job(shared, "again")["request"] == request
    assert [image["seed"] for image in drawn["data"]] == [image["seed"] for image in job["images"]]
    given_parameters = [dict(claim.parameters) for claim in easel.seen[-3:]]
    first = {name: value for name, value in given_parameters[0].items() if name != "warnings"}
    assert given_parameters[1:] == [{**first, "deepcache": request["deepcache"]}] * 2


@pytest.mark.parametrize(("text", "seed"), [("7.0", 7), ("7e2", 700), (f"{MAX_EXACT - 9}.0", MAX_EXACT - 9)])
def test_a_whole_number_is_one_however_it_is_written(shared: Api, easel: Easel, text: str, seed: int) -> None:
    """As in JSON Schema: peers whose numbers are floats write a fraction of 0. In JSON, in a form, and told again."""
    raw = f'{{"type": "image", "prompt": "a cat", "n": 2.0, "seed": {text}}}'
    answer = ok(shared.client.post("/v1/jobs", content=raw, headers={"content-type": "application/json"}), 202)
    fields = {"prompt": "a hat", "size": "128x128", "n": "2.0", "seed": text}
    edited = ok(shared.client.post(EDIT, data=fields, files={"image": as_file(pixels())}))
    assert [image["seed"] for image in edited.json()["data"]] == [seed, seed + 1]
    job = drawn_job(shared, answer.json()["id"])
    assert job["request"]["seed"] == seed and job["request"]["n"] == 2


@pytest.mark.parametrize("text", ["7.5", "1e400", "1e30", "-7.0", "true", "9007199254740993.0"])
def test_what_is_no_whole_number_or_none_that_a_float_holds_is_refused(shared: Api, text: str) -> None:
    raw = f'{{"type": "image", "prompt": "a cat", "seed": {text}}}'
    answer = shared.client.post("/v1/jobs", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "seed"


def test_what_an_answer_says_of_pictures_is_taken_without_a_word(shared: Api, easel: Easel) -> None:
    """Of pictures, of a stream's events, of a batch and of a file: each field that a request has too."""
    body = {"prompt": "a cat", "steps": 2, "output_format": "webp", "size": "64x64"}
    drawn = shared.post(DRAW, **body).json()
    streamed = sent(shared.post(DRAW, **body, stream=True))[-1].data
    for told in (drawn, streamed):
        fields = {name: value for name, value in told.items() if name in ImageRequest.model_fields}
        assert fields.keys() >= {"size", "output_format", "background"}
        again = shared.post(DRAW, **{"prompt": "a cat", "steps": 2, **fields}).json()
        assert [image["warnings"] for image in again["data"]] == [[]]
        assert {name: again[name] for name in fields if name in again} == {
            name: value for name, value in fields.items() if name in again
        }
    line = {"custom_id": "a", "method": "POST", "url": DRAW, "body": {**body, "steps": 2}}
    file = shared.client.post("/v1/files", files={"file": json.dumps(line).encode()}, data=BATCH).json()
    content = shared.get(f"/v1/files/{file['id']}/content").content
    resent = shared.client.post("/v1/files", files={"file": content}, data={"purpose": file["purpose"]}).json()
    names = ("endpoint", "input_file_id", "completion_window", "metadata")
    batch = shared.post("/v1/batches", endpoint=DRAW, input_file_id=resent["id"], completion_window="24h").json()
    for more in ({}, {"metadata": {"a": "b"}}):
        fields = {name: batch[name] for name in names} | more
        answer = shared.post("/v1/batches", **fields).json()
        assert {name: answer[name] for name in names} == fields


def test_numbers_survive_clients_whose_numbers_are_floats(shared: Api, easel: Easel, worker: Worker) -> None:
    """In every answer but the seed that a client gave itself."""
    newest = replace(TEXT, limits=TextOffer(max_logit_bias=5))
    worker.announce(card=newest)
    job = drawn_job(shared, shared.order(n=10))
    listed = eventually(lambda: len(models := shared.models()) == 2 and models, "two models")
    documents = [job, listed, shared.draw(n=10).json(), shared.get("/v1/jobs").json()]
    documents += [shared.get(path).json() for path in ("/v1/queues", "/v1/models/emoji-lm")]
    assert all(abs(number) <= MAX_EXACT for number in numbers(documents))
    assert len(numbers(documents)) > 30 and ImageLimits().max_seed > MAX_EXACT


# -- text --------------------------------------------------------------------------------------------------------------


def job_of(path: str, body: dict[str, Any]) -> Job:
    """The record of an answered request."""
    parameters = json.loads(json.dumps(read(path, body).job.to_dict()))
    return Job(
        "job_1", "text", "m", JobState.SUCCEEDED, parameters, 5, 1.5, None, 1.5, 2.5, 1, 0, "", None, None, None, False,
        1,
    )  # fmt: skip


def result_of(texts: list[str], logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "choices": [
            {"text": text, "finish_reason": "stop", "tokens": 3, "logprobs": list(logprobs)} for text in texts
        ],
        "prompt_tokens": [2] * len(texts),
    }  # fmt: skip


def whole_of(path: str, job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request without `stream`."""
    return WRITERS[path](job).whole(TextAnswers(job).result(result))


def chunks_of(writer: TextWriter, events: Iterable[Event]) -> list[dict[str, Any]]:
    """The content of each server-sent event, but the last one of chunks, which is no JSON."""
    lines = b"".join(chunk for event in events for chunk in writer.stream(event)).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@given(st.lists(PROMPT, min_size=1, max_size=3))
def test_an_answers_message_is_taken_as_history(texts: list[str]) -> None:
    """As it was sent, and as OpenAI's client writes it down again, with and without what is null; streamed ones too."""
    job, result = job_of(CHAT, {**ASK, "n": len(texts)}), result_of(texts)
    whole = whole_of(CHAT, job, result)
    chunks = chunks_of(ChatWriter(job), TextAnswers(job).result(result))
    client = ChatCompletion.model_validate(whole)
    for k, text in enumerate(texts):
        deltas = [
            choice.delta
            for chunk in chunks
            for choice in ChatCompletionChunk.model_validate(chunk).choices
            if choice.index == k
        ]
        streamed = {**deltas[0].model_dump(), "content": "".join(delta.content or "" for delta in deltas)}
        message = client.choices[k].message
        forms = [whole["choices"][k]["message"], message.model_dump(), message.to_dict(), streamed]
        job = read(CHAT, {"messages": [*ASK["messages"], *forms, *ASK["messages"]]}).job
        assert [entry["content"] for entry in job.messages or []] == ["a", *[text] * 4, "a"]


HISTORY: list[dict[str, Any]] = [
    {"content": "b", "tool_calls": [], "function_call": None, "audio": None},
    {"content": "b", "annotations": [{"type": "url_citation", "url_citation": {"url": "https://a.example"}}]},
    {"content": "b", "reasoning": "c", "reasoning_content": "c", "reasoning_details": [{"type": "text"}]},
    {"content": "b", "provider_specific_fields": {"a": 1}, "thinking_blocks": [{"type": "thinking"}]},
    {"content": None, "refusal": "b"},
    {"refusal": "b"},
    {"content": [{"type": "refusal", "refusal": "b"}]},
    {"content": [{"type": "text", "text": "b", "annotations": []}]},
]


@pytest.mark.parametrize("message", HISTORY, ids=str)
def test_the_messages_of_other_servers_are_taken_as_history(message: dict[str, Any]) -> None:
    job = read(CHAT, {"messages": [{"role": "assistant", **message}]}).job
    assert [entry["content"] for entry in job.messages or []] == ["b"]


@given(st.lists(PROMPT, min_size=1, max_size=3), st.integers(1, 2), st.booleans())
def test_a_completions_text_is_taken_as_a_prompt(texts: list[str], n: int, echo: bool) -> None:
    """Also one that begins with its prompt: each of a prompt's choices with that prompt."""
    expected = [text for text in texts for _ in range(n)]
    job = job_of(COMPLETIONS, {"prompt": texts, "n": n, "echo": echo})
    whole = whole_of(COMPLETIONS, job, result_of(expected))
    answers = [choice.text for choice in Completion.model_validate(whole).choices]
    assert answers == [text * (1 + echo) for text in expected]
    assert read(COMPLETIONS, {"prompt": answers}).job.prompts == answers


TOKENS = st.lists(st.sampled_from(["a", " b", "é", "🦊", "\ufffd", ""]), min_size=1, max_size=12)


@given(TOKENS, st.lists(st.integers(1, 4), min_size=12, max_size=12), st.booleans())
def test_offsets_go_on_over_chunks(tokens: list[str], lengths: list[int], echo: bool) -> None:
    """A character of several tokens counts when it is whole, and whole and streamed answers tell the same."""
    entries: list[dict[str, Any]] = []
    for number, token in enumerate(tokens):
        if token == "🦊":  # in four tokens of a byte each
            entries += [
                {"id": 1000 + byte, "token": "\ufffd", "bytes": [byte], "logprob": -1.0, "top": []}
                for byte in token.encode()
            ]
        else:
            entries.append({"id": number, "token": token, "logprob": -1.0, "top": []})
    body = {"prompt": "two", "echo": echo}
    job = job_of(COMPLETIONS, body)
    whole = whole_of(COMPLETIONS, job, result_of(["".join(tokens)], entries))["choices"][0]["logprobs"]
    offsets, answers, writer, at = [], TextAnswers(job), CompletionWriter(job), 0
    for length in lengths:
        piece = {"index": 0, "at": 0, "text": "", "token": at, "logprobs": entries[at : at + length]}
        for chunk in chunks_of(writer, answers.progress({"pieces": [piece]})):
            offsets += (chunk["choices"][0]["logprobs"] or {}).get("text_offset", [])
        at += length
    assert offsets == whole["text_offset"][:at]
    text = ("two" if echo else "") + "".join(tokens)
    for name, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert name.startswith("bytes:") or text[offset:].startswith(name)


TOKEN = st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "\ufffd"]))


@given(TOKEN, st.lists(TOKEN, max_size=5, unique_by=lambda token: token[0]), st.booleans(), st.booleans())
def test_the_drawn_token_is_told_among_the_likeliest_and_none_is_lost(
    drawn: tuple[int, str], top: list[tuple[int, str]], likely: bool, known: bool
) -> None:
    """Also of tokens of equal text. Results of older workers have no ids, and completions tell one token of a text."""

    def entry(id: int, token: str) -> dict[str, Any]:
        broken = {"bytes": [128 + id]} if token == "\ufffd" else {}
        return {"token": token, "logprob": -float(id)} | ({"id": id, **broken} if known else {})

    others = [entry(*other) for other in top if other[0] != drawn[0]]
    told = {**entry(*drawn), "top": [*others, entry(*drawn)] if likely else others}
    result = result_of(["x"], [told])
    body = {"prompt": "a", "logprobs": 5}
    logprobs = whole_of(COMPLETIONS, job_of(COMPLETIONS, body), result)["choices"][0]["logprobs"]
    (name,), (likeliest,) = logprobs["tokens"], logprobs["top_logprobs"]
    assert likeliest[name] == told["logprob"]
    assert (
        len(likeliest) == len(others) + 1
        if known
        else likeliest.keys() == {token["token"] for token in others} | {name}
    )
    chat = whole_of(CHAT, job_of(CHAT, {**ASK, "logprobs": True, "top_logprobs": 5}), result)
    (token,) = ChatCompletion.model_validate(chat).choices[0].logprobs.content or []  # type: ignore[union-attr]
    among = [(other.token, other.bytes, other.logprob) for other in token.top_logprobs]
    assert (token.token, token.bytes, token.logprob) in among or not told["top"]
    assert len(among) == (len(others) + 1 if told["top"] else 0)


def test_warnings_come_once_with_an_answer() -> None:
    job, result = job_of(CHAT, {**ASK, "verbosity": "low"}), result_of(["x"])
    assert whole_of(CHAT, job, result)["warnings"] == ["verbosity: has no effect"]
    chunks = chunks_of(ChatWriter(job), TextAnswers(job).result(result))
    assert ["warnings" in chunk for chunk in chunks] == [True, False, False]
    assert "warnings" not in whole_of(CHAT, job_of(CHAT, ASK), result)
