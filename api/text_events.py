"""Events of text answers: a request's answers are one sequence of them, whole or while they are generated.

`text_answers.py` reads them from a job, `text_writers.py` writes them in the shapes of OpenAI's endpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Logprobs = Sequence[dict[str, Any]]  # of tokens, as a job's result has them


@dataclass(frozen=True, slots=True)
class Begin:
    """The first event of a choice, which is one of the answers. `echo` is the prompt before its text."""

    choice: int
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """An addition to a choice, with log probabilities of its tokens; of no text yet if it is of no subclass."""

    choice: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta(Delta):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBegin(Delta):
    """The begin of a choice's tool call, counted from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta(Delta):
    """Arguments of the tool call that began last, as JSON text."""

    call: int
    arguments: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of a choice. `reason` is OpenAI's: stop, length or tool_calls."""

    choice: int
    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The last event of complete answers: numbers of tokens."""

    prompt: int
    cached: int
    completion: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The last event of answers that failed: the body of the error."""

    content: dict[str, Any]


ChoiceEvent = Begin | Delta | Finish
Event = ChoiceEvent | Usage | Failure
