"""Runs the worst known tenant behaviours, each as an endless loop against a running service.

`python -m tests.faults.worst URL KEY [NAME…]` runs all of them, or those named, in threads of a process of the lowest
CPU priority, until it is killed. docs/operations.md, "Failures", describes the isolation between tenants.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable

import httpx2

from tests.faults.payloads import png

NAMES = (
    "batches_with_ids_taken", "silent_webhooks", "many_logprobs", "large_batches", "empty_arrays", "ids_used_again",
    "idle_sockets", "long_thin_pictures", "files", "large_lists", "many_embeddings", "other_schemas",
)  # fmt: skip
_IDLE_SOCKETS = 300
_MIB = 2**20


class Attacker:
    """Calls with one tenant's key. Every method does one round; what a round is answered with does not matter."""

    def __init__(self, url: str, key: str) -> None:
        self.address = urllib.parse.urlsplit(url)
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx2.Limits(max_connections=64)
        self._http = httpx2.Client(
            base_url=url, headers=headers, timeout=20, trust_env=False, verify=False, limits=limits
        )
        self._receiver = _SilentReceiver()
        self._sockets: list[socket.socket] = []
        self._numbers = itertools.count()

    def batches_with_ids_taken(self) -> None:
        """Finding 1: a text batch beside image jobs under the ids that its lines might get."""
        body = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body})
            for i in range(20)
        ]
        batch = self._batch("\n".join(lines).encode(), "/v1/chat/completions")
        for i in range(20):
            self._http.put(f"/v1/jobs/{batch}_{i}", json={"type": "image", "prompt": "x", "steps": 1, "priority": 9})

    def silent_webhooks(self) -> None:
        """Finding 2: receivers that answer a byte at a time, or never."""
        fields = {"type": "image", "prompt": "x", "steps": 1, "priority": 9, "webhook_url": self._receiver.url}
        self._http.post("/v1/jobs", json=fields)
        time.sleep(0.3)

    def many_logprobs(self) -> None:
        """Finding 5: text whose progress is large."""
        body = {
            "messages": [{"role": "user", "content": "a"}], "n": 16, "logprobs": True, "top_logprobs": 20,
            "max_tokens": 200, "stream": True, "priority": 9,
        }  # fmt: skip
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for _ in itertools.islice(answer.iter_raw(), 3):  # finding 19: leaves early
                pass

    def large_batches(self) -> None:
        """Findings 7 and 13: files of thousands of lines, more batches than are worked on at once."""
        line = {"method": "POST", "url": "/v1/images/generations", "body": {"prompt": "x", "steps": 1, "unknown": 1}}
        lines = (json.dumps({"custom_id": str(i), **line}) for i in range(10_000))
        self._batch("\n".join(lines).encode(), "/v1/images/generations")

    def empty_arrays(self) -> None:
        """Finding 7: a mebibyte of `[]`."""
        body = b'{"prompt": [' + b"[]," * (_MIB // 3 - 40) + b"0]}"
        self._http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})

    def ids_used_again(self) -> None:
        """Findings 3, 9, 17: one id is made, waited for, erased and made again."""
        path = "/v1/jobs/logo"
        self._http.put(path, json={"type": "image", "prompt": "x", "steps": 1, "priority": 9})
        self._http.get(path, params={"wait_s": 0.1})
        self._http.post(f"{path}/cancel")
        self._http.delete(path)

    def idle_sockets(self) -> None:
        """Finding 15: connections that send half of a header."""
        while len(self._sockets) < _IDLE_SOCKETS:
            made = socket.create_connection((self.address.hostname or "", self.address.port or 80), timeout=5)
            made.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            self._sockets.append(made)
        time.sleep(1)
        for one in self._sockets:
            try:
                one.send(b"a")
            except OSError:
                one.close()
        self._sockets = [one for one in self._sockets if one.fileno() != -1]

    def long_thin_pictures(self) -> None:
        """Finding 18: 32 KB that decode to 16 million pixels in one column."""
        picture = png(1, 16_777_215)
        form = {"image": ("x.png", io.BytesIO(picture), "image/png")}
        self._http.post("/v1/images/edits", files=form, data={"prompt": "x", "unknown": "1"})

    def files(self) -> None:
        """Findings 16 and 17: files that come and go."""
        made = self._file(b"\n" * _MIB)
        self._http.delete(f"/v1/files/{made}")

    def large_lists(self) -> None:
        """Everything of one's own that can be listed, with texts among it that no worker has read."""
        body = {"messages": [{"role": "user", "content": "x" * 500}], "max_tokens": 1, "deadline_s": 0.001}
        self._http.post("/v1/chat/completions", json=body)
        for path in ("/v1/jobs?limit=100", "/v1/predictions", "/v1/files", "/v1/batches?limit=100"):
            self._http.get(path)

    def many_embeddings(self) -> None:
        """As many numbers as one answer has."""
        with self._http.stream("POST", "/v1/embeddings", json={"input": [[5]] * 2048}) as answer:
            for _ in answer.iter_raw():
                pass

    def other_schemas(self) -> None:
        """Each answer has to fit a schema that takes long to compile, and that was not compiled before."""
        number = next(self._numbers)
        properties = {f"p{number}_{k}": {"type": "string"} for k in range(380)}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "response_format": form, "priority": 9}
        self._http.post("/v1/chat/completions", json=body)

    def _file(self, content: bytes) -> str:
        answer = self._http.post("/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"})
        return str(answer.json().get("id", ""))

    def _batch(self, content: bytes, endpoint: str) -> str:
        fields = {"input_file_id": self._file(content), "endpoint": endpoint, "completion_window": "24h"}
        return str(self._http.post("/v1/batches", json=fields).json().get("id", ""))

    @property
    def rounds(self) -> list[Callable[[], None]]:
        return [getattr(self, name) for name in NAMES]


class _SilentReceiver:
    """Takes connections and answers one byte of a header every second."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        taken: list[socket.socket] = []
        self._listener.settimeout(1)
        while True:
            with contextlib.suppress(TimeoutError):
                taken.append(self._listener.accept()[0])
            for one in taken:
                try:
                    one.send(b"X")
                except OSError:
                    one.close()
            taken = [one for one in taken if one.fileno() != -1]


def forever(round_: Callable[[], None], pause_s: float) -> None:
    while True:
        with contextlib.suppress(httpx2.HTTPError, OSError, ValueError):  # refused, cut off, or no JSON: tried again
            round_()
        time.sleep(pause_s)


def main() -> None:
    url, key, *only = sys.argv[1:]
    os.nice(19)
    attacker = Attacker(url, key)
    rounds = [one for one in attacker.rounds if one.__name__ in (only or NAMES)]
    threads = [threading.Thread(target=forever, args=(one, 0.2)) for one in rounds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
