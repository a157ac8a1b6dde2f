"""Adapters for LoadGen: images from an engine or a service, and texts from either."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from contract.text import TextJob
from evaluation import mlperf
from evaluation.service import ServiceClient, SourceError
from evaluation.sources import ImageSource

if TYPE_CHECKING:
    from core.batching.engine import Engine
    from workers.text.handler import TextJobHandler


TEXT_MODEL, TEXT_SAMPLES = "llama3_1-8b", 13_368


class LoggedAnswer(NamedTuple):
    """The entry in LoadGen's accuracy log, and its number of tokens; None for an image."""

    data: npt.NDArray[Any]
    tokens: int | None = None


class LoadGenTask(Protocol):
    """Samples by their index. `model` is LoadGen's name for it, `samples` how many an official run has."""

    model: str
    samples: int

    def __len__(self) -> int: ...

    def submit(self, index: int, first: Callable[[], None]) -> Future[Any]:
        """Start a sample, from any thread; `first` is called once, at an answer's first token."""
        ...

    def answer(self, result: Any) -> LoggedAnswer:
        """The answer from a future's result."""
        ...


class ImageTask:
    """`drafts` are the requests of the captions. Answers are uint8 [H, W, 3], as the reference logs them."""

    model, samples = mlperf.MODEL, mlperf.CAPTIONS

    def __init__(self, source: ImageSource, drafts: Sequence[Any]) -> None:
        self._source, self._drafts = source, drafts

    def __len__(self) -> int:
        return len(self._drafts)

    def submit(self, index: int, first: Callable[[], None]) -> Future[Any]:
        return self._source.submit(self._drafts[index], lambda: None)

    def answer(self, result: Any) -> LoggedAnswer:
        return LoggedAnswer(self._source.pixels(result))


class TextTask:
    """Greedy answers of the engine of this process. Answers are token ids, int32, as the reference logs them."""

    model, samples = TEXT_MODEL, TEXT_SAMPLES

    def __init__(self, engine: Engine, handler: TextJobHandler, prompts: Sequence[str], *, max_tokens: int) -> None:
        """Raises `Invalid` for a prompt that the model does not accept."""
        self._engine = engine
        self._wanted = [
            handler.requests(TextJob([{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0.0))[0]
            for prompt in prompts
        ]

    def __len__(self) -> int:
        return len(self._wanted)

    def submit(self, index: int, first: Callable[[], None]) -> Future[Any]:
        from core.batching.request import Outcome, Request

        reported = False

        def listen(_: Request, outcome: Outcome) -> None:
            nonlocal reported
            if not reported and (outcome.finished or (outcome.token is not None and outcome.token.tokens)):
                reported = True
                first()

        return self._engine.submit(Request(secrets.token_hex(8), "text", self._wanted[index], listener=listen))

    def answer(self, result: Any) -> LoggedAnswer:
        return LoggedAnswer(np.asarray(result.tokens, np.int32), len(result.tokens))


class RemoteTexts:
    """Greedy answers of a service, streamed from `POST /v1/chat/completions`. Answers are the text's bytes."""

    model, samples = TEXT_MODEL, TEXT_SAMPLES

    def __init__(self, url: str, model: str, prompts: Sequence[str], *, max_tokens: int, width: int = 128) -> None:
        self._service = ServiceClient(url, width=width)
        shared = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        self._fields = [
            {**shared, "messages": [{"role": "user", "content": prompt}], "stream_options": {"include_usage": True}}
            for prompt in prompts
        ]

    def __len__(self) -> int:
        return len(self._fields)

    def submit(self, index: int, first: Callable[[], None]) -> Future[Any]:
        return self._service.submit(self._write, self._fields[index], first)

    def answer(self, result: Any) -> LoggedAnswer:
        text, tokens = result
        return LoggedAnswer(np.frombuffer(text.encode(), np.uint8), tokens)

    def _write(self, fields: dict[str, Any], first: Callable[[], None]) -> tuple[str, int]:
        parts: list[str] = []
        tokens = None
        try:
            for event in self._service.stream("/v1/chat/completions", fields):
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content")
                    if text:
                        if not parts:
                            first()
                        parts.append(text)
                if event.get("usage"):
                    tokens = int(event["usage"]["completion_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"the service does not answer ({error})") from None
        if tokens is None:
            raise SourceError("the service's stream ended before the text did")
        return "".join(parts), tokens

    def close(self) -> None:
        self._service.close()
