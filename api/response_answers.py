"""Builds answers of the Responses API: whole, and as its named events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.text_answers import AnswerFormat, event_bytes
from api.tool_calls import Delta, ToolCallParser, call_id
from core.jobs.record import Job

Event = dict[str, Any]


class ResponsesFormat(AnswerFormat):
    """A response: one answer, as a list of items, each a message or a call."""

    prefix = "resp_"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job = job
        self._parser = ToolCallParser.of(self._request)
        self._items: list[dict[str, Any]] = []
        self._sent = 0  # events

    def whole(self, result: dict[str, Any]) -> dict[str, Any]:
        self.pieces(0, result["choices"][0]["text"], None)
        self.ending(0, result["choices"][0]["finish_reason"])
        return self._response(result)

    def beginning(self, index: int) -> list[Event]:
        return [{"type": f"response.{state}", "response": self._response()} for state in ("created", "in_progress")]

    def pieces(self, index: int, text: str, logprobs: Sequence[dict[str, Any]] | None) -> list[Event]:
        deltas = [Delta(content=text)] if self._parser is None else self._parser.feed(text)
        return [event for delta in deltas for event in self._added(delta)]

    def ending(self, index: int, finish: str) -> list[Event]:
        deltas = [] if self._parser is None else self._parser.end()
        events = [event for delta in deltas for event in self._added(delta)]
        if not self._items:  # an answer of no text is a message
            events += self._begun_message()
        return events + self._done("completed" if finish == "stop" else "incomplete")

    def sse(self, choice: Event, *, usage: bool) -> bytes:
        self._sent += 1
        return event_bytes({**choice, "sequence_number": self._sent - 1}, choice["type"])

    def closing(self, result: dict[str, Any], *, usage: bool) -> list[bytes]:
        response = self._response(result)
        return [self.sse({"type": f"response.{response['status']}", "response": response}, usage=usage)]

    def failure(self, content: dict[str, Any]) -> bytes:
        error = content["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self.sse({"type": "error", **fields}, usage=False)

    def usage(self, result: dict[str, Any]) -> dict[str, Any]:
        usage = super().usage(result)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, result: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response so far, or with this result as it ended."""
        request, job = self._request, self._job
        cut = result is not None and result["choices"][0]["finish_reason"] != "stop"
        tools = [
            {"type": "function", "description": None, "parameters": None, "strict": False, **tool["function"]}
            for tool in request.tools or ()
        ]
        response = {
            "id": self._head["id"], "object": "response", "created_at": self._head["created"], "model": job.model,
            "status": "in_progress" if result is None else "incomplete" if cut else "completed",
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": None, "metadata": {}, "previous_response_id": None, "store": False,
            "max_output_tokens": request.max_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p, "truncation": "disabled",
            "parallel_tool_calls": request.parallel_tool_calls is not False, "tools": tools,
            "tool_choice": "required" if request.tools_required else "auto", "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            "output": [] if result is None else self._items, "usage": None if result is None else self.usage(result),
        }  # fmt: skip
        return {**response, "warnings": self._warnings} if self._warnings else response

    def _added(self, delta: Delta) -> list[Event]:
        """The events of an addition."""
        if delta.name is not None:
            return self._done() + self._begun_call(delta.name)
        if delta.call is None:
            events = [] if self._open == "message" else self._done() + self._begun_message()
            self._items[-1]["content"][0]["text"] += delta.content
            return [*events, self._event("output_text.delta", content_index=0, delta=delta.content, logprobs=[])]
        self._items[-1]["arguments"] += delta.arguments
        return [self._event("function_call_arguments.delta", delta=delta.arguments)]

    @property
    def _open(self) -> str | None:
        """The type of the last item if more may be added to it."""
        return self._items[-1]["type"] if self._items and self._items[-1]["status"] == "in_progress" else None

    def _begun_message(self) -> list[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
        added = self._event("output_item.added", item=dict(self._items[-1]))
        self._items[-1]["content"] = [part]
        return [added, self._event("content_part.added", content_index=0, part=dict(part))]

    def _begun_call(self, name: str) -> list[Event]:
        calls = sum(item["type"] == "function_call" for item in self._items)
        call = {"type": "function_call", "call_id": call_id(self._job.id, 0, calls), "name": name, "arguments": ""}
        self._begin(call, "fc")
        return [self._event("output_item.added", item=dict(self._items[-1]))]

    def _begin(self, item: dict[str, Any], prefix: str) -> None:
        id = f"{prefix}_{self._job.id.removeprefix('job_')}_{len(self._items)}"
        self._items.append({"id": id, "status": "in_progress", **item})

    def _done(self, status: str = "completed") -> list[Event]:
        """The events that end the last item, if it is open."""
        if (kind := self._open) is None:
            return []
        item = self._items[-1]
        item["status"] = status
        if kind == "message":
            part = item["content"][0]
            events = [
                self._event("output_text.done", content_index=0, text=part["text"], logprobs=[]),
                self._event("content_part.done", content_index=0, part=part),
            ]
        else:
            events = [self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])]
        return [*events, self._event("output_item.done", item=item)]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        """An event of the last item."""
        of = {} if "item" in fields else {"item_id": self._items[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self._items) - 1, **of, **fields}
