"""A TCP proxy before Redis that can cut a connection at the worst moment: the command was done, its answer is lost."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from urllib.parse import urlsplit


class Severed:
    """Listens at `url`. `cut(marker)`: the next command that holds these bytes is done, and never answered."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.port is not None
        self._server = ("127.0.0.1", parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._marker: bytes | None = None
        self._sockets: list[socket.socket] = [self._listener]
        self.cuts = 0
        self.url = url.replace(f":{parts.port}/", f":{self._listener.getsockname()[1]}/")
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self, marker: str) -> None:
        self._marker = marker.encode()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._server)
            self._sockets += [near, far]
            thread = threading.Thread(target=self._serve, args=(near, far), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, near: socket.socket, far: socket.socket) -> None:
        """Bytes both ways. An answer goes to all that was said since the one before it."""
        said = b""
        try:
            while True:
                ready, _, _ = select.select([near, far], [], [])
                piece = (near if near in ready else far).recv(1 << 16)
                if not piece:
                    break
                if near in ready:
                    said += piece
                    far.sendall(piece)
                    continue
                if self._marker is not None and self._marker in said:
                    self._marker = None
                    self.cuts += 1
                    break
                near.sendall(piece)
                said = b""
        except (OSError, ValueError):  # closed meanwhile
            pass
        for each in (near, far):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
