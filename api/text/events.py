"""Events of text answers: the answers to a request are one sequence of them, whole or while they are generated.

`answers.py` reads them from a job, `writers.py` writes them in the shapes of OpenAI's endpoints. `choice` is
the number of an answer, and `logprobs` are its tokens' log probabilities as a job's result has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Logprobs = Sequence[dict[str, Any]] | None


class Begin(NamedTuple):
    """The first event of a choice. `echo` is the prompt before its text."""

    choice: int
    echo: str = ""


class TextDelta(NamedTuple):
    choice: int
    text: str
    logprobs: Logprobs = None


class CallBegin(NamedTuple):
    """The begin of a choice's tool call, counted from 0."""

    choice: int
    call: int
    name: str
    logprobs: Logprobs = None


class CallDelta(NamedTuple):
    """Arguments of the tool call that began last, as JSON text."""

    choice: int
    call: int
    arguments: str
    logprobs: Logprobs = None


class HeldBack(NamedTuple):
    """Tokens whose text may be a call's, and comes later."""

    choice: int
    logprobs: Logprobs


class Finish(NamedTuple):
    """The last event of a choice. `reason` is OpenAI's: stop, length or tool_calls. `cumulative_logprob` is the sum of
    its tokens' log probabilities, of a beam search.
    """

    choice: int
    reason: str
    cumulative_logprob: float | None = None


class Usage(NamedTuple):
    """The last event of complete answers: numbers of tokens."""

    prompt: int
    cached: int
    completion: int


class Failure(NamedTuple):
    """The last event of answers that failed: the body of the error."""

    content: dict[str, Any]


Delta = TextDelta | CallBegin | CallDelta
ChoiceEvent = Begin | Delta | HeldBack | Finish
Event = ChoiceEvent | Usage | Failure
