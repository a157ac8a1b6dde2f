"""What `stream: true` answers of text: pieces as they are written, as OpenAI's server-sent events, then [DONE].

Knows jobs' events, each of which holds all of the text so far: what a client lacks of it is told. Events carry no id
and are not resumed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import anyio

from api.errors import ApiError, unsuccessful
from api.service import Service
from api.text_answers import Answers
from core.jobs.record import Job, JobState

_SILENCE_S = 15.0  # after which the record is looked at, as everywhere


async def tell(service: Service, job: Job, answers: Answers, *, usage: bool) -> AsyncGenerator[bytes]:
    """The answers in pieces. Left early the job is cancelled. With `usage` every chunk has that field, the last one
    the numbers.
    """
    ended: Job | None = None
    told = _Told(answers, usage)
    try:
        async with aclosing(service.follow(job.id, "0", _SILENCE_S)) as events:
            async for event in events:
                if event is not None and "texts" in event.data:
                    for chunk in told.grown(event.data["texts"], event.data.get("logprobs")):
                        yield chunk
                if event is None:
                    found = await service.record(job.id)
                    if found is None or not found.state.final:
                        continue
                if event is None or event.final:
                    ended = await service.record(job.id)
                    break
        if ended is None:
            gone = "The server is stopping." if service.closing.is_set() else "The job's record is gone."
            yield _data(ApiError(503, gone, code="stopping").content)
        elif ended.state is not JobState.SUCCEEDED:
            yield _data(unsuccessful(ended).content)
        else:
            for chunk in told.rest(ended.result or {}):
                yield chunk
            yield b"data: [DONE]\n\n"
    finally:
        if ended is None:
            with anyio.CancelScope(shield=True):
                await service.cancel(job.id)


class _Told:
    """How much of each choice the client has."""

    def __init__(self, answers: Answers, usage: bool) -> None:
        self._answers = answers
        self._usage = usage
        self._texts: dict[int, int] = {}
        self._logprobs: dict[int, int] = {}

    def grown(self, texts: list[str], logprobs: list[list[dict[str, Any]]] | None) -> list[bytes]:
        """Chunks for what is new. An attempt that was begun anew may first say less than was told: then nothing."""
        made = []
        for index, text in enumerate(texts):
            begins = index not in self._texts
            had = self._texts.setdefault(index, 0)
            first = self._answers.first(index) if begins else None
            if first is not None:
                made.append(self._chunk(first))
            new = None
            if logprobs is not None and len(logprobs[index]) > self._logprobs.get(index, 0):
                new = logprobs[index][self._logprobs.get(index, 0) :]
                self._logprobs[index] = len(logprobs[index])
            if len(text) > had or new:
                made.append(self._chunk(self._answers.piece(index, text[had:], new)))
                self._texts[index] = max(had, len(text))
        return made

    def rest(self, result: dict[str, Any]) -> list[bytes]:
        """What is not told yet of the finished answers, why each ended, and the usage."""
        choices = result["choices"]
        logprobs = [choice["logprobs"] for choice in choices] if any(c["logprobs"] for c in choices) else None
        made = self.grown([choice["text"] for choice in choices], logprobs)
        for index, choice in enumerate(choices):
            made.append(self._chunk(self._answers.last(index, choice["finish_reason"])))
        if self._usage:
            made.append(_data(self._answers.chunk([], self._answers.usage(result))))
        return made

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = self._answers.chunk([choice])
        return _data({**chunk, "usage": None} if self._usage else chunk)


def _data(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"
