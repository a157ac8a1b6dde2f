"""The published OpenAPI document, by schemathesis: whatever is asked by it, and against it, is answered as it says.

No answer is of 5xx, and none has a status, a media type or a form that the document does not know. `FUZZ_CASES=2000`
has the full number of cases made; by default there are fewer.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Set
from functools import partial
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from contract.bounds import MAX_EXACT
from contract.card import MAX_IMAGES
from core.jobs.record import JobState
from deployment.redis import RedisServer
from tests.api.easel import Easel
from tests.api.world import PATIENCE_S, SERVE, Worker, eventually, process, settings_of

CASES = int(os.environ.get("FUZZ_CASES", "150"))
WAITS = {  # for a worker, however long
    "POST /v1/images/generations", "POST /v1/images/edits", "POST /v1/chat/completions", "POST /v1/completions",
    "POST /v1/responses", "POST /v1/embeddings", "POST /", "POST /v1/models/{name}", "POST /predictions",
    "PUT /predictions/{id}",
    "GET /v1/predictions/{id}/stream", "GET /v1/jobs/{id}/events",
}  # fmt: skip
UNREADY = {"GET /readyz", "GET /v2/health/ready", "GET /v2/models/{name}/ready"}  # 503 is what it is for
TEXT = {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"}

load_all_checks()
checks = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


class Document:
    """What an API publishes, and a client that asks by it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        self.seen: Counter[tuple[str, int]] = Counter()
        self.job = self.file = ""  # some that are there
        schema = schemathesis.openapi.from_dict(self.session.get(f"{url}/openapi.json", timeout=PATIENCE_S).json())
        self.operations = {found.ok().label: found.ok() for found in schema.get_all_operations()}

    def cases(self, *, without: Set[str] = frozenset(), only: str = "") -> st.SearchStrategy[schemathesis.Case]:
        left = [one for label, one in self.operations.items() if label not in without and only in label]
        assert len(left) > 8
        anything = st.one_of([one.as_strategy(generation_mode=mode) for one in left for mode in GenerationMode])
        return st.builds(self._aimed, anything, st.booleans())

    def case(self, label: str, **parameters: str) -> schemathesis.Case:
        """One request for what is there, with nothing optional."""
        return self.operations[label].Case(path_parameters=parameters)

    def _aimed(self, case: schemathesis.Case, hit: bool) -> schemathesis.Case:
        """Half of what asks for one of something asks for one that is there."""
        known = {"/v1/jobs/": self.job, "/v1/files/": self.file, "/v1/queues/": "image", "/v1/models/": "emoji-xl"}
        for prefix, name in known.items():
            if hit and name and case.path.startswith(prefix) and case.method != "DELETE" and case.path_parameters:
                case.path_parameters |= {"id" if "{id}" in case.path else "name": name}
                if "k" in case.path_parameters:
                    case.path_parameters["k"] = "0"
        return case

    def ask(self, case: schemathesis.Case) -> None:
        answer = case.call(base_url=self.url, session=self.session, timeout=PATIENCE_S)
        self.seen[case.operation.label, answer.status_code] += 1
        case.validate_response(answer, checks=checks)
        if answer.content and answer.headers.get("content-type") == ["application/json"]:
            check_numbers(case.body, answer.json())


def numbers(value: Any) -> set[int]:
    """The whole numbers in a JSON value."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return set().union(*map(numbers, inner))
    return {value} if type(value) is int else set()


def check_numbers(body: Any, answer: Any) -> None:
    """All numbers in an answer are ones that floats of 64 bits hold, or a client's own and those that follow it."""
    own = {number + k for number in numbers(body) for k in range(MAX_IMAGES)}
    assert not {number for number in numbers(answer) if abs(number) > MAX_EXACT} - own


def walk(document: Document, cases: int, **chosen: Any) -> None:
    @settings(max_examples=cases, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(document.cases(**chosen))
    def asked(case: schemathesis.Case) -> None:
        document.ask(case)

    asked()


@pytest.fixture(scope="module")
def world(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Document, Worker]]:
    given = settings_of(redis_server.url, tmp_path_factory.mktemp("data"), max_queued=1_000_000)
    with Worker(given) as worker:
        worker.announce("draining")  # so that its model is known, and nobody draws
        with process(SERVE, given) as (_, client):
            yield Document(str(client.base_url)), worker


def test_without_a_worker(world: tuple[Document, Worker]) -> None:
    document, _ = world
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/images/generations", "body": {"prompt": "a cat"}}'
    post = partial(document.session.post, timeout=PATIENCE_S)
    document.job = post(f"{document.url}/v1/jobs", json={"type": "image", "prompt": "a cat"}).json()["id"]
    document.file = post(f"{document.url}/v1/files", files={"file": line}, data={"purpose": "batch"}).json()["id"]
    walk(document, CASES, without=WAITS | UNREADY)
    # What was asked for was no rubbish alone: whatever the luck of the cases, these are there to be asked for.
    there = {
        "GET /v1/jobs": {}, "GET /v1/jobs/{id}": {"id": document.job},
        "POST /v1/jobs/{id}/cancel": {"id": document.job},
        "GET /v1/files/{id}": {"id": document.file}, "GET /v1/models/{name}": {"name": "emoji-xl"},
        "POST /v1/queues/{name}/pause": {"name": "image"}, "POST /v1/queues/{name}/resume": {"name": "image"},
    }  # fmt: skip
    for label, parameters in there.items():
        document.ask(document.case(label, **parameters))
    assert there.keys() <= {label for label, status in document.seen if status < 300}


def test_with_a_worker(world: tuple[Document, Worker]) -> None:
    document, worker = world
    worker.announce()
    document.seen.clear()
    made = document.session.put(f"{document.url}/v1/jobs/done", json={"type": "image", "prompt": "a cat", "steps": 2})
    document.job = made.json()["id"]
    with Easel(worker):
        eventually(lambda: worker.is_(document.job, JobState.SUCCEEDED))
        walk(document, 50, only="/v1/jobs")
        walk(document, 50, only="/v1/", without=TEXT | {"POST /v1/embeddings"})
    for label, parameters in {"events": {}, "images/{k}": {"k": "0"}}.items():
        document.ask(document.case(f"GET /v1/jobs/{{id}}/{label}", id=document.job, **parameters))
    assert {("GET /v1/jobs/{id}/events", 200), ("GET /v1/jobs/{id}/images/{k}", 200)} <= set(document.seen)
