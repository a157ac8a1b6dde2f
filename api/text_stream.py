"""Streams text for `stream: true`: pieces as they are generated, as OpenAI's server-sent events, then [DONE].

Each event of a job carries pieces of text with their positions; the client gets what it lacks. The sent events carry no
id and cannot be resumed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import anyio

from api.body import run_parser
from api.errors import job_error
from api.job_follower import not_followed
from api.service import Service
from api.text_answers import AnswerFormat, response_size
from core.jobs.record import Job, JobState

S = TypeVar("S", str, list[dict[str, Any]])


async def stream_answers(service: Service, job: Job, answers: AnswerFormat, *, usage: bool) -> AsyncGenerator[bytes]:
    """Stream the answers in pieces. If closed early the job is cancelled. With `usage` every chunk has that field, the
    last one the numbers.
    """
    ended: Job | None = None
    sent = _SentText(answers, usage)
    try:
        async with aclosing(service.follower.until_end(job)) as events:
            async for event in events:
                for chunk in sent.grown(_pieces(event.data)):
                    yield chunk
        ended = await service.follower.final_record(job)
        if ended is None:
            yield answers.failure(not_followed(service.closing.is_set()).content)
        elif ended.state is not JobState.SUCCEEDED:
            yield answers.failure(job_error(ended).content)
        else:
            result = ended.result or {}
            for chunk in await run_parser(job.owner, response_size(job, result), lambda: sent.rest(result)):
                yield chunk
    finally:
        if ended is None:
            with anyio.CancelScope(shield=True):
                await service.follower.cancel(job)


class _SentText:
    """The text and log probabilities of each choice that the client has."""

    def __init__(self, answers: AnswerFormat, usage: bool) -> None:
        self._answers = answers
        self._usage = usage
        self._texts: dict[int, int] = {}
        self._logprobs: dict[int, int] = {}

    def grown(self, pieces: Iterable[dict[str, Any]]) -> list[bytes]:
        """Chunks for new text. A restarted attempt may at first be behind what was sent: then none."""
        chunks: list[bytes] = []
        for piece in pieces:
            index = piece["index"]
            begins = index not in self._texts
            had = self._texts.setdefault(index, 0)
            if begins:
                chunks += map(self._chunk, self._answers.beginning(index))
            text, logprobs = _beyond(piece["text"], piece["at"], had), None
            if "logprobs" in piece:
                sent_logprobs = self._logprobs.get(index, 0)
                logprobs = _beyond(piece["logprobs"], piece["token"], sent_logprobs) or None
                self._logprobs[index] = sent_logprobs + len(logprobs or ())
            if text or logprobs:
                chunks += map(self._chunk, self._answers.pieces(index, text, logprobs))
                self._texts[index] = had + len(text)
        return chunks

    def rest(self, result: dict[str, Any]) -> list[bytes]:
        """The remaining text of the finished answers, their finish reasons, and the stream's end."""
        choices = result["choices"]
        logprobs = [choice["logprobs"] for choice in choices] if any(c["logprobs"] for c in choices) else None
        chunks = self.grown(_whole([choice["text"] for choice in choices], logprobs))
        for index, choice in enumerate(choices):
            chunks += map(self._chunk, self._answers.ending(index, choice["finish_reason"]))
        return chunks + self._answers.closing(result, usage=self._usage)

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._answers.sse(choice, usage=self._usage)


def _pieces(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Text pieces of a progress report. An older worker sends the complete texts each time."""
    if "texts" in data:
        return _whole(data["texts"], data.get("logprobs"))
    pieces: list[dict[str, Any]] = data.get("pieces", [])
    return pieces


def _whole(texts: Sequence[str], logprobs: Sequence[list[dict[str, Any]]] | None) -> list[dict[str, Any]]:
    """Complete texts, as pieces."""
    pieces: list[dict[str, Any]] = [{"index": index, "at": 0, "text": text} for index, text in enumerate(texts)]
    for piece, entry in zip(pieces, logprobs or [], strict=False):
        piece.update(token=0, logprobs=entry)
    return pieces


def _beyond(sent: S, at: int, had: int) -> S:
    """The part of a piece at position `at` beyond the first `had` items. None after a gap: the end fills it."""
    return sent[had - at :] if at <= had else sent[:0]
