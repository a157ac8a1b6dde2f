"""Reads the events of a job's text answers from its progress reports and its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

from api.text.events import Begin, Delta, Event, Finish, HeldBack, TextDelta, Usage
from api.text.tool_calls import ToolCallParser
from contract.text import TextJob
from core.jobs.record import Job

S = TypeVar("S", str, list[dict[str, Any]])

_ENTRY_BYTES = 64  # of a log probability in a response, about


def response_size(job: Job, result: Mapping[str, Any]) -> int:
    """The number of bytes in the response of a job with this result, about."""
    entry_bytes = _ENTRY_BYTES * (1 + (job.parameters.get("logprobs") or 0))
    return sum(len(choice["text"]) + len(choice["logprobs"]) * entry_bytes for choice in result["choices"])


@dataclass(slots=True)
class _Choice:
    """What was read of a choice: so many characters and log probabilities."""

    parser: ToolCallParser | None
    characters: int = 0
    logprobs: int = 0


class TextAnswers:
    """The events of a job's answers, each once, however often the worker reports what they tell."""

    def __init__(self, job: Job) -> None:
        self._request = TextJob.read(job.parameters)
        self._choices: list[_Choice] = []

    def progress(self, report: Mapping[str, Any]) -> Iterator[Event]:
        """The events of what a progress report adds. A restarted attempt may at first be behind: then none."""
        if "texts" in report:  # an older worker's, which has the complete texts each time
            return self._additions(_whole(report["texts"], report.get("logprobs") or ()))
        return self._additions(report.get("pieces", ()))

    def result(self, result: Mapping[str, Any]) -> Iterator[Event]:
        """The remaining events of answers that succeeded."""
        choices = result["choices"]
        yield from self._additions(_whole(*([choice[name] for choice in choices] for name in ("text", "logprobs"))))
        for index, choice in enumerate(choices):
            parser, reason = self._choices[index].parser, choice["finish_reason"]
            if parser is not None:
                yield from parser.end()
                reason = "tool_calls" if parser.calls and reason == "stop" else reason
            yield Finish(index, reason, choice.get("cumulative_logprob"))
        prompt = sum(result["prompt_tokens"][:: self._request.n])  # counted once, however many answers it has
        yield Usage(prompt, result.get("cached_tokens", 0), sum(choice["tokens"] for choice in choices))

    def _additions(self, pieces: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
        for piece in pieces:
            index = piece["index"]
            while len(self._choices) <= index:  # in this order, which OpenAI's client relies on
                begun = len(self._choices)
                self._choices.append(_Choice(ToolCallParser.of(self._request, begun)))
                yield Begin(begun, self._echo(begun))
            choice = self._choices[index]
            text = _beyond(piece["text"], piece["at"], choice.characters)
            logprobs = _beyond(piece.get("logprobs") or [], piece.get("token", 0), choice.logprobs)
            choice.characters += len(text)
            choice.logprobs += len(logprobs)
            if not text and not logprobs:
                continue
            deltas: list[Delta] = [TextDelta(index, text)] if choice.parser is None else choice.parser.feed(text)
            if logprobs:
                yield deltas.pop(0)._replace(logprobs=logprobs) if deltas else HeldBack(index, logprobs)
            yield from deltas

    def _echo(self, index: int) -> str:
        """The prompt of this choice with `echo`, unless the choice's text begins with it; else nothing."""
        request = self._request
        return str((request.prompts or [""])[index // request.n]) if request.echo and not request.scores_prompts else ""


def _whole(texts: Iterable[str], logprobs: Iterable[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Complete texts as the pieces of a report."""
    for index, (text, entries) in enumerate(zip_longest(texts, logprobs)):
        yield {"index": index, "at": 0, "text": text, "token": 0, "logprobs": entries}


def _beyond(piece: S, at: int, known: int) -> S:
    """The part of a piece at position `at` beyond the first `known` items. None after a gap: the end fills it."""
    return piece[known - at :] if at <= known else piece[:0]
