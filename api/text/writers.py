"""Writes the events of text answers in the shapes of OpenAI's endpoints: whole, or as server-sent events.

A whole chat or completion is what its chunks join to, as clients join them; a response is what its events describe.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from api.http.json_parts import dumps
from api.text.events import Begin, CallBegin, CallDelta, ChoiceEvent, Event, Failure, Finish, TextDelta, Usage
from contract.text import TextJob
from core.jobs.record import Job

Json = dict[str, Any]


class TextWriter:
    """Writes the answers of one job, either whole or as a stream."""

    prefix: ClassVar[str]  # of the id

    def __init__(self, job: Job, *, usage: bool = False) -> None:
        """`usage`: a stream of chunks tells the numbers of tokens."""
        self._id = job.id.removeprefix("job_")
        self._request = TextJob.read(job.parameters)
        self._created, self._model = int(job.created), self._request.adapter or job.model
        self._with_usage = usage

    def whole(self, events: Iterable[Event]) -> Json:
        """The response to a request without `stream`, from all events of answers that succeeded."""
        raise NotImplementedError

    def stream(self, event: Event) -> list[bytes]:
        """The server-sent events for an event."""
        raise NotImplementedError

    def _call_id(self, event: CallBegin) -> str:
        """The id of a call, the same each time that an answer is read."""
        return f"call_{self._id}_{event.choice}_{event.call}"


class _ChunkWriter(TextWriter):
    """What chats and completions share: each event of a choice is a chunk, with one entry of `choices`."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, job: Job, *, usage: bool = False) -> None:
        super().__init__(job, usage=usage)
        self._warnings = self._request.warnings

    def whole(self, events: Iterable[Event]) -> Json:
        entries: dict[int, list[Json]] = {}  # by choice
        usage: Json = {}
        for event in events:
            if isinstance(event, Usage):
                usage = _usage(event)
            elif not isinstance(event, Failure) and (entry := self._entry(event)) is not None:
                entries.setdefault(event.choice, []).append(entry)
        choices = [self._whole_entry(_joined(entries[k])) for k in sorted(entries)]
        return self._object(self.kind, choices, usage=usage)

    def stream(self, event: Event) -> list[bytes]:
        if isinstance(event, Failure):
            return [_sse(event.content)]
        if isinstance(event, Usage):
            last = [_sse(self._object(self.chunk_kind, [], usage=_usage(event)))] if self._with_usage else []
            return [*last, b"data: [DONE]\n\n"]
        if (entry := self._entry(event)) is None:
            return []
        no_usage = {"usage": None} if self._with_usage else {}  # each chunk has that field, the last one the numbers
        return [_sse(self._object(self.chunk_kind, [entry], **no_usage))]

    def _object(self, kind: str, choices: list[Json], **fields: Any) -> Json:
        """An answer or a chunk. Warnings come with the first one only."""
        answer = {
            "id": self.prefix + self._id, "created": self._created, "model": self._model, "system_fingerprint": None,
            "object": kind, "choices": choices, **fields,
        }  # fmt: skip
        warnings, self._warnings = self._warnings, None
        return {**answer, "warnings": warnings} if warnings else answer

    def _entry(self, event: ChoiceEvent) -> Json | None:
        """A chunk's entry for an event of a choice; None: there is none."""
        if (content := self._content(event)) is None:
            return None
        logprobs = getattr(event, "logprobs", None)
        entry = {
            "index": event.choice,
            **content,
            "logprobs": self._logprobs(event.choice, logprobs) if logprobs else None,
            "finish_reason": event.reason if isinstance(event, Finish) else None,
        }
        if isinstance(event, Finish) and event.cumulative_logprob is not None:
            entry["cumulative_logprob"] = event.cumulative_logprob
        return entry

    def _content(self, event: ChoiceEvent) -> Json | None:
        raise NotImplementedError

    def _logprobs(self, choice: int, logprobs: Sequence[Json]) -> Json:
        raise NotImplementedError

    def _whole_entry(self, entry: Json) -> Json:
        """The choice of a whole answer whose chunks join to this."""
        return entry


class ChatWriter(_ChunkWriter):
    """`POST /v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def _content(self, event: ChoiceEvent) -> Json:
        match event:
            case Begin():
                return {"delta": {"role": "assistant", "content": "", "refusal": None}}
            case TextDelta():
                return {"delta": {"content": event.text}}
            case CallBegin():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.call, "id": self._call_id(event), "type": "function", "function": function}
                return {"delta": {"tool_calls": [call]}}
            case CallDelta():
                return {"delta": {"tool_calls": [{"index": event.call, "function": {"arguments": event.arguments}}]}}
        return {"delta": {}}

    def _logprobs(self, choice: int, logprobs: Sequence[Json]) -> Json:
        content = [
            {**_token(entry), "top_logprobs": [_token(other) for other in _candidates(entry)] if entry["top"] else []}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _whole_entry(self, entry: Json) -> Json:
        message = {**entry.pop("delta"), "annotations": []}
        calls: dict[int, list[Json]] = {}
        for piece in message.pop("tool_calls", ()):
            calls.setdefault(piece.pop("index"), []).append(piece)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": [*map(_joined, calls.values())]}
        return {"index": entry.pop("index"), "message": message, **entry}


class CompletionWriter(_ChunkWriter):
    """`POST /v1/completions`."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, job: Job, *, usage: bool = False) -> None:
        super().__init__(job, usage=usage)
        self._offsets: dict[int, _Offsets] = {}  # by choice

    def _content(self, event: ChoiceEvent) -> Json | None:
        if isinstance(event, Begin):
            self._offsets[event.choice] = _Offsets(len(event.echo))
            return {"text": event.echo} if event.echo else None
        return {"text": event.text if isinstance(event, TextDelta) else ""}

    def _logprobs(self, choice: int, logprobs: Sequence[Json]) -> Json:
        candidates = [_candidates(entry) for entry in logprobs]
        names = [_names(entry, others) for entry, others in zip(logprobs, candidates, strict=True)]
        return {
            "tokens": [entry_names[_key(entry)] for entry, entry_names in zip(logprobs, names, strict=True)],
            "token_logprobs": [entry["logprob"] for entry in logprobs],
            "top_logprobs": [
                None  # of a prompt's first token, which nothing predicts
                if entry["logprob"] is None
                else {entry_names[_key(other)]: other["logprob"] for other in others}
                for entry, others, entry_names in zip(logprobs, candidates, names, strict=True)
            ],
            "text_offset": [self._offsets[choice].add(entry) for entry in logprobs],
        }


class ResponseWriter(TextWriter):
    """`POST /v1/responses`: one answer, as a list of items, each a message or a call."""

    prefix = "resp_"

    def __init__(self, job: Job, *, usage: bool = False) -> None:
        super().__init__(job, usage=usage)
        self._items: list[Json] = []
        self._open: Json | None = None  # the last item, if more may be added to it
        self._cut = False  # whether the answer ended before its end
        self._usage: Json | None = None
        self._sent = 0  # events

    def whole(self, events: Iterable[Event]) -> Json:
        for event in events:
            self._events(event)
        return self._response()

    def stream(self, event: Event) -> list[bytes]:
        events = self._events(event)
        first, self._sent = self._sent, self._sent + len(events)
        return [_sse({**each, "sequence_number": first + k}, each["type"]) for k, each in enumerate(events)]

    def _events(self, event: Event) -> list[Json]:
        """The response's events for an event, which is taken into the items."""
        match event:
            case Begin():
                states = ("created", "in_progress")
                return [{"type": f"response.{state}", "response": self._response()} for state in states]
            case TextDelta():
                is_open = self._open is not None and self._open["type"] == "message"
                begun = [] if is_open else self._end_item() + self._begin_message()
                self._items[-1]["content"][0]["text"] += event.text
                return [*begun, self._event("output_text.delta", content_index=0, delta=event.text, logprobs=[])]
            case CallBegin():
                call = {"type": "function_call", "call_id": self._call_id(event), "name": event.name, "arguments": ""}
                return [*self._end_item(), self._begin_item("fc", call)]
            case CallDelta():
                self._items[-1]["arguments"] += event.arguments
                return [self._event("function_call_arguments.delta", delta=event.arguments)]
            case Finish():
                self._cut = event.reason == "length"
                begun = [] if self._items else self._begin_message()  # an answer of no text is a message
                return begun + self._end_item("incomplete" if self._cut else "completed")
            case Usage():
                self._usage = {
                    "input_tokens": event.prompt,
                    "input_tokens_details": {"cached_tokens": event.cached, "cache_write_tokens": 0},
                    "output_tokens": event.completion,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": event.prompt + event.completion,
                }
                response = self._response()
                return [{"type": f"response.{response['status']}", "response": response}]
            case Failure():
                error = event.content["error"]
                return [{"type": "error", **{name: error[name] for name in ("code", "message", "param")}}]
        return []

    def _response(self) -> Json:
        """The response so far."""
        request, ended = self._request, self._usage is not None
        tools = [
            {"type": "function", "description": None, "parameters": None, "strict": False, **tool["function"]}
            for tool in request.tools or ()
        ]
        response = {
            "id": self.prefix + self._id, "object": "response", "created_at": self._created, "model": self._model,
            "status": "in_progress" if not ended else "incomplete" if self._cut else "completed",
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "instructions": None, "metadata": {}, "previous_response_id": None, "store": False,
            "max_output_tokens": request.max_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p, "truncation": "disabled",
            "parallel_tool_calls": request.parallel_tool_calls is not False, "tools": tools,
            "tool_choice": "required" if request.tools_required else "auto", "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "output": self._items if ended else [], "usage": self._usage,
        }  # fmt: skip
        return {**response, "warnings": request.warnings} if request.warnings else response

    def _begin_message(self) -> list[Json]:
        added = self._begin_item("msg", {"type": "message", "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items[-1]["content"] = [part]
        return [added, self._event("content_part.added", content_index=0, part=dict(part))]

    def _begin_item(self, prefix: str, item: Json) -> Json:
        self._open = {"id": f"{prefix}_{self._id}_{len(self._items)}", "status": "in_progress", **item}
        self._items.append(self._open)
        return self._event("output_item.added", item=dict(self._open))

    def _end_item(self, status: str = "completed") -> list[Json]:
        """The events that end the open item, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events = [
                self._event("output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._event("content_part.done", content_index=0, part=part),
            ]
        else:
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        return [*events, self._event("output_item.done", item=item)]

    def _event(self, kind: str, /, **fields: Any) -> Json:
        """An event of the last item."""
        of = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self._items) - 1, **of, **fields}


def _sse(content: Json, name: str = "") -> bytes:
    """A server-sent event of JSON, with a name if it has one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(content)}\n\n".encode("ascii")


def _joined(parts: Sequence[Any]) -> Any:
    """Parts of chunks as one, as clients join them: texts and lists go on, members of objects are joined."""
    parts = [part for part in parts if part is not None]
    last = parts[-1] if parts else None
    if isinstance(last, dict):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _joined([part[name] for part in parts if name in part]) for name in names}
    if isinstance(last, list):
        return [item for part in parts for item in part]
    return "".join(parts) if isinstance(last, str) else last


def _usage(event: Usage) -> Json:
    return {
        "prompt_tokens": event.prompt,
        "completion_tokens": event.completion,
        "total_tokens": event.prompt + event.completion,
        "prompt_tokens_details": {"cached_tokens": event.cached},
    }


# -- log probabilities -----------------------------------------------------------------------------------------------


class _Offsets:
    """Counts the characters of a choice's tokens, of which several may make one."""

    def __init__(self, start: int) -> None:
        self._characters = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, entry: dict[str, Any]) -> int:
        """Add a token; return the number of characters before it. Control tokens have none."""
        before = self._characters
        if not entry.get("control"):
            self._characters += len(self._decoder.decode(_bytes(entry)))
        return before


_Key = int | tuple[str, float]


def _key(entry: dict[str, Any]) -> _Key:
    """What tells tokens of one place apart: the id, which results of older workers do not have."""
    id: int | None = entry.get("id")
    return (entry["token"], entry["logprob"]) if id is None else id


def _candidates(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The likeliest tokens at a token's place, and the drawn one, last if it is none of them."""
    drawn = {name: value for name, value in entry.items() if name != "top"}
    return [*entry["top"], *([] if any(_key(other) == _key(drawn) for other in entry["top"]) else [drawn])]


def _names(drawn: dict[str, Any], candidates: Sequence[dict[str, Any]]) -> dict[_Key, str]:
    """A name for each token: its text, or its bytes where these are no whole characters; its id where that is taken."""
    names: dict[_Key, str] = {}
    for entry in (drawn, *candidates):
        key, name = _key(entry), entry["token"]
        if "bytes" in entry:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
        if key not in names:
            names[key] = f"token_id:{key}" if name in names.values() and isinstance(key, int) else name
    return names


def _bytes(entry: dict[str, Any]) -> bytes:
    return bytes(entry["bytes"]) if "bytes" in entry else str(entry["token"]).encode("utf-8", "replace")


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": list(_bytes(entry))}
