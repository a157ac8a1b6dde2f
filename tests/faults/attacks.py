"""Attacks a service with one key, beside a tenant that draws and writes: `python -m tests.faults.attacks [NAME…]`.

A service with the embedded models; each attack at ten times the size of its first report (`--scale`), repeated within
its key's rate limit until `--seconds` have passed. Printed for each, as a line of JSON:

- the seconds of the tenant's requests alone, beside the attack, and beside a *control*: a process that spends as much
  CPU time as the attacking client does and sends nothing. Both clients run at niceness 10 on the service's cores, where
  a real one has its own: `beside` against `control` is what the service lets through, `control` against `alone` what
  cores that are shared with the client cost;
- /healthz in the same three phases, asked by a process of its own (tests/faults/monitor.py);
- MiB of the API and of the worker, without and with their children: before, at most, and when idle children have
  ended;
- how many CPUs the API and the worker keep busy in each phase, with their children;
- whether a worker was lost.

G4-texts is the load of G4 with one harmless schema, as any tenant may bring it, and G4-masks that load with schemas
whose masks are slow. On a machine without other load, one at a time:

    for name in G1 G2 G3 G4 G4-texts G4-masks; do python -m tests.faults.attacks $name; done

The exit code is 1 if a request of the tenant failed, a worker was lost, or the attack got a 5xx other than 503.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.deployment.served import ROOT, Served, wait_until
from tests.faults.monitor import Monitor, own_mib, usage
from tests.faults.payloads import heavy_png, nine_times, png_of_empty_chunks, punycode_form
from tests.faults.tenant import KINDS, Phase, ask, client_of, quantile, two_tenants
from tests.schemas import AMBIGUOUS, COSTLY, Schema, heavy

_MIB = 2**20
_CLIENTS = 24
_WARM_S = 8.0  # in which the worker has measured and compiled what it does at its start
_MOST_S = 45.0  # of an attack: what has no answer by then counts as "open"
_SETTLED_S = 25.0  # after which idle child processes have ended
_NICENESS = 10  # of the attacking client, and of the control
_REPEATED_PER_S = 9.0  # requests, after those of the first round: within the key's limit of 600 a minute
_SLICE_S = 0.02  # of the control's burning and sleeping
_SETTINGS = {
    "DIPTYCH_TEXT_MODEL": str(ROOT / "models" / "emoji-lm"),
    "DIPTYCH_CONTROL_DIR": str(ROOT / "models" / "emoji-xl-controls"),
    "DIPTYCH_IP_ADAPTER_DIR": str(ROOT / "models" / "emoji-xl-ip-adapters"),
}
Send = Callable[[int], httpx2.Response]


# -- the attacks: each gets the attacker's client, and returns what sends its k-th request -----------------------------


def upload(client: httpx2.Client, data: bytes) -> httpx2.Response:
    return client.post("/v1/files", data={"purpose": "vision"}, files={"file": ("x.png", data)})


def charset(client: httpx2.Client) -> Send:
    """Forms whose charset a codec decodes in quadratic time."""
    body = punycode_form(900_000)
    headers = {"Content-Type": "multipart/form-data; boundary=edge; charset=punycode"}
    return lambda _: client.post("/v1/images/edits", content=body, headers=headers)


def empty_chunks(client: httpx2.Client) -> Send:
    """A picture of 1.4 million empty chunks, twice in each form; named nine times where it can be stored."""
    data = png_of_empty_chunks(1_390_000)
    stored = upload(client, data)
    if stored.status_code == 200:
        fields = nine_times(stored.json()["id"], "scenes")
        return lambda _: client.post("/v1/images/edits", json=fields)
    form = {"image": ("x.png", data), "mask": ("y.png", data)}
    return lambda _: client.post("/v1/images/edits", data={"prompt": "x"}, files=form)


def large_pictures(client: httpx2.Client) -> Send:
    """Requests of some hundred bytes, each of which names 16 MiB nine times."""
    fields = nine_times(upload(client, heavy_png(16 * _MIB)).json()["id"], "scenes")
    return lambda _: client.post("/v1/images/edits", json=fields)


def chat(schema: Schema | None) -> dict[str, Any]:
    """A chat request with 16 answers, of this schema."""
    fields = {"messages": [{"role": "user", "content": "a"}], "n": 16, "max_tokens": 64}
    if schema is None:
        return fields
    return fields | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def schemas(client: httpx2.Client) -> Send:
    """Schemas of 44 KB, and such as cannot be compiled within limits: a different one in each request."""

    def send(k: int) -> httpx2.Response:
        schema = heavy(k) if k % 2 else COSTLY[k // 2 % len(COSTLY)] | {"title": str(k)}
        return client.post("/v1/chat/completions", json=chat(schema))

    return send


def texts(client: httpx2.Client) -> Send:
    """As many texts of the same length under one schema that costs nothing: what any tenant's load comes to."""
    schema: Schema = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
    return lambda _: client.post("/v1/chat/completions", json=chat(schema))


def masks(client: httpx2.Client) -> Send:
    """As many texts, each request with another schema whose masks take long."""
    return lambda k: client.post("/v1/chat/completions", json=chat(AMBIGUOUS | {"title": str(k)}))


ATTACKS: dict[str, tuple[Callable[[httpx2.Client], Send], int]] = {  # and how many requests at scale 1
    "G1": (charset, 2), "G2": (empty_chunks, 16), "G3": (large_pictures, 24), "G4": (schemas, 2),
    "G4-texts": (texts, 1), "G4-masks": (masks, 1),
}  # fmt: skip


def attack(name: str, url: str, key: str, scale: int, seconds: float) -> None:
    """Run the attacking client: prints "ready", waits for a line, attacks, and prints what came of it as JSON."""
    os.nice(_NICENESS)
    with client_of(url, key) as client, ThreadPoolExecutor(_CLIENTS) as pool:
        prepare, requests = ATTACKS[name]
        send, count = prepare(client), requests * scale
        print("ready", flush=True)
        sys.stdin.readline()
        started, cpu_s = time.perf_counter(), time.process_time()

        def status(k: int) -> int:
            time.sleep(max(0.0, started + (k - count) / _REPEATED_PER_S - time.perf_counter()))
            if k >= count and time.perf_counter() > started + seconds:
                return -1  # not sent
            try:
                return send(k).status_code
            except httpx2.TransportError:
                return 0

        futures = [pool.submit(status, k) for k in range(count + int(seconds * _REPEATED_PER_S))]
        wait(futures, _MOST_S)
        statuses = Counter(future.result() if future.done() else "open" for future in futures)
        del statuses[-1]
        passed_s = time.perf_counter() - started
        share = (time.process_time() - cpu_s) / passed_s
        print(json.dumps({"statuses": statuses, "seconds": passed_s, "client_cpus": share}), flush=True)
        os._exit(0)  # leaves what has no answer yet


def burn(share: float, seconds: float) -> None:
    """Run the control: spend this share of a CPU, as the attacking client did, and send nothing."""
    os.nice(_NICENESS)
    print("ready", flush=True)
    sys.stdin.readline()
    started, cpu_s = time.perf_counter(), time.process_time()
    while (passed_s := time.perf_counter() - started) < seconds:
        if time.process_time() - cpu_s > share * passed_s:
            time.sleep(_SLICE_S)
    print(json.dumps({"seconds": passed_s, "client_cpus": (time.process_time() - cpu_s) / passed_s}))


# -- the tenant, and what is measured ----------------------------------------------------------------------------------


def live(client: httpx2.Client, until: Callable[[], bool], phase: Phase) -> None:
    while not until():
        ask(client, phase)


class Measured:
    """A service with two keys, once it does all that it does at its start."""

    def __init__(self, service: Served, tenant: str, attacker: str) -> None:
        self.service, self.key, self.client = service, attacker, client_of(service.url, tenant)
        self.worker, self.api = service.part("worker"), service.part("api")
        self.pids = self.api.pid, self.worker.pid
        wait_until(self._writes, "a text")
        end = time.perf_counter() + _WARM_S
        live(self.client, lambda: time.perf_counter() > end, Phase())
        self.client.post("/v1/chat/completions", json=chat({"type": "boolean"}))  # starts what checks schemas

    def _writes(self) -> bool:
        """Whether the service writes texts by now, which it does after pictures."""
        return self.client.post("/v1/chat/completions", json=chat(None) | {"n": 1, "max_tokens": 1}).status_code == 200

    def alone(self, seconds: float) -> Phase:
        phase, end = Phase(), time.perf_counter() + seconds
        with self._busy(phase), Monitor(self.service.url, *self.pids) as monitor:
            live(self.client, lambda: time.perf_counter() > end, phase)
        phase.healthz_ms = monitor.healthz_ms()
        return phase

    def beside(self, *arguments: str) -> Phase:
        """The tenant beside this module in another process with these arguments, for as long as that runs."""
        phase, ended = Phase(), threading.Event()
        command = [sys.executable, "-m", "tests.faults.attacks", *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
            assert other.stdin is not None and other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            with (
                self._busy(phase), Monitor(self.service.url, *self.pids) as monitor, ThreadPoolExecutor(1) as pool,
            ):  # fmt: skip
                tenant = pool.submit(live, self.client, ended.is_set, phase)
                other.stdin.write("\n")
                other.stdin.flush()
                phase.client = json.loads(other.stdout.readline())
                ended.set()
                tenant.result()
        phase.healthz_ms = monitor.healthz_ms()
        phase.peak_mib = [monitor.peak_mib(k, own=own) for k in range(len(self.pids)) for own in (True, False)]
        return phase

    @contextmanager
    def _busy(self, phase: Phase) -> Iterator[None]:
        """Note how many CPUs each process keeps busy meanwhile."""
        started, before = time.perf_counter(), [usage(pid)[1] for pid in self.pids]
        yield
        passed_s = time.perf_counter() - started
        phase.cpus = [
            round((usage(pid)[1] - cpu_s) / passed_s, 2) for pid, cpu_s in zip(self.pids, before, strict=True)
        ]

    def _mib(self) -> list[float]:
        """MiB of each process, without and with its children."""
        return [mib for pid in self.pids for mib in (own_mib(pid), usage(pid)[0])]

    def attack(self, name: str, scale: int, seconds: float) -> dict[str, Any]:
        """Measure one attack."""
        alone = self.alone(seconds)
        before = self._mib()
        beside = self.beside(
            name, "--client", self.service.url, self.key, "--scale", str(scale), "--seconds", str(seconds)
        )
        time.sleep(_SETTLED_S)
        after = self._mib()
        control = self.beside("--burn", str(beside.client["client_cpus"]), "--seconds", str(seconds))
        phases = {"alone": alone, "control": control, "beside": beside}
        parts = "api", "api_with_children", "worker", "worker_with_children"
        memory = zip(parts, before, beside.peak_mib, after, strict=True)
        return {
            "attack": name, "scale": scale, **beside.client,
            "tenant": {kind: compared({at: phase.seconds[kind] for at, phase in phases.items()}) for kind in KINDS},
            "healthz_ms": {at: phase.healthz_ms for at, phase in phases.items()},
            "cpus": {at: dict(zip(("api", "worker"), phase.cpus, strict=True)) for at, phase in phases.items()},
            "rss_mib": {part: {"before": round(a), "peak": round(b), "after": round(c)} for part, a, b, c in memory},
            "failed": [failure for phase in phases.values() for failure in phase.failed],
            "worker_lost": not self.worker.is_running() or "stopped answering" in self.service.err,
        }  # fmt: skip


def compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Quantiles of the seconds in each phase, and ratios of the 99th percentiles."""
    rows = {
        at: {"requests": len(some), **{f"p{q}": quantile(some, q / 100) for q in (50, 95, 99)}}
        for at, some in seconds.items()
    }
    p99 = {at: row["p99"] for at, row in rows.items()}
    return {
        **rows, "beside_to_alone": round(p99["beside"] / p99["alone"], 2),
        "control_to_alone": round(p99["control"] / p99["alone"], 2),
        "beside_to_control": round(p99["beside"] / p99["control"], 2),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.attacks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--scale", type=int, default=10, help="times as large as first reported (default 10)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each phase, at least (default 45)")
    parser.add_argument("--client", nargs=2, metavar=("URL", "KEY"), help="only the attacking client of one attack")
    parser.add_argument("--burn", type=float, metavar="SHARE", help="only the control: this share of a CPU")
    options = parser.parse_args()
    if options.burn is not None:
        burn(options.burn, options.seconds)
        return 0
    if options.client is not None:
        url, key = options.client
        attack(options.names[0], url, key, options.scale, options.seconds)
        return 0
    failed = False
    for name in options.names or ATTACKS:
        with tempfile.TemporaryDirectory() as folder, two_tenants(Path(folder), _SETTINGS) as tenants:
            result = Measured(*tenants).attack(name, options.scale, options.seconds)
        print(json.dumps(result), flush=True)
        errors = any(status.startswith("5") and status != "503" for status in result["statuses"])
        failed |= bool(result["failed"]) or result["worker_lost"] or errors
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
