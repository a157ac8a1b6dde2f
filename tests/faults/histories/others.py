"""Provides external servers: an object store with the needed part of S3's API, and webhook receivers.

Real servers on real sockets, in this process; the store can be made to fail.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

from tests.http_server import Handler, LocalServer


class _Kept(Handler):
    protocol_version = "HTTP/1.1"

    def do_DELETE(self) -> None:  # noqa: N802
        self.respond()


class _Outside(LocalServer):
    """Serves until `close`."""

    def __init__(self, handler: type[_Kept]) -> None:
        super().__init__(handler)
        self._server.socket.listen(128)
        # A client that went away in the middle is what faults are for.
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.port: int = self._server.server_port
        self.__enter__()

    def close(self) -> None:
        self.__exit__()


class Storage(_Outside):
    """An object store: PUT, HEAD, GET (whole or a range), DELETE and DeleteObjects. While `failing` it answers 503."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failing = False
        store = self

        class Objects(_Kept):
            def respond(self) -> None:
                data, path = self.body() if "Content-Length" in self.headers else b"", self.path.partition("?")[0]
                if store.failing:
                    return self.answer(503)
                if self.command == "PUT":
                    store.objects[path] = data
                    return self.answer(200, headers={"ETag": _tag(data)})
                if self.command == "DELETE":
                    store.objects.pop(path, None)
                    return self.answer(204)
                if self.command == "POST":  # DeleteObjects
                    keys = re.findall(rb"<Key>([^<]*)</Key>", data)
                    for key in keys:
                        store.objects.pop(f"{path}/{key.decode()}", None)
                    deleted = b"".join(b"<Deleted><Key>%b</Key></Deleted>" % key for key in keys)
                    return self.answer(200, b"<DeleteResult>%b</DeleteResult>" % deleted)
                content = store.objects.get(path)
                if content is None:
                    return self.answer(404)
                dated = {"ETag": _tag(content), "Last-Modified": formatdate(usegmt=True)}
                if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or ""):
                    start, end = int(part[1]), min(int(part[2]) + 1, len(content))
                    dated["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
                    return self.answer(206, content[start:end], dated)
                return self.answer(200, content, dated)

            def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
                if self.command != "HEAD":
                    return super().answer(status, data, headers)
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()

        super().__init__(Objects)


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()}"'


class Receiver(_Outside):
    """Receives webhooks: appends each body to `heard` with the URL's path. Answers are delayed by `slow_s`."""

    def __init__(self, heard: Callable[[str, dict[str, Any]], None]) -> None:
        self.slow_s = 0.0
        receiver = self

        class Webhook(_Kept):
            def respond(self) -> None:
                data = self.body()
                until = time.monotonic() + receiver.slow_s
                while time.monotonic() < until and receiver.slow_s:
                    time.sleep(0.05)
                heard(self.path, json.loads(data))
                self.answer(204)

        super().__init__(Webhook)
