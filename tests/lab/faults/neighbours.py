"""Measures the effect of a worst-case tenant on another: `python -m tests.lab.faults.neighbours --rounds 60`.

A service with the embedded models, two keys. One tenant generates an image and a text, round after round: alone, next
to a CPU-bound process without requests (`burner`), next to a second tenant with the same requests (`peer`), and next to
`tests.faults.worst`. The burner shows the cost of sharing the CPU, the peer that of sharing the device. The result is
lab/bench/results/neighbours.json: medians, 99th percentiles and their ratios. The exit code is 1 if one of the first
tenant's requests failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from core.jobs.keyring import Keyring
from deployment.redis import address_in
from lab.bench.harness import record
from lab.bench.tables import TABLES
from tests.deployment.served import ROOT, Served
from tests.faults import worst

_BEGUN_S = 5.0  # until what runs beside is in full swing, and until nothing of it is left
_ANSWER_S = 300.0
_RATE = "100000/minute"  # of the tenant that is measured: as many as it takes
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "picture": ("/v1/images/generations", {"prompt": "a red hat", "steps": 4, "response_format": "b64_json"}),
    "text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a hat"}], "max_tokens": 16, "temperature": 0},
    ),
}


@dataclass
class Phase:
    """Seconds of each of the tenant's requests, and what was no success."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in REQUESTS})
    failed: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {"failed": len(self.failed)} | {
            kind: {
                "requests": len(seconds), "p50_s": quantile(seconds, 0.5), "p99_s": quantile(seconds, 0.99),
                "worst_s": round(max(seconds), 3),
            }
            for kind, seconds in self.seconds.items()
        }  # fmt: skip


def quantile(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)


@contextlib.contextmanager
def two_tenants(folder: Path) -> Iterator[tuple[Served, str, str]]:
    """A service with the embedded models, the key of the tenant that is measured, and the other tenant's key."""
    service = Served(folder, model=None, unset=("DIPTYCH_KERNELS", "DIPTYCH_COMPILE", "DIPTYCH_TEXT_MODEL"))
    try:
        service.ready()
        keyring, scopes = Keyring(address_in(folder / "data" / "redis")), ["images", "text", "files"]
        tenant, other = keyring.add("tenant", scopes, _RATE)[1], keyring.add("other", scopes)[1]
        keyring.close()
        yield service, tenant, other
    finally:
        service.close()


def client_of(url: str, key: str) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=_ANSWER_S, trust_env=False, verify=False)


def live(client: httpx2.Client, rounds: int, phase: Phase) -> None:
    """Draw and write, one request after the other."""
    for _ in range(rounds):
        for kind, (path, body) in REQUESTS.items():
            started = time.perf_counter()
            try:
                answer = client.post(path, json=body)
                if answer.status_code != 200:
                    phase.failed.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
            except httpx2.HTTPError as error:
                phase.failed.append(f"{kind}: {error!r}")
            phase.seconds[kind].append(time.perf_counter() - started)


def go_on(url: str, key: str) -> None:
    """A second tenant that does what the first one does, until it is killed; of the lowest CPU priority."""
    os.nice(19)
    with client_of(url, key) as client:
        while True:
            live(client, 1, Phase())


@contextlib.contextmanager
def running(words: list[str]) -> Iterator[None]:
    """Python with these words, beside what is measured."""
    if not words:
        yield
        return
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        time.sleep(_BEGUN_S)
        yield
        assert process.poll() is None, f"{words} ended"
    finally:
        process.kill()
        process.wait()
        time.sleep(_BEGUN_S)


def measure(folder: Path, rounds: int, turns: int, only: list[str]) -> dict[str, Phase]:
    """What was felt alone and beside each of the others, by turns in one run. `only` are attacks; none: all."""
    with two_tenants(folder) as (service, tenant, other), client_of(service.url, tenant) as client:
        words = {
            "alone": [],
            "burner": ["-c", "import os; os.nice(19)\nwhile True: pass"],
            "peer": ["-c", "import sys; from tests.lab.faults.neighbours import go_on; go_on(*sys.argv[1:])",
                     service.url, other],
            "beside": ["-m", "tests.faults.worst", service.url, other, *only],
        }  # fmt: skip
        felt = {name: Phase() for name in words}
        time.sleep(3)  # until keys are known everywhere
        live(client, 3, Phase())
        for _ in range(turns):
            for name, beside in words.items():
                with running(beside):
                    live(client, rounds // turns, felt[name])
        return felt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults.neighbours", description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], choices=worst.NAMES, help="attacks; nothing is stored then")
    options = parser.parse_args()
    with record.alone(), tempfile.TemporaryDirectory() as folder:
        felt = measure(Path(folder), options.rounds, options.turns, options.only)
    result: dict[str, Any] = {name: phase.report() for name, phase in felt.items()}
    for kind in REQUESTS:
        p99_s = {name: result[name][kind]["p99_s"] for name in felt}
        result[f"{kind}_p99_ratio"] = round(p99_s["beside"] / p99_s["alone"], 2)
        result[f"{kind}_p99_ratio_to_peer"] = round(p99_s["beside"] / p99_s["peer"], 2)
        result[f"{kind}_p99_ratio_of_burner"] = round(p99_s["burner"] / p99_s["alone"], 2)
    if options.only:
        print(json.dumps(result))
    else:
        whole = ("api", "core/jobs", "core/batching", "workers", "tests/faults/worst.py")
        record.publish("neighbours", result, artifacts=whole, table=TABLES["neighbours"])
    failed = [failure for name in ("alone", "burner", "peer", "beside") for failure in felt[name].failed]
    for failure in failed:
        print(failure, file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
