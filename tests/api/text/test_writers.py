"""What a client puts together of a stream is the whole answer, of any events, and by OpenAI's own models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from api.text.answers import TextAnswers
from api.text.drafts import CHAT, COMPLETIONS, RESPONSES
from api.text.events import Begin, CallBegin, CallDelta, Delta, Event, Failure, Finish, HeldBack, TextDelta, Usage
from api.text.writers import ChatWriter, CompletionWriter, ResponseWriter
from contract.tools import CALLS, HERMES
from tests.api.test_round_trips import ASK, chunks_of, job_of, result_of, whole_of

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
ENTRY = st.builds(
    lambda id, token, logprob, top: {"id": id, "token": token, "logprob": logprob, "top": top},
    st.integers(0, 9), TEXT, st.sampled_from([-0.5, -2.0]),
    st.lists(st.fixed_dictionaries({"id": st.integers(10, 19), "token": TEXT, "logprob": st.just(-1.0)}), max_size=2),
)  # fmt: skip
LOGPROBS = st.none() | st.lists(ENTRY, min_size=1, max_size=3)
STREAM: TypeAdapter[Any] = TypeAdapter(list[ResponseStreamEvent])
USAGE = st.builds(Usage, *[st.integers(0, 99)] * 3)


@st.composite
def choices(
    draw: st.DrawFn, most: int, *, calls: bool = False, logprobs: bool = True, echo: bool = False
) -> list[Event]:
    """The events of up to so many choices, in any order that a worker may report them in, and the end."""
    told = LOGPROBS if logprobs else st.none()
    sequences: list[list[Event]] = []
    for index in range(draw(st.integers(1, most))):
        sequence: list[Event] = []
        begun = 0
        for kind in draw(st.lists(st.sampled_from(["text", "none", *["call", "arguments"] * calls]), max_size=6)):
            if kind == "call":
                sequence.append(CallBegin(index, begun, draw(st.sampled_from("fg")), draw(told)))
                begun += 1
            elif kind == "arguments" and sequence and isinstance(sequence[-1], CallBegin | CallDelta):
                sequence.append(CallDelta(index, begun - 1, draw(TEXT), draw(told)))
            elif kind == "text":
                sequence.append(TextDelta(index, draw(TEXT), draw(told)))
            elif logprobs and not echo:
                sequence.append(HeldBack(index, draw(told)))
        reason = draw(st.sampled_from(["stop", "length"]))
        sequences.append([*sequence, Finish(index, "tool_calls" if begun and reason == "stop" else reason)])
    begins = [Begin(index, draw(TEXT) if echo else "") for index in range(len(sequences))]
    order = draw(st.permutations([k for k, sequence in enumerate(sequences) for _ in sequence]))
    return [*begins, *(sequences[k].pop(0) for k in order), draw(USAGE)]


def content(events: Sequence[Event], choice: int) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of a choice, by its events alone."""
    text, calls = "", []
    for event in events:
        match event:
            case Begin(index, echo) if index == choice:
                text += echo
            case TextDelta(index, more) if index == choice:
                text += more
            case CallBegin(index, _, name) if index == choice:
                calls.append((name, ""))
            case CallDelta(index, call, arguments) if index == choice:
                calls[call] = (calls[call][0], calls[call][1] + arguments)
    return text, calls


@given(choices(3, calls=True))
def test_the_chunks_of_a_chat_join_to_the_whole(events: list[Event]) -> None:
    """As OpenAI's client joins them."""
    job = job_of(CHAT, {**ASK, "n": 3})
    whole = ChatWriter(job).whole(events)
    ChatCompletion.model_validate(whole)
    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
    for chunk in chunks_of(ChatWriter(job, usage=True), events):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    joined = state.current_completion_snapshot
    assert joined.usage is not None and joined.usage.to_dict() == whole["usage"]
    assert len(joined.choices) == len(whole["choices"])
    for choice, expected in zip(sorted(joined.choices, key=lambda choice: choice.index), whole["choices"], strict=True):
        message, calls = expected["message"], expected["message"].get("tool_calls", [])
        assert (choice.message.content or "") == (message["content"] or "")
        told = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        assert told == [(call["id"], *call["function"].values()) for call in calls]
        assert (message["content"] or "", [part[1:] for part in told]) == content(events, choice.index)
        assert choice.finish_reason == expected["finish_reason"]
        entries = [] if choice.logprobs is None else choice.logprobs.content or []
        assert [entry.to_dict() for entry in entries] == (expected["logprobs"] or {"content": []})["content"]


@given(choices(3, echo=True), st.booleans())
def test_the_chunks_of_a_completion_join_to_the_whole(events: list[Event], usage: bool) -> None:
    job = job_of(COMPLETIONS, {"prompt": ["a"] * 3})
    whole = CompletionWriter(job).whole(events)
    Completion.model_validate(whole)
    joined: dict[int, dict[str, Any]] = {}
    chunks = chunks_of(CompletionWriter(job, usage=usage), events)
    for chunk in chunks:
        for choice in chunk["choices"]:
            entry = joined.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": {}})
            entry["text"] += choice["text"]
            entry["finish_reason"] = choice["finish_reason"] or entry["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                entry["logprobs"].setdefault(name, []).extend(values)
    assert [{"index": k, **joined[k], "logprobs": joined[k]["logprobs"] or None} for k in sorted(joined)] == [
        {name: choice[name] for name in ("index", "text", "finish_reason", "logprobs")} for choice in whole["choices"]
    ]
    assert [choice["text"] for choice in whole["choices"]] == [content(events, k)[0] for k in sorted(joined)]
    assert [chunk["usage"] for chunk in chunks if "usage" in chunk] == (
        [None] * (len(chunks) - 1) + [whole["usage"]] if usage else []
    )


@given(choices(1, calls=True, logprobs=False))
def test_the_events_of_a_response_describe_the_whole(events: list[Event]) -> None:
    """Items that end are those of the response, deltas make their texts, and numbers go on without a gap."""
    job = job_of(RESPONSES, {"input": "a"})
    whole = ResponseWriter(job).whole(events)
    Response.model_validate(whole)
    sent = chunks_of(ResponseWriter(job), events)
    STREAM.validate_python(sent)
    assert [each["sequence_number"] for each in sent] == [*range(len(sent))]
    assert sent[-1] == {
        "type": f"response.{whole['status']}", "response": whole, "sequence_number": len(sent) - 1,
    }  # fmt: skip
    assert [each["item"] for each in sent if each["type"] == "response.output_item.done"] == whole["output"]
    added = [each["output_index"] for each in sent if each["type"] == "response.output_item.added"]
    assert added == [*range(len(whole["output"]))]
    text = "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == "message")
    calls = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
    assert (text, calls) == content(events, 0)
    for item in whole["output"]:
        told = "".join(each["delta"] for each in sent if "delta" in each and each["item_id"] == item["id"])
        assert told == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])


CALL = f'{CALLS[HERMES].begin}{{"name": "mood", "arguments": {{"happy": true}}}}{CALLS[HERMES].end}'
TOOL = {"type": "function", "function": {"name": "mood"}}
FUNCTION = {"type": "function", "name": "mood"}


def joined(events: Sequence[Event]) -> list[Any]:
    """The events with the deltas of one kind and choice put together that follow one another, without empty ones."""
    parts: list[Any] = []
    for event in sorted(events, key=lambda event: getattr(event, "choice", 99)):
        text = getattr(event, "text", getattr(event, "arguments", None))
        event = event._replace(logprobs=None) if isinstance(event, Delta | HeldBack) else event
        key = (type(event), getattr(event, "choice", None), getattr(event, "call", None))
        if text is None or not parts or parts[-1][0] != key:
            parts.append([key, event if text is None else ""])
        if text is not None:
            parts[-1][1] += text
    return [part for part in parts if part[1] != "" and part[0][0] is not HeldBack]


@given(st.lists(st.lists(TEXT | st.just(CALL), max_size=4), min_size=1, max_size=3), st.booleans(), st.data())
@pytest.mark.parametrize("tools", [False, True])
def test_reports_in_any_pieces_tell_what_the_result_tells(
    tools: bool, parts: list[list[str]], logprobs: bool, data: st.DataObject
) -> None:
    """Of attempts that begin anew too, and where reports are lost; no text and no log probability comes twice."""
    job = job_of(CHAT, {**ASK, "n": len(parts), **({"tools": [TOOL]} if tools else {})})
    job.parameters["tool_format"] = HERMES
    texts = ["".join(part) for part in parts]
    entries = [{"id": k, "token": "a", "logprob": -1.0, "top": []} for k in range(6 * logprobs)]
    result = result_of(texts, entries)
    answers, events = TextAnswers(job), []
    for _ in range(data.draw(st.integers(0, 6))):
        index = data.draw(st.integers(0, len(texts) - 1))
        at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(texts[index]))] * 2)))
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(entries))] * 2)))
        piece = {"index": index, "at": at, "text": texts[index][at:end]}
        piece |= {"token": first, "logprobs": entries[first:last]} if logprobs else {}
        events += answers.progress({"pieces": [piece]})
    if data.draw(st.booleans()):  # an older worker's
        events += answers.progress({"texts": texts, **({"logprobs": [entries] * len(texts)} if logprobs else {})})
    events += answers.result(result)
    whole = [*TextAnswers(job).result(result)]
    assert joined(events) == joined(whole)
    told = [len(event.logprobs or ()) for event in events if isinstance(event, Delta | HeldBack)]
    assert sum(told) == len(entries) * len(texts)
    assert (
        isinstance(events[-1], Usage)
        and whole_of(CHAT, job, result)["choices"] == (ChatWriter(job).whole(events)["choices"])
    )


def test_a_failure_ends_a_stream_in_the_shape_of_its_endpoint() -> None:
    error = {"message": "m", "type": "server_error", "param": None, "code": "c"}
    for writer in (ChatWriter(job_of(CHAT, ASK)), CompletionWriter(job_of(COMPLETIONS, {"prompt": "a"}))):
        assert chunks_of(writer, [Failure({"error": error})]) == [{"error": error}]
    (sent,) = chunks_of(ResponseWriter(job_of(RESPONSES, {"input": "a"})), [Failure({"error": error})])
    assert sent == {"type": "error", "code": "c", "message": "m", "param": None, "sequence_number": 0}
