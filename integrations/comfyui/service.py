"""The Diptych services that this machine may call, and their HTTP API, by the standard library alone.

A workflow names a service, and never an address or a key: both are the machine's, from `DIPTYCH_URL` and
`DIPTYCH_API_KEY` or from `services.json` in this folder. A key is sent to the address that it was configured with and
to no other: redirects are not followed, and links in answers are not called.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
import urllib.parse
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

FILE = Path(__file__).with_name("services.json")
DEFAULT = "default"
DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 10.0
SILENCE_S = 45.0  # of an open connection; a stream of events has a comment every 15 s
MAX_JSON = 16 * 2**20
MAX_PICTURE = 256 * 2**20
_MAX_EVENT = 4 * 2**20
_MAX_RETRY_S = 120.0
_CATALOGUE_S = 5.0  # how long a list of models counts as new
_CATALOGUE_WAIT_S = 1.0  # ComfyUI's server answers nobody meanwhile


class DiptychError(RuntimeError):
    """An error whose message ComfyUI shows at the node."""


class ServiceError(DiptychError):
    """An error that the service answered."""


class Busy(ServiceError):
    """The service takes no more for now: a queue is full, or a limit of the key is reached for `retry_s`."""

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Unreachable(DiptychError):
    """The service cannot be reached, the connection broke, or it answered that it is not there for now."""


@dataclass(frozen=True)
class Service:
    """A configured service: its name in workflows, its address without a final slash, and its key, or ""."""

    name: str
    url: str
    key: str = field(repr=False)


def services() -> dict[str, Service]:
    """All configured services by name; `default` always exists. Raises `DiptychError` if the configuration is wrong."""
    configured: dict[str, Any] = {}
    if FILE.exists():
        try:
            configured = json.loads(FILE.read_text("utf-8"))
        except ValueError as error:
            raise DiptychError(f"{FILE}: is not JSON: {error}") from None
        if not isinstance(configured, dict):
            raise DiptychError(f"{FILE}: must be an object of services by name")
    # Both variables or neither: a key of the environment never goes to an address of the file.
    url = os.environ.get("DIPTYCH_URL")
    if url or DEFAULT not in configured:
        configured[DEFAULT] = {"url": url or DEFAULT_URL, "api_key": os.environ.get("DIPTYCH_API_KEY", "")}
    return {name: _service(name, entry) for name, entry in configured.items()}


def find(name: str) -> Service:
    """The service of this name. Raises `DiptychError` if it is not configured on this machine."""
    known = services()
    if name not in known:
        raise DiptychError(
            f"service: {name!r} is not configured on this machine, which knows {', '.join(sorted(known))}; "
            f"add it to {FILE}"
        )
    return known[name]


def _service(name: str, entry: Any) -> Service:
    url = entry.get("url") if isinstance(entry, dict) else None
    key = entry.get("api_key", "") if isinstance(entry, dict) else ""
    if not isinstance(url, str) or not isinstance(key, str) or not key.isascii() or not key.isprintable():
        raise DiptychError(f'service {name}: must be {{"url": "http://host:8000", "api_key": "dpt_…"}}')
    try:
        parts = urllib.parse.urlsplit(url.strip())
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = None
    if not known or parts.username is not None or parts.query or parts.fragment:
        raise DiptychError(f"service {name}: its url must be http://host:port or https://host")
    path = parts.path.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given the address with it
    return Service(name, f"{parts.scheme}://{parts.netloc}{path}", key)


@dataclass(frozen=True)
class Event:
    """An event of a job's stream; `id` is empty for one that cannot be resumed from."""

    id: str
    type: str
    data: dict[str, Any]


class Client:
    """Blocking calls of a service, each on a connection of its own, which `close` ends from any thread.

    All raise `Unreachable` if the service does not answer, and `ServiceError` with its message if it answers an error.
    """

    def __init__(self, service: Service, timeout_s: float = SILENCE_S, *, total_s: float | None = None) -> None:
        """`timeout_s` is of each wait for the service; `close` is called after `total_s`."""
        self.service = service
        self._timeout_s = timeout_s
        self._open: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()
        if total_s is not None:
            timer = threading.Timer(total_s, self.close)
            timer.daemon = True
            timer.start()

    def close(self) -> None:
        """End all calls that wait for the service: they raise `Unreachable`, and so do later ones."""
        with self._lock:
            self._closed = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def models(self) -> list[dict[str, Any]]:
        """The image models, by their objects in `/v1/models`; what is none of these is left out."""
        listed = self.json("GET", "/v1/models").get("data")
        models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
        return [
            model for model in models
            if isinstance(model.get("id"), str) and isinstance(card := model.get("diptych"), dict)
            and isinstance(card.get("schedulers"), list)
        ]  # fmt: skip

    def upload(self, png: bytes) -> str:
        """Upload a picture, and return the file's id."""
        edge = uuid.uuid4().hex
        head = (
            f'--{edge}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nvision\r\n--{edge}\r\n'
            'content-disposition: form-data; name="file"; filename="picture.png"\r\ncontent-type: image/png\r\n\r\n'
        )
        form = head.encode() + png + f"\r\n--{edge}--\r\n".encode()
        answer = self.json("POST", "/v1/files", form, f"multipart/form-data; boundary={edge}")
        return str(answer["id"])

    def json(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        """The object that is answered. `body` is an object for JSON, or bytes of this kind."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if data is None else {"content-type": kind}
        with self._call(method, path, data, headers) as response:
            return self._object(self._content(response, MAX_JSON))

    def content(self, path: str) -> bytes | None:
        """The content that is answered; None for 204."""
        with self._call("GET", path) as response:
            return None if response.status == 204 else self._content(response, MAX_PICTURE)

    def events(self, id: str, last: str) -> Generator[Event]:
        """The events of a job behind the one with the id `last`, until the stream ends."""
        headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
        with self._call("GET", f"/v1/jobs/{id}/events", None, headers) as response:
            fields: dict[str, str] = {}
            data, size = [], 0
            while line := response.readline(_MAX_EVENT + 1):
                name, _, value = line.decode("utf-8", "replace").rstrip("\r\n").partition(":")
                if (size := size + len(line)) > _MAX_EVENT:
                    raise DiptychError(f"{self.service.name!r} answers an event of more than {_MAX_EVENT} bytes")
                if name == "data":
                    data.append(value.removeprefix(" "))
                elif name in ("id", "event"):
                    fields[name] = value.removeprefix(" ")
                elif not line.strip():
                    if data:
                        content = self._object("\n".join(data).encode())
                        yield Event(fields.get("id", ""), fields.get("event", ""), content)
                    fields, data, size = {}, [], 0

    @contextlib.contextmanager
    def _call(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer that is not an error, while the context is open."""
        parts = urllib.parse.urlsplit(self.service.url)
        host, opened, response = cast(str, parts.hostname), None, None
        connection = (
            http.client.HTTPConnection(host, parts.port, timeout=CONNECT_S)
            if parts.scheme == "http"
            else http.client.HTTPSConnection(host, parts.port, timeout=CONNECT_S, context=ssl.create_default_context())
        )
        sent = {"user-agent": "diptych-comfyui", **headers}
        if self.service.key:
            sent["authorization"] = f"Bearer {self.service.key}"
        try:
            connection.connect()
            opened = connection.sock
            opened.settimeout(self._timeout_s)
            with self._lock:
                if self._closed:
                    raise OSError("closed")
                self._open.add(opened)
            connection.request(method, parts.path + path, body, sent)
            response = connection.getresponse()
            if not 200 <= response.status < 300:
                raise self._error(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(
                f"The Diptych service {self.service.name!r} at {self.service.url} does not answer "
                f"({error or type(error).__name__}). Does it run, and is DIPTYCH_URL or {FILE.name} right?"
            ) from error
        finally:
            with self._lock:
                self._open.discard(cast(socket.socket, opened))
            if response is not None:
                response.close()  # an answer without a further one has the connection
            connection.close()

    def _error(self, response: http.client.HTTPResponse) -> DiptychError:
        """The service's own message, with the field, or that this is not a Diptych service."""
        kind = Unreachable if response.status in (502, 503, 504) else ServiceError
        status, who = response.status, f"{self.service.name!r} at {self.service.url}"
        if 300 <= status < 400:
            return ServiceError(f"{who} answers with a redirect, which is not followed: configure its target")
        try:
            error = json.loads(self._content(response, MAX_JSON))["error"]
            message, param, code = str(error["message"]), error.get("param"), error.get("code")
        except (DiptychError, ValueError, TypeError, KeyError):
            return kind(f"{who} answers HTTP {status}, but not as a Diptych service does")
        if param and not message.startswith(str(param)):
            message = f"{param}: {message}"
        if status == 401:
            message += f" Set DIPTYCH_API_KEY where ComfyUI runs, or api_key in {FILE}."
        message = f"{message} ({code}, HTTP {status})"
        retry = response.getheader("retry-after", "")
        if status == 429 and retry.isdecimal() and response.getheader("x-should-retry") != "false":
            return Busy(message, min(float(retry), _MAX_RETRY_S))
        return kind(message)

    def _content(self, response: http.client.HTTPResponse, most: int) -> bytes:
        data = response.read(most + 1)
        if len(data) > most:
            raise DiptychError(f"{self.service.name!r} answers more than {most} bytes")
        return data

    def _object(self, data: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            if isinstance(answer := json.loads(data), dict):
                return answer
        raise DiptychError(f"{self.service.name!r} at {self.service.url} answers no JSON object: is it Diptych?")


class Catalogue:
    """The image models of all configured services, for the choices of the nodes.

    A service that does not answer within a second keeps the models that it had, so that ComfyUI starts without it.
    """

    def __init__(self) -> None:
        self._models: dict[Service, list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._reading: dict[Service, threading.Thread] = {}
        self._read_at = -_CATALOGUE_S

    def models(self) -> list[dict[str, Any]]:
        """The models' objects. Waits a second at most."""
        try:
            configured = list(services().values())
        except DiptychError:  # told when a node runs
            return []
        with self._lock:
            now = time.monotonic()
            if now - self._read_at >= _CATALOGUE_S:
                self._read_at = now
                self._reading = {service: thread for service, thread in self._reading.items() if thread.is_alive()}
                started = [service for service in configured if service not in self._reading]
                for service in started:
                    self._reading[service] = threading.Thread(target=self._read, args=(service,), daemon=True)
                    self._reading[service].start()
                for service in started:
                    self._reading[service].join(max(0.0, now + _CATALOGUE_WAIT_S - time.monotonic()))
            return [model for service in configured for model in self._models.get(service, [])]

    def names(self, field: str) -> list[str]:
        """What the models' cards list under this field, such as `schedulers`, each once; of `id` the models' names."""
        listed = [[model["id"]] if field == "id" else model["diptych"].get(field) for model in self.models()]
        return list(dict.fromkeys(str(name) for names in listed if isinstance(names, list | dict) for name in names))

    def _read(self, service: Service) -> None:
        with contextlib.suppress(DiptychError):
            self._models[service] = Client(service, CONNECT_S, total_s=CONNECT_S).models()
