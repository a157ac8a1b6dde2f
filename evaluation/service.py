"""HTTP client of a running service for many threads; retries while it is full, restarting or not up yet."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from contract.card import is_placeholder

_ATTEMPTS = 8
_WAIT_S = (0.5, 30.0)  # the first and the longest pause before a retry
_ANSWER_S = 3600.0  # a request may wait in a long queue


class SourceError(RuntimeError):
    """An unusable source, or a rejected request. The message is the source's own.

    `field` is the invalid request field, if the source names it; `reason` are the words of a service that answered.
    """

    def __init__(self, message: str, field: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.field, self.reason = field, reason


class ServiceClient:
    """One service. Its own threads send the requests; `width` of them wait at once."""

    def __init__(self, url: str, key: str | None = None, *, width: int = 64) -> None:
        """Raises `SourceError` for an address of another kind."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise SourceError(f"{url}: must begin with http:// or https://")
        self.url = url.rstrip("/")
        self.width = width
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._threads = ThreadPoolExecutor(width, thread_name_prefix="remote")
        self._stopping = False

    def model(self, modality: str, name: str | None = None) -> tuple[str, dict[str, Any]]:
        """Name and card of the model of this name; without a name, of the first live one.

        Raises `SourceError` if no service answers, or none has the model.
        """
        of_kind = [entry for entry in self._models() if entry["diptych"]["modality"] == modality]
        loading = [entry["id"] for entry in of_kind if is_placeholder(entry["diptych"])]
        if name in loading:
            raise SourceError(f"{self.url}: {name} is being loaded; try again once it is ready")
        offered = [entry for entry in of_kind if entry["id"] not in loading]
        matches = [entry for entry in offered if entry["id"] == name or (name is None and entry["diptych"]["live"])]
        if not matches:
            offered_names = ", ".join(entry["id"] for entry in offered) or "none"
            kind = "picture" if modality == "image" else modality
            raise SourceError(f"{self.url}: no {kind} model {name or 'that is live'}; there: {offered_names}")
        return matches[0]["id"], matches[0]["diptych"]

    def submit(self, work: Callable[..., Any], *body: Any) -> Future[Any]:
        return self._threads.submit(work, *body)

    def post(self, path: str, fields: dict[str, Any]) -> Any:
        """The response to a request, with retries. Raises `SourceError` if it is rejected or given up."""
        pause_s = _WAIT_S[0]
        for left in reversed(range(_ATTEMPTS)):
            try:
                with self._open(path, fields) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                message, field = _said(error)
                if error.code not in (429, 500, 503) or not left:
                    raise SourceError(f"the service answered {error.code}: {message}", field) from None
                after = error.headers.get("Retry-After", "")
                pause_s = float(after) if after.isdigit() else pause_s
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not left:
                    raise SourceError(f"the service does not answer ({getattr(error, 'reason', error)})") from None
            until = time.monotonic() + pause_s
            while time.monotonic() < until:
                if self._stopping:
                    raise SourceError("stopped")
                time.sleep(0.05)
            pause_s = min(2 * pause_s, _WAIT_S[1])
        raise AssertionError

    def stream(self, path: str, fields: dict[str, Any], *, timeout_s: float = _ANSWER_S) -> Iterator[dict[str, Any]]:
        """The events of a streamed response, without retries. Raises `SourceError`."""
        try:
            with self._open(path, fields, timeout_s=timeout_s) as answer:
                for line in answer:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[len(b"data: ") :])
                        if event.get("error"):
                            reason = str(event["error"].get("message"))
                            raise SourceError(f"the service ended the text: {reason}", reason=reason)
                        yield event
        except urllib.error.HTTPError as error:
            reason, _ = _said(error)
            raise SourceError(f"the service answered {error.code}: {reason}", reason=reason) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SourceError(f"the service does not answer ({getattr(error, 'reason', error)})") from None

    def _models(self) -> list[Any]:
        try:
            with self._open("/v1/models", None, timeout_s=30) as answer:
                entries = json.loads(answer.read())["data"]
            if all("diptych" in entry for entry in entries):
                return list(entries)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise SourceError(f"{self.url}: the service answered {error.code}: {_said(error)[0]}") from None
            raise SourceError(f"{self.url}: no service answers ({error.reason})") from None
        except OSError as error:
            raise SourceError(f"{self.url}: no service answers ({getattr(error, 'reason', error)})") from None
        except (http.client.HTTPException, ValueError, KeyError, TypeError):
            pass
        raise SourceError(f"{self.url}: the server there is not Diptych")

    def _open(self, path: str, fields: dict[str, Any] | None, *, timeout_s: float = _ANSWER_S) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        request = urllib.request.Request(self.url + path, body, self._headers)
        return urllib.request.urlopen(request, timeout=timeout_s)

    def close(self) -> None:
        """Abandon requests in progress, and accept no more."""
        self._stopping = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def _said(error: urllib.error.HTTPError) -> tuple[str, str | None]:
    """The error message, and the field that it is about."""
    try:
        with error:
            body = json.loads(error.read())["error"]
        return str(body["message"]), body.get("param")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, http.client.HTTPException):
        return "no reason was given", None
