"""Builds text responses in OpenAI's format: whole, and in chunks."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

from api.tool_calls import Delta, ToolCallParser, call_id, tool_call
from contract.text import TextJob
from core.jobs.record import Job


def event_bytes(content: dict[str, Any], name: str = "") -> bytes:
    """A server-sent event of JSON, with a name if it has one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content, separators=(',', ':'), allow_nan=False)}\n\n".encode("ascii")


_ENTRY_BYTES = 64  # of a log probability in a response, about


def response_size(job: Job, result: dict[str, Any]) -> int:
    """The number of bytes in the response of a job with this result, about."""
    entry_bytes = _ENTRY_BYTES * (1 + (job.parameters.get("logprobs") or 0))
    return sum(len(choice["text"]) + len(choice["logprobs"]) * entry_bytes for choice in result["choices"])


class AnswerFormat:
    """The format shared by chats and completions. A `choice` is one answer of a job's result."""

    kind = chunk_kind = prefix = ""

    def __init__(self, job: Job) -> None:
        self._head: dict[str, Any] = {
            "id": self.prefix + job.id.removeprefix("job_"),
            "created": int(job.created),
            "model": job.model,
            "system_fingerprint": None,
        }
        self._request = TextJob.read(job.parameters)
        self._warnings = self._request.warnings or []

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        """The response to a request without `stream`."""
        choices = [self._choice(index, choice) for index, choice in enumerate(result["choices"])]
        answer = {**self._head, "object": self.kind, "choices": choices, "usage": self.usage(result)}
        return {**answer, "warnings": self._warnings} if self._warnings else answer

    def usage(self, result: dict[str, Any]) -> dict[str, Any]:
        """Token counts; a prompt is counted once, however many answers it has."""
        prompt = sum(result["prompt_tokens"][:: self._request.n])
        completion = sum(choice["tokens"] for choice in result["choices"])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": result.get("cached_tokens", 0)},
        }

    def chunk(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_kind, "choices": list(choices)}
        if self._warnings:  # in the first chunk only
            chunk["warnings"], self._warnings = self._warnings, []
        return chunk if usage is None else {**chunk, "usage": usage}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk before a choice's text; None: nothing."""
        raise NotImplementedError

    def beginning(self, index: int) -> list[dict[str, Any]]:
        """The chunks before a choice's text."""
        return [] if (first := self.first(index)) is None else [first]

    def piece(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """A chunk with more of a choice's text."""
        raise NotImplementedError

    def pieces(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The chunks with more of a choice's text."""
        return [self.piece(index, text, logprobs)]

    def last(self, index: int, finish: str) -> dict[str, Any]:
        """The chunk with a choice's finish reason."""
        raise NotImplementedError

    def ending(self, index: int, finish: str) -> list[dict[str, Any]]:
        """The chunks after a choice's text."""
        return [self.last(index, finish)]

    def sse(self, choice: dict[str, Any], *, usage: bool) -> bytes:
        """A chunk as a server-sent event. With `usage` each has that field, and the last one the numbers."""
        chunk = self.chunk([choice])
        return event_bytes({**chunk, "usage": None} if usage else chunk)

    def closing(self, result: dict[str, Any], *, usage: bool) -> list[bytes]:
        """The events that end a stream."""
        told = [event_bytes(self.chunk([], self.usage(result)))] if usage else []
        return [*told, b"data: [DONE]\n\n"]

    def failure(self, content: dict[str, Any]) -> bytes:
        """The event that ends a stream with this error."""
        return event_bytes(content)

    def _choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(AnswerFormat):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job_id = job.id
        self._parsers: dict[int, ToolCallParser | None] = {}  # of the choices of a stream

    def _choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice["text"], "refusal": None, "annotations": []}
        finish = choice["finish_reason"]
        if (parser := ToolCallParser.of(self._request)) is not None:
            parser.feed(choice["text"])
            parser.end()
            if parser.calls:
                message |= {"content": parser.content or None, "tool_calls": self._calls(index, parser)}
                finish = _finish(finish)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice["logprobs"] or None),
            "finish_reason": finish,
        }

    def _calls(self, index: int, parser: ToolCallParser) -> list[dict[str, Any]]:
        return [
            tool_call(call_id(self._job_id, index, k), call.name, call.arguments) for k, call in enumerate(parser.calls)
        ]

    def first(self, index: int) -> dict[str, Any]:
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def piece(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        return {**self._delta(index, {"content": text}), "logprobs": self._logprobs(logprobs)}

    def pieces(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        if (parser := self._parser(index)) is None:
            return [self.piece(index, text, logprobs)]
        deltas = [self._delta_of(index, delta) for delta in parser.feed(text)]
        if logprobs and not deltas:
            deltas = [self._delta(index, {})]
        if logprobs:
            deltas[0]["logprobs"] = self._logprobs(logprobs)
        return deltas

    def last(self, index: int, finish: str) -> dict[str, Any]:
        return {**self._delta(index, {}), "finish_reason": finish}

    def ending(self, index: int, finish: str) -> list[dict[str, Any]]:
        if (parser := self._parser(index)) is None:
            return [self.last(index, finish)]
        deltas = [self._delta_of(index, delta) for delta in parser.end()]
        return [*deltas, self.last(index, _finish(finish) if parser.calls else finish)]

    def _parser(self, index: int) -> ToolCallParser | None:
        if index not in self._parsers:
            self._parsers[index] = ToolCallParser.of(self._request)
        return self._parsers[index]

    def _delta_of(self, index: int, delta: Delta) -> dict[str, Any]:
        if delta.call is None:
            return self._delta(index, {"content": delta.content})
        if delta.name is None:
            return self._delta(
                index, {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.arguments}}]}
            )
        call = tool_call(call_id(self._job_id, index, delta.call), delta.name, "")
        return self._delta(index, {"tool_calls": [{"index": delta.call, **call}]})

    @staticmethod
    def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    @staticmethod
    def _logprobs(logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        content = [
            {**_token(entry), "top_logprobs": [_token(other) for other in _candidates(entry)] if entry["top"] else []}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}


def _finish(finish: str) -> str:
    """The finish reason of an answer with calls."""
    return "tool_calls" if finish == "stop" else finish


class CompletionFormat(AnswerFormat):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._texts: dict[int, _TokenText] = {}  # by choice

    def _choice(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        choice_text = self.piece(index, self._echoed(index) + choice["text"], choice["logprobs"] or None)
        return {**choice_text, "finish_reason": choice["finish_reason"]}

    def first(self, index: int) -> dict[str, Any] | None:
        return self.piece(index, text, None) if (text := self._echoed(index)) else None

    def _echoed(self, index: int) -> str:
        """Return the prompt of this choice with `echo`, unless the choice's text begins with it; else nothing."""
        request = self._request
        if not request.echo or request.scores_prompts:
            return ""
        return str((request.prompts or [""])[index // request.n])

    def piece(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, logprobs), "finish_reason": None}

    def last(self, index: int, finish: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish}

    def _logprobs(self, index: int, logprobs: Sequence[dict[str, Any]] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        text = self._texts.setdefault(index, _TokenText(len(self._echoed(index))))
        names = [_names(entry, _candidates(entry)) for entry in logprobs]
        return {
            "tokens": [entry_names[_key(entry)] for entry, entry_names in zip(logprobs, names, strict=True)],
            "token_logprobs": [entry["logprob"] for entry in logprobs],
            "top_logprobs": [
                None  # of a prompt's first token, which nothing predicts
                if entry["logprob"] is None
                else {entry_names[_key(other)]: other["logprob"] for other in _candidates(entry)}
                for entry, entry_names in zip(logprobs, names, strict=True)
            ],
            "text_offset": [text.add(entry) for entry in logprobs],
        }


class _TokenText:
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
