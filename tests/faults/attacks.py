"""Attacks an API with one key, beside a tenant that draws: `python -m tests.faults.attacks [--scale 10] [NAME…]`.

Prints for each attack the tenant's p50 and p99 alone and beside it, the longest gap of /healthz, and the memory of the
API with its child processes before, at most, and afterwards. To add one, write a function and list it in `ATTACKS`.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import random
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx2
import psutil

from core.jobs.keyring import Keyring
from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.world import CARD, SERVE, Worker, process, settings_of

CARD_OF_NINE = dataclasses.replace(CARD, controls=("edges",), image_prompts=("base",))
_MIB = 2**20
_CLIENTS = 24
_ANSWER_S = 900.0
_SETTLED_S = 25.0  # after which idle child processes have ended


# -- what is sent ------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def small_png(chunks: bytes = b"", side: int = 64) -> bytes:
    """A grey PNG with these chunks behind its header."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((side + 1) * side))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunks + chunk(b"IDAT", pixels) + chunk(b"IEND")


@cache
def png_of_empty_chunks(count: int) -> bytes:
    """Twelve bytes each."""
    return small_png(chunk(b"IDAT") * count)


@cache
def heavy_png(size_bytes: int) -> bytes:
    """A sound picture of nearly this size, of pixels that cannot be compressed."""
    side = int(size_bytes**0.5) - 8
    rows = b"".join(b"\0" + random.Random(y).randbytes(side) for y in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 0)) + chunk(b"IEND")
    )  # fmt: skip


def form_body(fields: dict[str, bytes], files: dict[str, bytes], boundary: str = "edge") -> bytes:
    """A multipart form."""
    parts = []
    for names, more in ((fields, ""), (files, '; filename="x"')):
        for name, data in names.items():
            head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
            parts.append(head.encode() + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode()


def punycode_form(size_bytes: int) -> bytes:
    """A form of an edit in punycode, in which each letter of the last third is inserted into the rest."""
    prompt = b"x" * (size_bytes * 2 // 3) + b"-" + b"b" * (size_bytes // 3)
    return form_body({"prompt-": prompt}, {"image-": small_png(), "file-": small_png()})


def nine_times(file_id: str) -> dict[str, object]:
    """An edit that names one file nine times."""
    image = {"file_id": file_id}
    return {
        "prompt": "x", "steps": 1, "images": [image], "control": [{"model": "edges", "image": image}] * 4,
        "image_prompts": [{"model": "base", "image": image}] * 4,
    }  # fmt: skip


# -- the service, the tenant and what is measured ----------------------------------------------------------------------


def usage(pid: int) -> tuple[float, float]:
    """MiB in memory, and CPU seconds, of a process and its children, ended ones included."""
    rss, cpu_s = 0.0, 0.0
    top = psutil.Process(pid)
    for one in (top, *top.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            rss += one.memory_info().rss / _MIB
            cpu_s += times.user + times.system
            if one is top:
                cpu_s += times.children_user + times.children_system
    return rss, cpu_s


@dataclass
class Monitor:
    """Asks /healthz on one connection and reads the API's memory, twenty times a second. Use as a context manager."""

    url: str
    pid: int
    gaps_s: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)

    def __enter__(self) -> Monitor:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=one) for one in (self._ask, self._read)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx2.Client(base_url=self.url, timeout=_ANSWER_S) as client:
            while not self._ended.wait(0.05):
                began = time.perf_counter()
                with suppress(httpx2.TransportError):
                    client.get("/healthz")
                self.gaps_s.append(time.perf_counter() - began)

    def _read(self) -> None:
        while not self._ended.wait(0.05):
            with suppress(psutil.NoSuchProcess):
                self.rss_mib.append(usage(self.pid)[0])


@dataclass(frozen=True)
class Site:
    """A running API with a Redis and a worker of its own. `attacker` and `tenant` are clients with a key each."""

    url: str
    pid: int
    attacker: httpx2.Client
    tenant: httpx2.Client
    scale: int

    def flood(self, send: Callable[[int], httpx2.Response], count: int) -> Counter[int]:
        """Send so many requests, 24 at once; how often each status came. 0: no answer."""

        def status(k: int) -> int:
            try:
                return send(k).status_code
            except httpx2.TransportError:
                return 0

        with ThreadPoolExecutor(_CLIENTS) as pool:
            return Counter(pool.map(status, range(count)))

    def upload(self, data: bytes) -> httpx2.Response:
        return self.attacker.post("/v1/files", data={"purpose": "vision"}, files={"file": ("x.png", data)})


@contextmanager
def site(folder: Path, scale: int) -> Iterator[Site]:
    redis = RedisServer(folder / "redis")
    redis.start()
    try:
        settings = settings_of(redis.url, folder / "data", max_queued=1_000_000)
        keyring = Keyring.of(settings)
        tokens = [keyring.add(name, ["images", "text", "files"])[1] for name in ("attacker", "tenant")]
        keyring.close()
        with Worker(settings) as worker, process(SERVE, settings) as (child, client):
            worker.announce(card=CARD_OF_NINE, ttl_s=86_400)
            while client.get("/readyz").status_code != 200:
                time.sleep(0.1)
            url, limits = str(client.base_url), httpx2.Limits(max_connections=200)
            clients = [
                httpx2.Client(
                    base_url=url, timeout=_ANSWER_S, limits=limits, headers={"Authorization": f"Bearer {token}"}
                )
                for token in tokens
            ]
            with clients[0] as attacker, clients[1] as tenant, Easel(worker):
                yield Site(url, child.pid, attacker, tenant, scale)
    finally:
        redis.kill()


_PAUSE_S = 0.15  # between two requests: within the key's limit of 600 a minute


def draw(client: httpx2.Client, until: Callable[[], bool]) -> list[float]:
    """Draw, edit and fetch pictures, one after the other; the seconds of each."""
    picture = base64.b64encode(small_png(side=128)).decode()
    bodies = (
        ("/v1/images/generations", {"prompt": "a cat", "steps": 1, "response_format": "b64_json"}),
        ("/v1/images/edits", {
            "prompt": "a hat", "steps": 2, "images": [{"image_url": f"data:image/png;base64,{picture}"}],
            "response_format": "b64_json",
        }),
    )  # fmt: skip
    times: list[float] = []
    while not until():
        path, fields = bodies[len(times) % 2]
        began = time.perf_counter()
        answer = client.post(path, json=fields)
        times.append(time.perf_counter() - began)
        if answer.status_code != 200:
            raise RuntimeError(f"the tenant was answered {answer.status_code}: {answer.text[:300]}")
        time.sleep(_PAUSE_S)
    return times


# -- the attacks -------------------------------------------------------------------------------------------------------


def charset(site: Site) -> Counter[int]:
    """G1: forms whose charset a codec decodes in quadratic time; 300 KB at scale 1."""
    body = punycode_form(300_000 * min(site.scale, 3))
    headers = {"Content-Type": "multipart/form-data; boundary=edge; charset=punycode"}
    return site.flood(lambda _: site.attacker.post("/v1/images/edits", content=body, headers=headers), 2 * site.scale)


def empty_chunks(site: Site) -> Counter[int]:
    """G2: a picture of 1.4 million empty chunks, handed in and in forms; sixteen at scale 1."""
    data = png_of_empty_chunks(1_390_000)
    answers: Counter[int] = Counter()
    stored = site.upload(data)
    answers[stored.status_code] += 1
    if stored.status_code == 200:
        fields = nine_times(stored.json()["id"])
        return answers + site.flood(lambda _: site.attacker.post("/v1/images/edits", json=fields), 16 * site.scale)
    form = {"image": ("x.png", data), "mask": ("y.png", data)}
    return answers + site.flood(
        lambda _: site.attacker.post("/v1/images/edits", data={"prompt": "x"}, files=form), 16 * site.scale
    )


def nine_large_pictures(site: Site) -> Counter[int]:
    """G3: 24 requests at scale 1, of some hundred bytes, each of which names 16 MiB nine times."""
    fields = nine_times(site.upload(heavy_png(16 * _MIB)).json()["id"])
    return site.flood(lambda _: site.attacker.post("/v1/images/edits", json=fields), 24 * site.scale)


ATTACKS: dict[str, Callable[[Site], Counter[int]]] = {
    "G1 charset": charset, "G2 empty chunks": empty_chunks, "G3 nine large pictures": nine_large_pictures,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one attack did. Times in seconds, memory in MiB."""

    statuses: Counter[int]
    seconds: float
    alone_s: list[float]
    beside_s: list[float]
    gap_alone_s: float
    gap_s: float
    rss_mib: tuple[float, float, float]  # before, at most, after

    def row(self) -> dict[str, object]:
        return {
            "answers": {str(status): count for status, count in sorted(self.statuses.items())},
            "attack_s": round(self.seconds, 1),
            "tenant_alone_s": {"p50": quantile(self.alone_s, 0.5), "p99": quantile(self.alone_s, 0.99)},
            "tenant_beside_s": {"p50": quantile(self.beside_s, 0.5), "p99": quantile(self.beside_s, 0.99)},
            "tenant_requests": [len(self.alone_s), len(self.beside_s)],
            "healthz_longest_ms": {"alone": round(1e3 * self.gap_alone_s, 1), "beside": round(1e3 * self.gap_s, 1)},
            "rss_mib": dict(zip(("before", "peak", "after"), (round(one, 1) for one in self.rss_mib), strict=True)),
        }


def quantile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)


def run(attack: Callable[[Site], Counter[int]], scale: int, alone_s: float = 20.0) -> Outcome:
    """Run one attack on an API of its own."""
    with tempfile.TemporaryDirectory() as folder, site(Path(folder), scale) as running:
        with Monitor(running.url, running.pid) as monitor:
            end = time.perf_counter() + alone_s
            alone = draw(running.tenant, lambda: time.perf_counter() > end)
        gap_alone_s, before = max(monitor.gaps_s), usage(running.pid)[0]
        over = threading.Event()
        with Monitor(running.url, running.pid) as monitor, ThreadPoolExecutor(1) as pool:
            began = time.perf_counter()
            beside = pool.submit(draw, running.tenant, over.is_set)
            try:
                statuses = attack(running)
            finally:
                seconds = time.perf_counter() - began
                time.sleep(max(0.0, 3.0 - seconds))  # so that the tenant was there at all
                over.set()
            times = beside.result()
            time.sleep(_SETTLED_S)
        rss = before, max(monitor.rss_mib), usage(running.pid)[0]
        return Outcome(statuses, seconds, alone, times, gap_alone_s, max(monitor.gaps_s), rss)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"beginnings of: {', '.join(ATTACKS)}")
    parser.add_argument("--scale", type=int, default=10, help="times as large as in the review (default 10)")
    parser.add_argument("--alone-s", type=float, default=20.0, help="seconds that the tenant draws alone (default 20)")
    options = parser.parse_args()
    for name, attack in ATTACKS.items():
        if not options.names or any(name.startswith(one) for one in options.names):
            print(
                json.dumps({"attack": name, "scale": options.scale} | run(attack, options.scale, options.alone_s).row())
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
