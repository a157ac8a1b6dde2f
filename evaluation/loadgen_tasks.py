"""Adapters for LoadGen: images from an engine or a service, and texts from either."""

from __future__ import annotations

import http.client
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from contract.text import TextJob
from evaluation import mlperf
from evaluation.sources import ImageSource, SourceError

if TYPE_CHECKING:
    from core.batching.engine import Engine
    from workers.text_handler import TextJobHandler

MAX_TOKENS = 128  # of an answer, as in MLPerf's test of Llama-3.1-8B
TEXT_MODEL, TEXT_SAMPLES = "llama3_1-8b", 13_368
_ANSWER_S = 3600.0


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

    def __init__(self, engine: Engine, panel: TextJobHandler, prompts: Sequence[str], *, max_tokens: int) -> None:
        """Raises `Invalid` for a prompt that the model does not accept."""
        self._engine = engine
        self._wanted = [
            panel.requests(TextJob([{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0.0))[0]
            for prompt in prompts
        ]

    def __len__(self) -> int:
        return len(self._wanted)

    def submit(self, index: int, first: Callable[[], None]) -> Future[Any]:
        from core.batching.request import Outcome, Request

        told = False

        def listen(_: Request, outcome: Outcome) -> None:
            nonlocal told
            if not told and (outcome.finished or (outcome.token is not None and outcome.token.tokens)):
                told = True
                first()

        return self._engine.submit(Request(secrets.token_hex(8), "text", self._wanted[index], listener=listen))

    def answer(self, result: Any) -> LoggedAnswer:
        return LoggedAnswer(np.asarray(result.tokens, np.int32), len(result.tokens))


class RemoteTexts:
    """Greedy answers of a service, streamed from `POST /v1/chat/completions`. Answers are the text's bytes."""

    model, samples = TEXT_MODEL, TEXT_SAMPLES

    def __init__(self, url: str, model: str, prompts: Sequence[str], *, max_tokens: int, width: int = 128) -> None:
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._bodies = [
            json.dumps(
                {
                    "model": model,
                    "messages": [{"role": "user", "content": prompt}],
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode()
            for prompt in prompts
        ]
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="remote")

    def __len__(self) -> int:
        return len(self._bodies)

    def submit(self, index: int, first: Callable[[], None]) -> Future[Any]:
        return self._threads.submit(self._write, self._bodies[index], first)

    def answer(self, result: Any) -> LoggedAnswer:
        text, tokens = result
        return LoggedAnswer(np.frombuffer(text.encode(), np.uint8), tokens)

    def _write(self, body: bytes, first: Callable[[], None]) -> tuple[str, int]:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        parts: list[str] = []
        tokens = None
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[len(b"data: ") :])
                    if event.get("error"):
                        raise SourceError(f"the service ended the text: {event['error'].get('message')}")
                    for choice in event.get("choices", ()):
                        text = choice["delta"].get("content")
                        if text:
                            if not parts:
                                first()
                            parts.append(text)
                    if event.get("usage"):
                        tokens = int(event["usage"]["completion_tokens"])
        except urllib.error.HTTPError as error:
            with error:
                raise SourceError(f"the service answered {error.code}: {error.read()[:200]!r}") from None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise SourceError(f"the service does not answer ({getattr(error, 'reason', error)})") from None
        if tokens is None:
            raise SourceError("the service's stream ended before the text did")
        return "".join(parts), tokens

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
