"""Ids that clients choose are their key's: tenants that choose the same ids have jobs of their own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api import cards
from core.config import Settings
from core.jobs.record import JobState, record_id
from tests.api.jobs.test_webhooks import Receiver
from tests.api.pictures.test_edits import PNG
from tests.api.pictures.test_references import inline
from tests.api.test_access import Client, Guarded, guarding, path_of
from tests.api.world import check_error, eventually, ok, parsed

SETTINGS = {"rate": "100000/second", "webhook_private": True}
JOB = {"type": "image", "prompt": "a cat", "seed": 1, "steps": 2}
ASYNC = {"Prefer": "respond-async"}
BODIES: dict[str, dict[str, Any]] = {
    "PUT /v1/jobs/{id}": JOB,
    "PUT /v1/jobs/{id} of a dog": {**JOB, "prompt": "a dog"},
    "PUT /v1/jobs/{id} of an edit": {**JOB, "type": "edit", "images": [inline(PNG)]},
    "PUT /predictions/{id}": {"input": {"prompt": "a cat", "seed": 1}},
}
ASKS = (
    *BODIES, "GET /v1/jobs/{id}", "GET /v1/jobs/{id}/events", "GET /v1/jobs/{id}/images/0", "GET /v1/jobs/{id}/preview",
    "GET /predictions/{id}", "GET /v1/predictions/{id}", "GET /v1/predictions/{id}/stream",
    "POST /v1/jobs/{id}/cancel", "POST /predictions/{id}/cancel", "POST /v1/predictions/{id}/cancel",
    "POST /v1/jobs/{id}/requeue", "DELETE /v1/jobs/{id}", "GET /v1/jobs?after={id}", "GET /v1/predictions?cursor={id}",
    "GET /v1/jobs", "GET /v1/predictions",
)  # fmt: skip
DRAW = "draw"
IDS = ("logo", "invoice-2026")
# What differs between two times, two keys, and whatever else a queue holds.
_CHANGES = re.compile(
    r'"(?:created_at|started_at|completed_at|expires_at|position|estimated_\w+|total_time|predict_time)": ?[^,}]*'
    r"|job_[0-9a-f]{24}|\?expires=[^\"\s]*|^id: .*$|msg_\S+",
    re.MULTILINE,
)
_numbers = itertools.count()

Step = tuple[int, str, str]
"""A tenant, what it asks or has drawn, and the id."""


@pytest.fixture(scope="module")
def doors(module_settings: Settings) -> Iterator[Guarded]:
    """An API that knows new keys sooner than usual."""
    with pytest.MonkeyPatch.context() as patch, guarding(module_settings) as doors:
        patch.setattr(cards, "_AGAIN_S", 0.01)
        yield doors


def draw(doors: Guarded, client: Client, id: str) -> bool:
    """Draw the tenant's job of this id, if it waits. False: it does not."""
    worker = doors.worker
    job = worker.store.get(worker.store.lists.locate(id, client.key_id))
    if job is None or job.state is not JobState.QUEUED:
        return False
    worker.finish(worker.take(job.id), f"PNG of {id}".encode())
    return True


def asked(client: Client, ask: str, id: str) -> tuple[Any, ...]:
    """The answer to a request as every tenant may see it: without times, ids of records, and places in the queue."""
    method, path = ask.partition(" of ")[0].replace("{id}", id).split(" ")
    body = {"json": BODIES[ask]} if ask in BODIES else {}
    streamed = path.endswith(("/events", "/stream"))
    if streamed and not is_final(client, id):
        with client.stream(method, path) as answer:
            status = answer.status_code
            first = next(parsed(answer.iter_lines())).type if status == 200 and path.endswith("/events") else ""
        return status, first
    answer = client.request(method, path, headers=ASYNC, **body)
    text = _CHANGES.sub("", answer.text)
    return answer.status_code, text, _CHANGES.sub("", answer.headers.get("location", ""))


def is_final(client: Client, id: str) -> bool:
    answer = client.get(f"/v1/jobs/{id}")
    return answer.status_code == 200 and JobState(answer.json()["status"]).final


def play(doors: Guarded, steps: Sequence[Step]) -> dict[int, list[Any]]:
    """What new tenants see of these steps, each in turn."""
    clients = {tenant: doors.key() for tenant, *_ in steps}
    seen: dict[int, list[Any]] = {tenant: [] for tenant in clients}
    for tenant, ask, id in steps:
        client = clients[tenant]
        seen[tenant].append(draw(doors, client, id) if ask == DRAW else asked(client, ask, id))
    return seen


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([*BODIES, *ASKS, DRAW]), st.sampled_from(IDS)), min_size=2,
                max_size=16))  # fmt: skip
def test_tenants_that_choose_the_same_ids_do_not_notice_each_other(doors: Guarded, steps: list[Step]) -> None:
    together = play(doors, steps)
    alone = {tenant: play(doors, [step for step in steps if step[0] == tenant])[tenant] for tenant in together}
    assert together == alone


@pytest.mark.parametrize("ask", BODIES)
def test_each_ask_finds_its_own_job(doors: Guarded, ask: str) -> None:
    """Every request of the property, once for each of two tenants whose jobs have one id, the second's last."""
    steps = [(tenant, step, "logo") for step in (ask, *ASKS[len(BODIES) :]) for tenant in (0, 1)]
    steps[2:2] = [(0, DRAW, "logo")]
    seen = play(doors, steps)
    assert [status for status, *_ in (seen[0][0], seen[1][0])] == [202, 202]
    assert {tenant: play(doors, [step for step in steps if step[0] == tenant])[tenant] for tenant in seen} == seen


def new_name() -> str:
    return f"of-mine-{next(_numbers)}"


def test_the_chosen_id_is_told_to_its_key_and_the_records_to_admins(doors: Guarded) -> None:
    with Receiver() as receiver:
        ann, bob, chief, name = doors.key(), doors.key(), doors.key("admin"), new_name()
        paths = {}
        for client in (ann, bob):
            made = ok(client.put(f"/v1/jobs/{name}", json={**JOB, "webhook_url": receiver.url}), 202)
            assert (made.json()["id"], made.headers["location"]) == (name, f"/v1/jobs/{name}")
            paths[client] = client.get(f"/v1/predictions/{name}").json()["urls"]["get"]
            assert paths[client].endswith(f"/v1/predictions/{name}")
        records = {client: record_id(client.key_id, name) for client in (ann, bob)}
        listed = {job["id"] for job in chief.get("/v1/jobs?limit=100").json()["data"]}
        assert {*records.values()} <= listed and name not in listed
        check_error(chief.get(f"/v1/jobs/{name}"), 404, code="job_not_found")
        for client, record in records.items():
            draw(doors, client, name)
            with client.stream("GET", f"/v1/jobs/{name}/events") as answer:
                *_, last = parsed(answer.iter_lines())
            assert (last.type, last.data["id"]) == ("succeeded", name)
            assert record in path_of(client, name) and doors.client("").get(path_of(client, name)).status_code == 200
            assert client.get(f"/v1/jobs/{record}").json()["id"] == name, "its key may use the record's too"
            assert chief.get(f"/v1/jobs/{record}").json()["id"] == record
            assert f'"{name}-0.png"' in client.get(f"/v1/jobs/{name}/images/0").headers["content-disposition"]
        check_error(bob.get(f"/v1/jobs/{records[ann]}"), 404, code="job_not_found")
        eventually(lambda: len(receiver.heard) >= 2)
        assert [json.loads(body)["data"]["id"] for *_, body in receiver.heard] == [name] * 2
        assert len({headers["webhook-id"] for _, headers, _ in receiver.heard}) == 2, "who hears one twice drops it"


def test_lists_go_on_after_a_chosen_id(doors: Guarded) -> None:
    ann, bob = doors.key(), doors.key()
    names = [new_name() for _ in range(3)]
    for name in names:
        for client in (ann, bob):
            ok(client.put(f"/v1/jobs/{name}", json=JOB), 202)
    ok(ann.post(f"/v1/jobs/{names[1]}/cancel"))
    seen, after = [], ""
    while True:
        listed = ok(ann.get("/v1/jobs", params={"limit": 1, **({"after": after} if after else {})})).json()
        seen += [job["id"] for job in listed["data"]]
        after = listed["last_id"]
        assert [after] == seen[-1:]
        if not listed["has_more"]:
            break
    assert seen == names[::-1]
    listed = ok(ann.get("/v1/jobs", params={"after": names[2], "status": "cancelled"})).json()
    assert [job["id"] for job in listed["data"]] == [names[1]]
    page = ok(bob.get("/v1/predictions", params={"cursor": names[1]})).json()
    assert [prediction["id"] for prediction in page["results"]] == [names[0]]
    check_error(ann.get("/v1/jobs", params={"after": record_id(bob.key_id, names[0])}), 400, "after")


def test_records_of_chosen_ids_are_found_by_their_key_alone(doors: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that 0.3.0 wrote, under the chosen ids themselves."""
    ann, bob, name, other = doors.key(), doors.key(), new_name(), new_name()

    def put(client: Client, name: str) -> httpx2.Response:
        return ok(client.put(f"/v1/jobs/{name}", json=JOB), 202)

    with monkeypatch.context() as patch:
        patch.setattr("core.jobs.job_lists.record_id", lambda _, name: name)
        made = [put(ann, each).json()["created_at"] for each in (name, other)]
    assert {name, other} <= doors.worker.ids()
    assert put(ann, name).json()["created_at"] == made[0], "it is made once"
    check_error(ann.put(f"/v1/jobs/{name}", json={**JOB, "n": 2}), 422, code="idempotency_conflict")
    assert [job["id"] for job in ann.get("/v1/jobs").json()["data"]] == [other, name]
    assert [job["id"] for job in ann.get(f"/v1/jobs?after={other}").json()["data"]] == [name]
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/requeue"), ("DELETE", "")):
        check_error(bob.request(method, f"/v1/jobs/{name}{path}"), 404, code="job_not_found")
    check_error(bob.get(f"/v1/jobs?after={name}"), 400, "after")
    put(bob, name)
    assert ok(bob.delete(f"/v1/jobs/{name}")).json() == {"id": name, "object": "job", "deleted": True}
    doors.worker.work(name)
    assert ann.get(f"/v1/jobs/{name}").json()["status"] == "succeeded"
    assert doors.client("").get(path_of(ann, name)).status_code == 200
    assert ann.post(f"/v1/jobs/{other}/cancel").json()["status"] == "cancelled"
    for each in (name, other):
        ok(ann.delete(f"/v1/jobs/{each}"))
        assert each not in doors.worker.ids()
    assert put(ann, name).json()["id"] == name and name not in doors.worker.ids(), "the next is the key's own"


def test_both_records_of_an_id_are_reached_one_after_the_other(doors: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PUT that was repeated at an API of 0.3.0, in a rolling update."""
    ann, name = doors.key(), new_name()
    ok(ann.put(f"/v1/jobs/{name}", json=JOB), 202)
    with monkeypatch.context() as patch:
        patch.setattr("core.jobs.job_lists.record_id", lambda _, name: name)
        ok(ann.put(f"/v1/jobs/{name}", json=JOB), 202)
    assert [job["id"] for job in ann.get("/v1/jobs").json()["data"]] == [name] * 2
    after, pages = {}, 0
    while (listed := ok(ann.get("/v1/jobs", params={"limit": 1, **after})).json())["has_more"]:
        after, pages = {"after": listed["last_id"]}, pages + 1
        assert pages < 3, "a list has an end"
    for is_kept in (True, False):
        ok(ann.post(f"/v1/jobs/{name}/cancel"))
        ok(ann.delete(f"/v1/jobs/{name}"))
        assert (ann.get(f"/v1/jobs/{name}").status_code == 200) is is_kept


def test_an_id_without_a_key_is_in_nobodys_way(doors: Guarded) -> None:
    ann, nobody, worker, name = doors.key(), doors.client(""), doors.worker, new_name()
    keys = worker.redis.hgetall("diptych:keys")
    worker.redis.delete("diptych:keys")
    worker.redis.set("diptych:access", "open")
    eventually(lambda: nobody.get("/v1/jobs").status_code == 200)
    assert ok(nobody.put(f"/v1/jobs/{name}", json=JOB), 202).json()["id"] == name
    worker.redis.hset("diptych:keys", mapping=keys)
    worker.redis.set("diptych:access", "keys")
    eventually(lambda: nobody.get("/v1/jobs").status_code == 401 and ann.get("/v1/jobs").status_code == 200)
    check_error(ann.get(f"/v1/jobs/{name}"), 404, code="job_not_found")
    assert ok(ann.put(f"/v1/jobs/{name}", json=JOB), 202).json()["id"] == name
    assert {name, record_id(ann.key_id, name)} <= worker.ids()
