"""Where pictures come from: an engine in this process, or a service that runs.

Knows how each is asked and what it answers; knows nothing of runs and scores.
"""

from __future__ import annotations

import base64
import dataclasses
import http.client
import io
import json
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from evaluation.pixels import Pixels

if TYPE_CHECKING:
    from pipeline.parameters import ImageParameters
    from workers.build import Works

_ATTEMPTS = 8
_WAIT_S = (0.5, 30.0)  # the first and the longest pause before a service is asked again
_ANSWER_S = 3600.0  # a picture's place may be behind a long queue


class SourceError(RuntimeError):
    """A source that cannot be used, or that refuses a picture. The message is the source's own."""


class Drawn(NamedTuple):
    """A picture's PNG, and what its user should know."""

    png: bytes
    warnings: tuple[str, ...]


class Source(Protocol):
    """Asked from one thread. `width` requests keep it full."""

    width: int

    def submit(self, wanted: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        """Begin a picture; `tick` is called from any thread for each step, as far as steps are told."""
        ...

    def take(self, result: Any) -> Drawn:
        """What a future's result holds."""
        ...

    def pixels(self, result: Any) -> Pixels:
        """The same, uint8 [H, W, 3]."""
        ...


class Local:
    """The engine of this process."""

    def __init__(self, works: Works) -> None:
        self.width = 2 * works.settings.max_requests  # as many wait as are in the making
        self._engine = works.engine

    def submit(self, wanted: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        from core.batching.request import Outcome, Request

        def listen(_: Request, outcome: Outcome) -> None:
            if outcome.progress is not None and outcome.progress[0] and not outcome.finished:
                tick()

        return self._engine.submit(Request(secrets.token_hex(8), "image", wanted, listener=listen))

    def take(self, result: Any) -> Drawn:
        return Drawn(result.png(), result.warnings)

    def pixels(self, result: Any) -> Pixels:
        return np.asarray(result.image)


class Remote:
    """A service, through its `POST /v1/images/generations`. Each request waits on a thread of its own."""

    def __init__(self, url: str, model: str | None = None, *, width: int = 64) -> None:
        """Raises `SourceError` where no service answers, or none has the model."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise SourceError(f"{url}: must begin with http:// or https://")
        self.url = url.rstrip("/")
        self.width = width
        offered = [one for one in self._get("/v1/models")["data"] if one["diptych"]["modality"] == "image"]
        found = [one for one in offered if one["id"] == model or (model is None and one["diptych"]["live"])]
        if not found:
            there = ", ".join(one["id"] for one in offered) or "none"
            raise SourceError(f"{url}: no picture model {model or 'that is live'}; there: {there}")
        self.model: str = found[0]["id"]
        self.card: dict[str, Any] = found[0]["diptych"]
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="remote")
        self._stopping = False

    def submit(self, wanted: ImageParameters, tick: Callable[[], None]) -> Future[Any]:
        fields = {
            "prompt": wanted.prompt, "model": self.model, "size": f"{wanted.width}x{wanted.height}",
            "seed": wanted.seed, "steps": wanted.steps, "guidance_scale": wanted.guidance_scale,
            "negative_prompt": wanted.negative_prompt, "scheduler": wanted.scheduler,
            "deterministic": wanted.deterministic, "deepcache": _schedule(wanted),
        }  # fmt: skip
        body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        return self._threads.submit(self._draw, body, wanted.steps, tick)

    def take(self, result: Any) -> Drawn:
        return Drawn(base64.b64decode(result["b64_json"], validate=True), tuple(result.get("warnings", ())))

    def pixels(self, result: Any) -> Pixels:
        with Image.open(io.BytesIO(self.take(result).png)) as image:
            return np.asarray(image.convert("RGB"))

    def _draw(self, body: bytes, steps: int, tick: Callable[[], None]) -> Any:
        """One picture. A service that is full, stops or is not there yet is asked again: a seed draws one picture."""
        pause_s = _WAIT_S[0]
        for left in reversed(range(_ATTEMPTS)):
            try:
                answer = self._post("/v1/images/generations", body)
            except urllib.error.HTTPError as error:
                said = _message(error)
                if error.code not in (429, 500, 503) or not left:
                    raise SourceError(f"the service answered {error.code}: {said}") from None
                after = error.headers.get("Retry-After", "")
                pause_s = float(after) if after.isdigit() else pause_s
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not left:
                    raise SourceError(f"the service does not answer ({getattr(error, 'reason', error)})") from None
            else:
                for _ in range(steps):
                    tick()
                return answer["data"][0]
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                if self._stopping:
                    raise SourceError("stopped")
                time.sleep(0.05)
            pause_s = min(2 * pause_s, _WAIT_S[1])
        raise AssertionError

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                found = json.loads(answer.read())
            if all("diptych" in one for one in found["data"]):
                return found
        except OSError as error:
            raise SourceError(f"{self.url}: no service answers ({getattr(error, 'reason', error)})") from None
        except (http.client.HTTPException, ValueError, KeyError, TypeError):
            pass
        raise SourceError(f"{self.url}: something else than Diptych answers there")

    def _post(self, path: str, body: bytes) -> Any:
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        self._stopping = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def _schedule(wanted: ImageParameters) -> dict[str, Any] | str:
    """DeepCache as a request has it; "off" is said, since a service may have another default."""
    if wanted.deepcache is None:
        return "off"
    given = dataclasses.asdict(wanted.deepcache)
    if given["deep_steps"] is not None:
        return {"depth": given["depth"], "deep_steps": list(given["deep_steps"])}
    return {name: value for name, value in given.items() if value is not None}


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return "no reason was given"
