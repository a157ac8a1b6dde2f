"""Runs a whole service for two tenants, and measures what one of them notices."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from core.jobs.keyring import Keyring
from deployment.redis import address_in
from tests.deployment.served import Served
from tests.faults.payloads import small_png

KINDS = ("picture", "edit", "text")
_ANSWER_S = 300.0
_RATE = "100000/minute"  # of the tenant that is measured: as many as it takes


@dataclass
class Phase:
    """Seconds of each of the tenant's requests, and what was no success."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    failed: list[str] = field(default_factory=list)
    healthz_ms: dict[str, float] = field(default_factory=dict)
    peak_mib: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)  # that each of the service's processes keeps busy, with children
    client: dict[str, Any] = field(default_factory=dict)


@contextmanager
def two_tenants(folder: Path, variables: Mapping[str, str] = {}) -> Iterator[tuple[Served, str, str]]:
    """A service with the embedded models, the key of the tenant that is measured, and the other tenant's key."""
    unset = ("DIPTYCH_KERNELS", "DIPTYCH_COMPILE", "DIPTYCH_TEXT_MODEL")
    service = Served(folder, model=None, unset=unset, variables=variables)
    try:
        service.ready()
        keyring, scopes = Keyring(address_in(folder / "data" / "redis")), ["images", "text", "files"]
        tenant, other = keyring.add("tenant", scopes, _RATE)[1], keyring.add("other", scopes)[1]
        keyring.close()
        yield service, tenant, other
    finally:
        service.close()


def client_of(url: str, key: str) -> httpx2.Client:
    return httpx2.Client(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=_ANSWER_S, trust_env=False, verify=False,
        limits=httpx2.Limits(max_connections=200),
    )  # fmt: skip


def ask(client: httpx2.Client, phase: Phase, kinds: Sequence[str] = KINDS) -> None:
    """Draw, edit and write, one request after the other."""
    drawing = {"prompt": "a red hat", "steps": 4, "response_format": "b64_json"}
    source = {"image_url": "data:image/png;base64," + base64.b64encode(small_png(side=128)).decode()}
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "picture": ("/v1/images/generations", drawing),
        "edit": ("/v1/images/edits", {**drawing, "images": [source]}),
        "text": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a hat"}], "max_tokens": 16, "temperature": 0},
        ),
    }
    for kind in kinds:
        path, body = requests[kind]
        started = time.perf_counter()
        try:
            answer = client.post(path, json=body)
            if answer.status_code != 200:
                phase.failed.append(f"{kind}: {answer.status_code} {answer.text[:200]}")
        except httpx2.HTTPError as error:
            phase.failed.append(f"{kind}: {error!r}")
        phase.seconds[kind].append(time.perf_counter() - started)


def quantile(values: list[float], share: float, digits: int = 4) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], digits)
