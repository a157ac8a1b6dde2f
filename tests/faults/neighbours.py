"""What one tenant feels of another that does its worst: `python -m tests.faults.neighbours --rounds 60`.

A service with the embedded models, two keys. One tenant draws a picture and reads a text, round after round; by turns
alone and beside `tests.faults.worst`. The result is benchmarks/results/neighbours.json: medians, 99th percentiles and
their ratios. The exit code is 1 if one of its requests failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import record
from core.jobs.keyring import Keyring
from deployment.redis import address_in
from tests.deployment.served import ROOT, Served

_ANSWER_S = 120.0
KINDS = ("picture", "text")


@dataclass
class Felt:
    """Seconds of each request, and what was no success."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    failed: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "failed": len(self.failed),
            **{
                kind: {"requests": len(s), "p50_s": _at(s, 0.5), "p99_s": _at(s, 0.99), "worst_s": round(max(s), 3)}
                for kind, s in self.seconds.items()
            },
        }


def _at(seconds: list[float], share: float) -> float:
    return round(sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))], 3)


def live(client: httpx2.Client, rounds: int, felt: Felt) -> None:
    """A picture and a text, `rounds` times."""
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "picture": ("/v1/images/generations", {"prompt": "a red hat", "steps": 4, "response_format": "b64_json"}),
        "text": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a hat"}], "max_tokens": 16, "temperature": 0},
        ),
    }
    for _ in range(rounds):
        for kind, (path, body) in asked.items():
            begun = time.perf_counter()
            try:
                answer = client.post(path, json=body)
                if answer.status_code != 200:
                    felt.failed.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
            except httpx2.HTTPError as error:
                felt.failed.append(f"{kind}: {error!r}")
            felt.seconds[kind].append(time.perf_counter() - begun)


def measure(folder: Path, rounds: int, turns: int) -> tuple[Felt, Felt]:
    """(alone, beside), by turns in one run."""
    service = Served(folder, model=None, unset=("DIPTYCH_KERNELS", "DIPTYCH_COMPILE"))
    try:
        service.ready()
        keyring = Keyring(address_in(folder / "data" / "redis"))
        keys = [keyring.add(name, ["images", "text"], "", "")[1] for name in ("well-behaved", "worst")]
        keyring.close()
        headers = {"Authorization": f"Bearer {keys[0]}"}
        alone, beside = Felt(), Felt()
        with httpx2.Client(base_url=service.url, headers=headers, timeout=_ANSWER_S, trust_env=False) as client:
            time.sleep(3)  # until keys are known everywhere
            live(client, 3, Felt())
            for _ in range(turns):
                live(client, rounds // turns, alone)
                words = [sys.executable, "-m", "tests.faults.worst", service.url, keys[1]]
                attacker = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
                try:
                    time.sleep(5)
                    live(client, rounds // turns, beside)
                    assert attacker.poll() is None, "the attacker ended"
                finally:
                    attacker.kill()
                    attacker.wait()
                time.sleep(5)
        return alone, beside
    finally:
        service.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.neighbours", description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    with record.alone(), tempfile.TemporaryDirectory() as folder:
        alone, beside = measure(Path(folder), options.rounds, options.turns)
    result: dict[str, Any] = {"alone": alone.as_json(), "beside": beside.as_json()}
    for kind in KINDS:
        result[f"{kind}_p99_ratio"] = round(result["beside"][kind]["p99_s"] / result["alone"][kind]["p99_s"], 2)
    record.publish(
        "neighbours", result, rooms=("api", "core/jobs", "core/batching", "workers", "tests/faults/worst.py")
    )
    for failure in (*alone.failed, *beside.failed):
        print(failure, file=sys.stderr)
    return int(bool(alone.failed or beside.failed))


if __name__ == "__main__":
    sys.exit(main())
