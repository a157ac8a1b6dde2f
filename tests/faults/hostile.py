"""Sends hostile requests to an API, while another process polls /healthz and reads the API's memory (monitor.py)."""

from __future__ import annotations

import http.client
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tests.faults.bodies import HostileRequest, requests
from tests.faults.lone_api import lone_api
from tests.faults.monitor import Monitor

ANSWER_S = 30.0
_CLIENTS = 4
_WARM = 0.2  # of all requests, until memory is read for the first time


def send(port: int, request: HostileRequest) -> int:
    """The status of the answer; 0 where the connection is closed without one, -1 where nothing comes."""
    given = {"Host": f"127.0.0.1:{port}", "Connection": "close"} | request.headers
    lies = bool({"Content-Length", "Transfer-Encoding"} & given.keys())  # then nobody knows where the body ends
    if not lies:
        given["Content-Length"] = str(len(request.body))
    head = f"{request.method} {request.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in given.items()) + "\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
            try:
                connection.sendall(head.encode("latin-1", "replace") + request.body)
                if lies:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before all of it was sent: the answer is there
            answer = http.client.HTTPResponse(connection, method=request.method)
            answer.begin()
            return answer.status
    except TimeoutError:
        return -1
    except (OSError, http.client.HTTPException):
        return 0


@dataclass(frozen=True)
class Attack:
    """What the requests were answered with, by kind, and how the API bore it."""

    statuses: dict[str, Counter[int]]
    health_s: list[float]
    rss_mib: list[float]
    survived: bool
    log: str

    @property
    def faults(self) -> list[str]:
        """Kinds of requests with an undocumented answer."""
        found = [
            f"{kind}: {status} × {count}"
            for kind, statuses in sorted(self.statuses.items())
            for status, count in statuses.items()
            if status <= 0 or (status >= 500 and status != 503)
        ]
        found += ["a traceback in the log"] * ("Traceback" in self.log)
        return found if self.survived else [*found, "the API ended"]


def attack(count: int, seed: int, folder: Path) -> Attack:
    """Send `count` requests of this seed to an API process with a Redis of its own."""
    statuses: dict[str, Counter[int]] = {}
    with lone_api(folder) as api:
        with Monitor(api.url, api.child.pid) as monitor, ThreadPoolExecutor(_CLIENTS) as pool:
            asked = islice(requests(seed), count)
            while some := list(islice(asked, 200)):
                for request, status in zip(some, pool.map(partial(send, api.port), some), strict=True):
                    statuses.setdefault(request.kind, Counter())[status] += 1
        log = (folder / "api.log").read_text("utf-8", "replace")
        return Attack(statuses, monitor.gaps_s, monitor.own_mib, api.child.poll() is None, log)


def summary(found: Attack) -> dict[str, Any]:
    """As JSON. Memory: the mean of what was read after a fifth of the requests, and of the last fifth."""
    health, rss = sorted(found.health_s), found.rss_mib
    fifth = max(1, int(len(rss) * _WARM))
    return {
        "requests": sum(map(Counter.total, found.statuses.values())),
        "statuses": {kind: dict(sorted(one.items())) for kind, one in sorted(found.statuses.items())},
        "healthz_asked": len(health),
        "healthz_p50_ms": round(health[len(health) // 2] * 1e3, 1),
        "healthz_p99_ms": round(health[int(len(health) * 0.99)] * 1e3, 1),
        "healthz_worst_ms": round(health[-1] * 1e3, 1),
        "rss_mib": [round(sum(part) / len(part), 1) for part in (rss[fifth : 2 * fifth] or rss, rss[-fifth:])],
    }
