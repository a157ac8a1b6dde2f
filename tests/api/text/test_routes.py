"""Chat and completions: the unmodified OpenAI client against a real engine, and every refusal in OpenAI's shape."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from huggingface_hub import InferenceClient, constants
from pydantic import BaseModel

from api.errors import ApiError
from api.text import drafts as text_drafts
from api.text.answers import TextAnswers
from core.artifacts import LAID, Artifacts
from core.config import Settings
from core.jobs.record import JobState
from llm.families import tiny
from tests.api.world import TEXT, Api, Worker, check_error, eventually
from tests.api.writing import TextWorker
from tests.llm import stage

MODEL, VOCABULARY = tiny.TINY, tiny.SHAPES[tiny.TINY].vocabulary
END = "2"  # its token
NOT_OFFERED = "unsupported_parameter"
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a cat"}], "max_tokens": 12, "seed": 1}


@pytest.fixture(scope="module")
def writer(module_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextWorker]:
    loras = tmp_path_factory.mktemp("loras")
    stage.save_lora(loras / "poet", stage.small())
    with TextWorker(module_settings, stage.small(), kernels=stage.kernels(), loras=loras) as worker:
        yield worker


@pytest.fixture(scope="module")
def shared(writer: TextWorker, module_settings: Settings) -> Iterator[Api]:
    with Api(module_settings) as api:
        yield api


@pytest.fixture
def books(shared: Api) -> Iterator[Worker]:
    """A reader of all records."""
    with Worker(shared.settings, "another") as books:
        yield books


def test_openais_client_chats(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."},
                               {"role": "user", "content": [{"type": "text", "text": "a cat"}]}],
        max_completion_tokens=10, n=3, seed=5, logprobs=True, top_logprobs=2, user="somebody",
    )  # fmt: skip
    assert made.object == "chat.completion" and made.id.startswith("chatcmpl-") and made.model == MODEL
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert made.usage is not None and made.usage.completion_tokens <= 30
    for choice in made.choices:
        assert choice.finish_reason in ("stop", "length") and choice.message.role == "assistant"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert all(2 <= len(token.top_logprobs) <= 3 for token in choice.logprobs.content)
    again = client.chat.completions.create(**{**ASK, "model": MODEL, "n": 2})
    assert [c.message.content for c in again.choices] == [
        client.chat.completions.create(**{**ASK, "model": MODEL, "seed": 1 + k}).choices[0].message.content
        for k in range(2)
    ]


def test_openais_client_streams(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, **ASK, n=2)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, **ASK, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
    )
    texts, count = ["", ""], 0
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        count += len(choice.logprobs.content or []) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and count == whole.usage.completion_tokens


def test_openais_client_completes(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=6, seed=3, logprobs=1, stop="\n"
    )
    assert made.object == "text_completion" and [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.usage is not None and made.usage.prompt_tokens == 2 * 4
    assert made.choices[0].logprobs is not None and made.choices[0].logprobs.tokens is not None
    ids = [int(token) for token in stage.plain(stage.small(), "one")]
    streamed = client.completions.create(model=MODEL, prompt=ids, max_tokens=6, seed=3, stop="\n", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == made.choices[0].text


BEAMS: dict[str, Any] = {"use_beam_search": True, "max_tokens": 6}


def test_beams_are_choices_best_first(client: openai.OpenAI, writer: TextWorker) -> None:
    prompts, body = ["one", "two"], {**BEAMS, "length_penalty": 0.0, "early_stopping": True}
    made = client.completions.create(
        model=MODEL, prompt=prompts, n=2, best_of=4, logprobs=2, extra_body=body, max_tokens=6
    )
    requests = [
        stage.greedy(stage.plain(stage.small(), prompt), 6, beams=4, answers=2, length_penalty=0.0, early_stopping=True)
        for prompt in prompts
    ]
    texts = [each for text in stage.answers(writer.engine, requests) for each in (text, *text.alternatives)]
    assert [choice.text for choice in made.choices] == [text.text.removeprefix(" ") for text in texts]
    totals = [choice.model_extra["cumulative_logprob"] for choice in made.choices if choice.model_extra]
    assert totals == [text.cumulative_logprob for text in texts]
    assert totals[0] >= totals[1] and totals[2] >= totals[3]
    assert made.usage is not None and made.usage.completion_tokens == sum(len(text.tokens) for text in texts)
    body = {**BEAMS, "n": 3, "response_format": {"type": "text"}}
    chat = client.chat.completions.create(model=MODEL, messages=ASK["messages"], extra_body=body)
    assert len({choice.message.content for choice in chat.choices}) == 3


def test_a_lora_is_named_as_a_model_with_a_parent(client: openai.OpenAI, shared: Api) -> None:
    listed = {model["id"]: model for model in shared.models()}
    card = listed[MODEL]["diptych"]
    assert card["modality"] == "text" and card["limits"]["context"] == 512 and "sizes" not in card
    assert listed["poet"]["parent"] == MODEL and client.models.retrieve("poet").id == "poet"
    asked: dict[str, Any] = {"prompt": "one", "max_tokens": 6, "temperature": 0}
    plain, poet = (client.completions.create(model=name, **asked) for name in (MODEL, "poet"))
    assert poet.model == "poet" and plain.model == MODEL and poet.choices[0].text != plain.choices[0].text
    vectors = [client.embeddings.create(model=name, input="one").data[0] for name in (MODEL, "poet")]
    assert vectors[0].embedding != vectors[1].embedding
    check_error(shared.post(COMPLETE, prompt="one", model="nobody"), 404, "model", "model_not_found")


class Animal(BaseModel):
    legs: int
    tame: bool


def test_openais_client_parses_what_must_fit_a_schema(client: openai.OpenAI) -> None:
    pytest.importorskip("llguidance")
    made = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "a cat"}], response_format=Animal, seed=2,
        max_tokens=60,
    )  # fmt: skip
    assert isinstance(made.choices[0].message.parsed, Animal)


def test_a_stream_is_by_the_letter(shared: Api) -> None:
    """No ids, no retry, no comments, no event names; [DONE] ends it."""
    with shared.client.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    assert [json.loads(line[6:])["object"] for line in lines[:-1]] == ["chat.completion.chunk"] * (len(lines) - 1)


def chatting(api: Api, **fields: Any) -> HTTPConnection:
    """A connection that has asked for a streamed chat."""
    connection = HTTPConnection("127.0.0.1", api.port)
    body = json.dumps({**ASK, "stream": True, **fields})
    connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
    return connection


def test_a_client_that_vanishes_frees_its_pages(shared: Api, writer: TextWorker, books: Worker) -> None:
    known = books.ids()
    with closing(chatting(shared, max_tokens=480, n=8)) as connection, connection.getresponse() as answer:
        assert answer.status == 200
    (id,) = eventually(lambda: books.ids() - known)
    eventually(lambda: books.job(id).state.final)
    assert books.is_(id, JobState.CANCELLED) or books.is_(id, JobState.SUCCEEDED)
    eventually(lambda: writer.runner.held() == 0, "its pages were never given back")


def test_who_leaves_before_the_first_token_cancels(shared: Api, books: Worker) -> None:
    """While the job waits, for a worker that does not take it."""
    books.announce(card=dataclasses.replace(TEXT, name="idle-lm"))
    known = books.ids()
    with closing(chatting(shared, model="idle-lm")):
        (id,) = eventually(lambda: books.ids() - known)
        assert books.is_(id, JobState.QUEUED)
    eventually(lambda: books.is_(id, JobState.CANCELLED), "it waits for nobody")
    books.registry.deregister("another")
    books.registry.forget_model("idle-lm")
    eventually(lambda: "idle-lm" not in shared.get("/v1/models").text)


def test_what_is_written_grows_with_the_answer(shared: Api, books: Worker) -> None:
    """The stream in memory, and all that went to Redis's file: a small multiple of the answer, however long it is."""
    large = {**ASK, "n": 16, "logprobs": True, "top_logprobs": 20, "stream": True, "temperature": 1.5}
    for tokens in (40, 160):
        known, file = books.ids(), books.redis.info("persistence")["aof_current_size"]
        answer = shared.post(CHAT, **{**large, "max_tokens": tokens, "logit_bias": {END: -100}})
        assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")
        (id,) = books.ids() - known
        result = json.loads(books.redis.hget(f"diptych:job:{id}", "result"))
        assert (LAID in result) == (len(answer.text) > 400_000), "what is large is no value of Redis"
        size = len(Artifacts(shared.settings.artifacts).get(result[LAID]) if LAID in result else json.dumps(result))
        stream = books.redis.memory_usage(f"diptych:events:{id}", samples=0)
        written = books.redis.info("persistence")["aof_current_size"] - file
        assert stream < 3 * size + 65_536 and written < 6 * size + 262_144
        assert len(books.redis.hget(f"diptych:job:{id}", "progress")) < 200


def test_what_nobody_follows_is_not_told(shared: Api, books: Worker) -> None:
    known = books.ids()
    assert shared.post(CHAT, **{**ASK, "max_tokens": 60}).status_code == 200
    (id,) = books.ids() - known
    events = [fields["type"] for _, fields in books.redis.xrange(f"diptych:events:{id}")]
    assert events == ["queued", "running", "succeeded"]
    progress = books.job(id).progress
    assert progress is not None and progress["steps_done"] > 0


def test_who_follows_later_is_told_all_of_it(
    shared: Api, writer: TextWorker, books: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was streamed from the start or not."""
    launch, followed = writer.runner.launch, threading.Event()

    def slowly(requests: Any) -> Any:
        followed.wait(0.02)  # so that it is not over before it is followed
        return launch(requests)

    monkeypatch.setattr(writer.runner, "launch", slowly)
    with ThreadPoolExecutor(1) as pool:
        for stream in (False, True):
            known = books.ids()
            fields = {**ASK, "n": 2, "max_tokens": 440, "stream": stream, "logit_bias": {"2": -100, "1": -100}}
            answering = pool.submit(shared.post, CHAT, **fields)
            (id,) = eventually(lambda: books.ids() - known)  # noqa: B023
            eventually(lambda: (books.job(id).progress or {}).get("steps_done", 0) > 40)  # noqa: B023
            texts = ["", ""]
            with shared.events(id) as events:
                followed.set()
                received = list(events)
            followed.clear()
            for event in received:
                for piece in event.data.get("pieces", []):
                    told = texts[piece["index"]]
                    assert piece["at"] <= len(told), "nothing is left out"
                    texts[piece["index"]] = told[: piece["at"]] + piece["text"]
            result = books.job(id).result
            assert answering.result().status_code == 200 and result is not None
            assert texts == [choice["text"] for choice in result["choices"]]


# Of fields of a chat, by themselves; of chats and of completions, whole. What is refused by another code names it.
FIELDS: list[tuple[str, Any]] = [
    ("temperature", -0.5), ("top_p", 0), ("n", 17), ("max_tokens", 0), ("max_tokens", 5000),
    ("max_completion_tokens", 5), ("top_logprobs", 2), ("stream_options", {"include_usage": True}),
    ("stop", ["a"] * 17), ("stop", ""), ("min_tokens", -1),
    ("stop_token_ids", [99_999]), ("stop_token_ids", [1] * 129),
    ("chat_template_kwargs", {"tools": 1}), ("chat_template_kwargs", {"a": [1]}), ("chat_template_kwargs", {"a b": 1}),
    ("chat_template_kwargs", {"name": "<|end|>"}), ("max_tokens", -2), ("repeat_penalty", 0),
    ("seed", 2**63), ("logit_bias", {"5": 100.5}), ("logit_bias", {"05": 1.0}),
    ("logit_bias", {"-1": 1.0}), ("logit_bias", {"wizard": 1.0}), ("logit_bias", {"5": True}),
    ("logit_bias", {"5": "1"}), ("logit_bias", [5]), ("logit_bias", {"99999": 1.0}),
    ("logit_bias", {str(k): 1.0 for k in range(1025)}), ("tool_choice", "required"),
    ("response_format", {"type": "json_schema"}), ("messages", []),
    ("messages", [{"role": "user", "content": "<|end|>"}]),
]  # fmt: skip
CHATS: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.role", None),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.content", None),
    *(
        ({"messages": [{"role": "user", "content": [{"type": kind, kind: "x"}]}]}, "messages.content.type", code)
        for kind, code in (
            ("image_url", "unsupported_parameter"),
            ("input_audio", "unsupported_parameter"),
            ("x", None),
        )
    ),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", None),
    ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos", None),
    ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty", None),
    ({"messages": [{"role": "user", "content": "a\x00b"}]}, None, None),
    (
        {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": None},
        "messages",
        "context_length_exceeded",
    ),
    *(
        (
            {**more, "messages": [{"role": "user", "content": "word " * 200}], "seed": None},
            "messages",
            "context_length_exceeded",
        )
        for more in ({"max_tokens": 1}, {"max_tokens": 1, "n": 2}, {**BEAMS, "max_tokens": 1})
    ),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice", None),
    ({"functions": [{"name": "a"}]}, "functions", "unsupported_parameter"),
    ({"function_call": {"name": "a"}}, "function_call", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"magic": 1}, "magic", "unknown_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", None),
    (BEAMS, "seed", None),
    ({**BEAMS, "seed": None, "stop": "x"}, "stop", None),
    ({**BEAMS, "seed": None, "early_stopping": "never"}, "early_stopping", "invalid_type"),
]
COMPLETIONS: list[tuple[dict[str, Any], str | None, str | None]] = [
    *(({"prompt": prompt}, "prompt", None) for prompt in (["a", 5], [], [[1, 2], ["a"]], [9999])),
    *(
        ({"prompt": prompt, **more}, "prompt", "context_length_exceeded")
        for prompt in ("word " * 200, [[5], [5] * 512])
        for more in ({}, {"max_tokens": 1}, {"echo": True, "logprobs": 1, "max_tokens": 1})
    ),
    ({"prompt": [5] * 500, "max_tokens": 100}, "max_tokens", "context_length_exceeded"),
    ({"prompt": ["a"] * 20}, "n", None),
    ({"prompt": [[5] * 500] * 16, "echo": True, "logprobs": 20, "max_tokens": 0}, "echo", None),
    ({"prompt": [5, 6], "echo": True}, "echo", None),
    ({"echo": "yes"}, "echo", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", None),
    ({"suffix": "b"}, "suffix", None),
    ({"best_of": 3}, "best_of", None),
    ({"length_penalty": 2.0}, "length_penalty", None),
    ({"logit_bias": dict.fromkeys(map(str, range(VOCABULARY)), -100)}, "logit_bias", None),
    ({**BEAMS, "n": 3, "best_of": 2}, "best_of", None),
    ({**BEAMS, "echo": True, "logprobs": 1}, "echo", None),
    ({**BEAMS, "prompt": ["a"] * 5, "best_of": 4}, "n", None),
    ({**BEAMS, "temperature": 0.5}, "temperature", None),
    ({**BEAMS, "presence_penalty": 0.5}, "presence_penalty", None),
]
BAD: list[tuple[str, dict[str, Any], str | None, str | None]] = [
    *((CHAT, {**ASK, name: value}, name, None) for name, value in FIELDS),
    *((CHAT, {**ASK, **fields}, param, code) for fields, param, code in CHATS),
    *((COMPLETE, {"prompt": "a", **fields}, param, code) for fields, param, code in COMPLETIONS),
    ("/v1/responses", {"input": "word " * 200, "max_output_tokens": 16}, "input", "context_length_exceeded"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_400_that_names_the_field(shared: Api, number: int, stream: bool) -> None:
    path, fields, param, code = BAD[number]
    if not {"stream_options", "use_beam_search"} & {*fields}:
        fields = {**fields, "stream": stream}
    error = check_error(shared.post(path, **fields), 400, param, code)
    assert "word word" not in error["message"] and "wizard" not in error["message"]


def test_a_picture_in_a_chat_is_told_that_texts_are_read(shared: Api) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is it?"}, image]
    chat = shared.post(CHAT, messages=[{"role": "user", "content": content}])
    parts = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    response = shared.post("/v1/responses", input=[{"role": "user", "content": parts}])
    for answer in (chat, response):
        assert "pictures are not read" in check_error(answer, 400, code="unsupported_parameter")["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": -1}, {}), ({"max_completion_tokens": -1}, {}), ({"top_k": -1}, {"top_k": 0}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}), ({"stop": ["a"] * 16}, {"stop": ["a"] * 16}),
        *((fields, fields) for fields in (
            {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]}, {"chat_template_kwargs": {"thinking": False}},
        )),
    ],
)  # fmt: skip
def test_what_other_servers_have_goes_into_the_job(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = text_drafts.read(CHAT, ASK).job.to_dict()
    plain.pop("max_tokens", None)
    given = {name: value for name, value in ASK.items() if name != "max_tokens"}
    assert text_drafts.read(CHAT, {**given, **fields}).job.to_dict() == {**plain, **expected}


def test_a_completion_without_a_limit() -> None:
    jobs = [text_drafts.read(COMPLETE, {"prompt": "a", **more}).job for more in ({}, {"max_tokens": -1})]
    assert [job.max_tokens for job in jobs] == [16, None]


def test_calls_of_a_history_may_have_their_arguments_as_an_object() -> None:
    jobs = []
    for arguments in ({"city": "Paris"}, '{"city": "Paris"}'):
        call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]
        jobs.append(text_drafts.read(CHAT, {"messages": messages}).job)
    assert jobs[0] == jobs[1]


def test_a_worker_of_an_older_version_is_not_asked_for_what_it_does_not_read() -> None:
    card = dataclasses.replace(TEXT, limits=dataclasses.replace(TEXT.limits, options=(), max_stops=0))
    for fields, name in (
        ({"min_tokens": 1}, "min_tokens"), ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"stop": ["a"] * 5}, "stop"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            text_drafts.draft(text_drafts.read(CHAT, {**ASK, **fields}), card, "")
        assert caught.value.param == name


def constrained(schema: dict[str, Any]) -> dict[str, Any]:
    return {**ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_a_large_body_is_validated_on_a_thread_of_its_own(shared: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    real = text_drafts.read
    monkeypatch.setattr(
        text_drafts, "read", lambda *given, **more: threads.append(threading.get_ident()) or real(*given, **more)
    )
    large = constrained({"type": "boolean", "description": "x" * 40_000})
    for fields in (ASK, ASK, large):
        assert shared.post(CHAT, **fields).status_code == 200
    assert threads[0] == threads[1] != threads[2]


def test_a_schema_beyond_a_bound_is_refused_before_there_is_a_job() -> None:
    with pytest.raises(ApiError, match="at most") as caught:
        text_drafts.read(CHAT, constrained({"enum": [*range(2_001)]}))
    assert caught.value.status == 400 and caught.value.param == "json_schema"


def test_a_schema_whose_tokens_cost_too_much_is_a_400_and_is_not_logged_whole(
    shared: Api, caplog: pytest.LogCaptureFixture
) -> None:
    """It was an internal error, and the log got the grammar."""
    pytest.importorskip("llguidance")
    marker = "never in a log " * 20
    schema = {"type": "object", "required": ["a"], "additionalProperties": False, "description": marker,
              "properties": {"a": {"type": "string", "pattern": "^(a?){300}a{300}$"}}}  # fmt: skip
    error = check_error(shared.post(CHAT, **constrained(schema) | {"max_tokens": 60, "n": 2}), 400, "json_schema")
    assert "no token satisfies the schema (lexer error" in error["message"] and len(error["message"]) < 300
    rejected = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert rejected and all(len(message) < 400 and "never in a log" not in message for message in rejected)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "said"), [({"type": "nothing"}, ""), ({"$ref": "#"}, "no finite text satisfies it")]
)
def test_a_schema_that_nothing_fits_is_refused(shared: Api, schema: dict[str, Any], said: str, stream: bool) -> None:
    pytest.importorskip("llguidance")
    error = check_error(shared.post(CHAT, **constrained(schema), stream=stream), 400, "json_schema")
    assert said in error["message"]


def test_an_answer_that_no_token_can_go_on_with_is_no_success(shared: Api) -> None:
    """What is seen only on the way: after {"a": there is no way on. That was told as an answer that ended by itself."""
    pytest.importorskip("llguidance")
    schema = {"$defs": {"n": {"$ref": "#/$defs/n"}}, "type": "object", "required": ["a"],
              "patternProperties": {"^a$": {"$ref": "#/$defs/n"}}, "additionalProperties": False}  # fmt: skip
    fields = constrained(schema) | {"max_tokens": 60}
    error = check_error(shared.post(CHAT, **fields), 400, "json_schema")
    assert "no token satisfies the schema" in error["message"]
    streamed = shared.post(CHAT, **fields, stream=True)
    if streamed.status_code == 200:  # it was told of what had been written by then
        last = [line for line in streamed.text.splitlines() if line][-1]
        assert json.loads(last[6:])["error"]["param"] == "json_schema" and 'finish_reason":"' not in streamed.text
    else:
        check_error(streamed, 400, "json_schema")
    assert shared.post(CHAT, **ASK).status_code == 200


def test_log_probabilities_leave_out_the_end(shared: Api) -> None:
    """Put together they are the text. A bias has the answer end where it is wanted."""
    for path, fields in ((CHAT, {**ASK, "logprobs": True}), (COMPLETE, {"prompt": "a", "logprobs": 1})):
        (choice,) = shared.post(path, **fields, logit_bias={END: 100}).json()["choices"]
        assert choice["finish_reason"] == "stop" and not choice["logprobs"]
    streamed = shared.post(CHAT, **ASK, logprobs=True, logit_bias={END: 100}, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line and "[DONE]" not in line]
    assert all(not (one["choices"][0]["logprobs"] or {}).get("content") for one in chunks)


def test_a_chat_goes_on_with_its_own_message(client: openai.OpenAI) -> None:
    """As agents do it: with the client's object itself; and with no tools."""
    ask: dict[str, Any] = {**ASK, "model": MODEL}
    message = client.chat.completions.create(**ask).choices[0].message
    again = client.chat.completions.create(
        **{**ask, "messages": [*ASK["messages"], message, *ASK["messages"]]}, tools=[], tool_choice="none",
        parallel_tool_calls=False, prediction=None, modalities=["text"],
        extra_body={"functions": None, "audio": None, "tool_choice": None},
    )  # fmt: skip
    assert again.choices[0].message.content is not None


@pytest.mark.parametrize("path", ["", "/v1", "/v1/models/{}"])
def test_hugging_faces_client_chats_without_a_name(shared: Api, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """It sends `dummy` for the model, whatever address it was given."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it calls this machine
    name = MODEL
    answer = InferenceClient(model=shared.url + path.format(name)).chat_completion(ASK["messages"], max_tokens=3)
    assert answer.model == name and answer.usage.completion_tokens <= 3
    assert shared.post(CHAT, **ASK, model="tgi").json()["model"] == name
    check_error(shared.post(f"/v1/models/other{CHAT}", **ASK), 404, "model", "model_not_found")


def test_a_bias_decides(client: openai.OpenAI) -> None:
    token = stage.plain(stage.small(), "cat")[1]
    made = client.completions.create(model=MODEL, prompt="a", max_tokens=5, logit_bias={str(token): 100})
    assert made.choices[0].text == stage.small().tokenizer.backend_tokenizer.decode([token]) * 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1, 6])
def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, most: int, stream: bool) -> None:
    """Of texts, which begin with a token that has none, and of token ids, as lm-eval has them; by transformers."""
    texts = ["one é", "two 🦊\n"]
    prompts = [stage.plain(stage.small(), text) for text in texts]
    for prompt in (texts, [list(tokens) for tokens in prompts]):
        ask: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": most, "temperature": 0}
        made: Any = client.completions.create(**ask, logprobs=2, echo=True, stream=stream)
        told = [
            choice for part in (made if stream else [made]) for choice in part.choices if choice.text or choice.logprobs
        ]
        told.sort(key=lambda choice: choice.index)  # whole, at the end
        plain = client.completions.create(**{**ask, "max_tokens": most or 1}).choices
        for tokens, text, one, other in zip(prompts, texts, told, plain, strict=True):
            assert one.text == text + (other.text if most else "")
            found = one.logprobs
            count = len(tokens)
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
            rows = stage.logits(stage.small(), tokens).log_softmax(-1)
            expected = [row[token].item() for row, token in zip(rows, tokens[1:], strict=False)]
            assert found.token_logprobs[1:count] == pytest.approx(expected, abs=1e-3)
            best = [max(top.values()) for top in found.top_logprobs[1:count]]
            assert best == pytest.approx(rows.amax(-1).tolist()[: count - 1], abs=1e-3)
            assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == len(found.token_logprobs)
            assert len(found.tokens) == count + most or (one.finish_reason == "stop" and len(found.tokens) > count)
            assert all(2 <= len(top) <= 3 for top in found.top_logprobs[1:])
            assert found.tokens[0] == "<|bos|>" and found.text_offset[:3] == [0, 0, 1]
            for name, offset in zip(found.tokens[1:count], found.text_offset[1:], strict=False):
                assert name.startswith("bytes:") or text[offset:].startswith(name)
            assert all(offset >= len(text) for offset in found.text_offset[count:])


def test_control_tokens_that_a_text_has_take_their_characters(client: openai.OpenAI) -> None:
    text = "two<|end|> x"
    (choice,) = client.completions.create(model=MODEL, prompt=text, echo=True, logprobs=0, max_tokens=0).choices
    found = choice.logprobs
    assert choice.text == text and found is not None and found.tokens and found.text_offset
    assert found.tokens[0] == "<|bos|>" and "<|end|>" in found.tokens
    assert all(text[at:].startswith(name) for name, at in zip(found.tokens[1:], found.text_offset[1:], strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_written_beside_the_event_loop(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads = []
    read = TextAnswers.result

    def noted(self: Any, result: dict[str, Any]) -> Any:
        threads.append(threading.current_thread().name)
        return read(self, result)

    monkeypatch.setattr(TextAnswers, "result", noted)
    for length in (2, 400):
        answer: Any = client.completions.create(
            model=MODEL, prompt=[[7] * length], echo=True, logprobs=5, max_tokens=0, stream=stream
        )
        count = sum(
            len(c.choices[0].logprobs.tokens) for c in (answer if stream else [answer]) if c.choices[0].logprobs
        )
        assert count == length
    loop, beside = threads
    assert loop != beside
