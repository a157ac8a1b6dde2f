"""Provides external servers: an object store with the needed part of S3's API, and webhook receivers.

Real servers on real sockets, in this process; the store can be made to fail.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        pass  # a client that went away in the middle, which is what faults are for


class _Outside:
    def __init__(self, handler: type[_Quiet]) -> None:
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Storage(_Outside):
    """An object store: PUT, HEAD, GET (whole or a range), DELETE and DeleteObjects. While `failing` it answers 503."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failing = False
        store = self

        class Handler(_Quiet):
            def _do(self) -> None:
                data, path = self.body(), self.path.partition("?")[0]
                if store.failing:
                    return self.answer(503)
                if self.command == "PUT":
                    store.objects[path] = data
                    return self.answer(200, ETag=_tag(data))
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
                dated = {"ETag": _tag(content), "Last_Modified": formatdate(usegmt=True)}
                if part := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or ""):
                    start, end = int(part[1]), min(int(part[2]) + 1, len(content))
                    of = f"bytes {start}-{end - 1}/{len(content)}"
                    return self.answer(206, content[start:end], Content_Range=of, **dated)
                return self.answer(200, content, Content_Length=str(len(content)), **dated)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _do  # noqa: N815

        super().__init__(Handler)


def _tag(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()}"'


class Receiver(_Outside):
    """Receives webhooks: appends each body to `heard` with the URL's path. Answers are delayed by `slow_s`."""

    def __init__(self, heard: Callable[[str, dict[str, Any]], None]) -> None:
        self.slow_s = 0.0
        receiver = self

        class Handler(_Quiet):
            def do_POST(self) -> None:
                data = self.body()
                until = time.monotonic() + receiver.slow_s
                while time.monotonic() < until and receiver.slow_s:
                    time.sleep(0.05)
                heard(self.path, json.loads(data))
                self.answer(204)

        super().__init__(Handler)
