"""An HTTP server of a test's own, which stands for a service outside: a receiver, an index, a collector."""

from __future__ import annotations

import http.server
import threading
from typing import Self


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request by `respond`, and logs nothing."""

    def respond(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.respond()

    def do_POST(self) -> None:
        self.respond()

    def do_PUT(self) -> None:
        self.respond()

    def do_HEAD(self) -> None:
        self.respond()

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class LocalServer:
    """Listens on a free port of this machine, and serves while the context is open."""

    def __init__(self, handler: type[Handler]) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
