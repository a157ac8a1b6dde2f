"""Without keys: this machine alone, called by its own names, by no page of somebody else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.http.host_origin import HostOriginMiddleware
from api.service import Service
from core.config import Settings
from tests.api.world import CARD, Api, Worker, changed, check_error, opened, settings_of

JOB = {"type": "image", "prompt": "a cat"}


@pytest.mark.parametrize(
    "host", ["localhost:1", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "LOCALHOST"]
)
def test_its_own_names(shared: Api, host: str) -> None:
    assert shared.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "x", "a:b:c"])
def test_a_name_that_others_own_may_lead_here(shared: Api, host: str) -> None:
    """DNS rebinding: a page of evil.example whose name now means this machine."""
    for path in ("/v1/models", "/", "/docs", "/v1/jobs"):
        check_error(shared.get(path, headers={"Host": host}), 403, "host", "host_not_allowed")
    assert shared.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://[", ""])
def test_a_page_of_another_origin_makes_nothing(shared: Api, worker: Worker, origin: str) -> None:
    before = worker.ids()
    for method, path, headers in (
        ("POST", "/v1/jobs", {"Origin": origin}), ("PUT", "/v1/jobs/x", {"Origin": origin}),
        ("DELETE", "/v1/jobs/x", {"Origin": origin}), ("POST", "/v1/jobs", {"Sec-Fetch-Site": "cross-site"}),
    ):  # fmt: skip
        answer = shared.client.request(method, path, json=JOB, headers=headers)
        check_error(answer, 403, "origin", "origin_not_allowed")
    assert worker.ids() == before
    own = {"Origin": shared.url, "Sec-Fetch-Site": "same-origin"}
    assert shared.client.post("/v1/jobs", json=JOB, headers=own).status_code == 202
    assert "access-control-allow-origin" not in shared.get("/v1/models", headers={"Origin": origin}).headers


@pytest.mark.parametrize(
    ("allowed", "taken", "refused"),
    [
        ("https://studio.example, https://other.example", ["https://studio.example"], ["https://evil.example"]),
        ("*", ["https://studio.example", "http://other.example:8080"], ["null", "file://", "about:blank"]),
    ],
)
def test_pages_that_are_named_may_call(settings: Settings, allowed: str, taken: list[str], refused: list[str]) -> None:
    """Or any page, but nothing else, where that is said."""
    with opened(changed(settings, cors_origins=allowed), CARD) as (api, _):
        for origin in taken:
            asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
            before = api.client.options("/v1/jobs", headers={"Origin": origin, **asked})
            assert before.status_code == 200 and before.headers["access-control-allow-origin"] in (origin, "*")
            assert api.client.post("/v1/jobs", json=JOB, headers={"Origin": origin}).status_code == 202
        for origin in refused:
            answer = api.client.post("/v1/jobs", json=JOB, headers={"Origin": origin})
            check_error(answer, 403, "origin", "origin_not_allowed")


@pytest.mark.parametrize(
    ("peer", "trusted", "served"),
    [("127.0.0.1", False, True), ("127.8.9.1", False, True), ("::1", False, True), ("::ffff:127.0.0.1", False, True),
     ("10.0.0.7", False, False), ("unknown", False, False),
     ("203.0.113.9", False, False), ("fe80::1%eth0", False, False),
     ("10.0.0.7", True, True)],
)  # fmt: skip
def test_other_machines(tmp_path: Path, peer: str, trusted: bool, served: bool) -> None:
    service = Service(settings_of("redis://127.0.0.1:1/0", tmp_path, trust_network=trusted))

    async def inside(*_: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"10.0.0.1")], "client": (peer, 1)}
    refusal = HostOriginMiddleware(inside, service)._refusal(scope)
    assert (refusal is None) is served
    assert refusal is None or (refusal.status, refusal.code) == (403, "keys_required")


def test_who_calls_from_a_container_is_told_what_to_set(settings: Settings) -> None:
    host = {"Host": "host.docker.internal:8000"}
    with opened(settings) as (api, _):
        message = check_error(api.get("/v1/models", headers=host), 403, "host", "host_not_allowed")["message"]
        assert "DIPTYCH_PUBLIC_URL" in message and "diptych keys add" in message
    named = changed(settings, public_url="http://host.docker.internal:8000")
    with opened(named) as (api, _):
        assert api.get("/v1/models", headers=host).status_code == 200
