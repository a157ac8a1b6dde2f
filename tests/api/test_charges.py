"""Each door charges what it makes, and no more of what is refused: one table of limits over all doors."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.api.doors import DOORS, IMAGES, OFFERED, WRITER, Door, House, Request
from tests.api.pictures.test_edits import PNG
from tests.api.test_access import Client
from tests.api.world import BATCH, check_error, eventually, ok

SETTINGS = {"sdapi": True, "rate": "100000/second", "batch_jobs": 2, "model_aliases": f"best={OFFERED.name}"}
LIMIT = 10_000
RATE = f"{LIMIT}/hour"
Ledger = dict[tuple[str, str], int]
"""What a key was charged, by unit and model; of all models under ""."""


def units(door: Door) -> tuple[str, str, str]:
    """The unit of what the door makes, the model, and the name of the key's limit."""
    if door.modality == "image":
        return "pictures", OFFERED.name, "quota"
    return "tokens", WRITER.name, "tokens"


def limited(house: House, **limits: str) -> Client:
    """A key with large limits of everything, of all models and of each, and with these in their place."""
    usual = {"quota": f"{RATE}, {OFFERED.name}={RATE}"}
    usual |= {"rate": f"{RATE}, {OFFERED.name}={RATE}, {WRITER.name}={RATE}", "tokens": f"{RATE}, {WRITER.name}={RATE}"}
    return house.key(**{**usual, **limits})


def charged(house: House, client: Client, door: Door) -> Ledger:
    unit, model, _ = units(door)
    return {
        (each, name): house.used(client, RATE, each, name) for each in ("requests", unit) for name in ("", model)
    }  # fmt: skip


def use_up(house: House, client: Client, unit: str, model: str, left: int) -> None:
    """Charge the key's limit until so much is left."""
    house.use(client, RATE, unit, LIMIT - left - house.used(client, RATE, unit, model), model)


def several(door: Door) -> Request:
    """A request of two pictures or texts, where the door knows of that, and how many it is."""
    return {"n": 2} if door.offers({"n": 2}) else {}


def difference(after: Ledger, before: Ledger) -> Ledger:
    return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("door", DOORS, ids=str)
def test_a_door_charges_what_it_makes(house: House, door: Door) -> None:
    client, request = limited(house), several(door)
    unit, model, _ = units(door)
    call = door.prepare(house, client, request)
    before = charged(house, client, door)
    outcome = call()
    assert outcome.accepted, outcome
    paid = difference(charged(house, client, door), before)
    count = request.get("n", 1)
    assert (paid["requests", ""], paid["requests", model]) == (1, 1)
    if unit == "pictures":
        assert (paid[unit, ""], paid[unit, model]) == (count, count)
    else:
        answers = 40 * count if door.offers({"max_tokens": 40}) else 0
        assert answers < paid[unit, ""] < answers + 20 and paid[unit, model] == paid[unit, ""]


@pytest.mark.parametrize("door", [door for door in DOORS if door.offers({"expand_prompt": True})], ids=str)
def test_an_expanded_prompt_is_charged_to_the_text_model(house: House, door: Door) -> None:
    """As the tokens of the prompt and 96 more for each picture."""
    client, request = limited(house), {"expand_prompt": True, **several(door)}
    call = door.prepare(house, client, request)
    before = {name: house.used(client, RATE, "tokens", name) for name in ("", WRITER.name)}
    assert call().accepted
    assert {name: house.used(client, RATE, "tokens", name) - count for name, count in before.items()} == dict.fromkeys(
        before, 98 * request.get("n", 1)
    )
    assert house.used(client, RATE, "requests", WRITER.name) == 0


WRONG: dict[str, dict[str, Request]] = {
    "image": {"a field": {"steps": 10**6}, "a model": {"model": "nobody's"}},
    "text": {"a field": {"max_tokens": "many"}, "a model": {"model": "nobody's"}},
}
NEW = tuple(door for door in DOORS if "requeue" not in door.route)


@pytest.mark.parametrize(
    ("door", "request_"),
    [pytest.param(door, {**several(door), **request}, id=f"{door}: {name}")
     for door in NEW for name, request in WRONG[door.modality].items() if door.offers(request)],
)  # fmt: skip
def test_a_request_that_is_refused_charges_itself_alone(house: House, door: Door, request_: Request) -> None:
    """Nothing of what it would have made, in whatever it is wrong; a batch that has ended neither."""
    client = limited(house)
    call = door.prepare(house, client, request_)
    before = charged(house, client, door)
    assert not call().accepted
    unit, model, _ = units(door)
    assert difference(charged(house, client, door), before) == {
        ("requests", ""): 1, ("requests", model): 0, (unit, ""): 0, (unit, model): 0,
    }  # fmt: skip


@pytest.mark.parametrize("of_model", [False, True], ids=["of all models", "of the model"])
@pytest.mark.parametrize("door", [door for door in DOORS if not (door.lines and door.modality == "text")], ids=str)
def test_what_is_more_than_is_left_is_refused(house: House, door: Door, of_model: bool) -> None:
    client, request = limited(house), several(door)
    unit, model, _ = units(door)
    call = door.prepare(house, client, request)
    use_up(house, client, unit, model if of_model else "", request.get("n", 1) - 1)
    before, ids = charged(house, client, door), house.worker.ids()
    outcome = call()
    assert outcome.refused(429, "quota_exceeded" if unit == "pictures" else "rate_limit_exceeded"), outcome
    assert house.worker.ids() == ids
    paid = difference(charged(house, client, door), before)
    assert (paid["requests", ""], paid[unit, ""], paid[unit, model]) == (1, 0, 0)


@pytest.mark.parametrize(
    "door", [door for door in NEW if door.offers({"n": 2}) or door.offers({"max_tokens": 1})], ids=str
)
def test_what_is_more_than_a_whole_limit_is_refused_for_good(house: House, door: Door) -> None:
    """No wait helps: it is an error of the request, of a line of texts too."""
    unit, _, name = units(door)
    client = limited(house, **{name: "1/hour" if unit == "pictures" else "30/hour"})
    ids = house.worker.ids()
    outcome = door.submit(house, client, **several(door))
    assert outcome.refused(400, "quota_exceeded" if unit == "pictures" else "rate_limit_exceeded"), outcome
    assert house.worker.ids() == ids


@pytest.mark.parametrize(
    ("door", "of_model"),
    [pytest.param(door, of_model, id=f"{door}: of {'the model' if of_model else 'all models'}")
     for door in DOORS for of_model in (False, True) if not (door.lines and of_model)],
)  # fmt: skip
def test_a_request_over_the_rate_is_refused(house: House, door: Door, of_model: bool) -> None:
    """And not served, and costs nothing else; lines of a batch wait for the rate of a model (test_key_limits.py)."""
    client = limited(house)
    unit, model, _ = units(door)
    call = door.prepare(house, client, {})
    use_up(house, client, "requests", model if of_model else "", 0)
    before, ids = charged(house, client, door), house.worker.ids()
    outcome = call()
    assert outcome.refused(429, "rate_limit_exceeded"), outcome
    assert house.worker.ids() == ids
    paid = difference(charged(house, client, door), before)
    assert (paid[unit, ""], paid[unit, model], paid["requests", model]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"jobs": "1"}, "too_many_jobs"), ({"jobs": f"{OFFERED.name}=1, {WRITER.name}=1"}, "too_many_jobs"),
     ({"queued": "1"}, "queue_share_full")],
    ids=["jobs", "jobs of the model", "queued"],
)  # fmt: skip
@pytest.mark.parametrize("door", [door for door in DOORS if not door.lines], ids=str)
def test_a_job_more_than_a_key_may_have_is_refused(house: House, door: Door, limits: dict[str, str], code: str) -> None:
    """It costs no pictures and no tokens, though they were charged before; lines wait (test_key_limits.py)."""
    client, request = limited(house, **limits), several(door)
    unit, model, _ = units(door)
    call = door.prepare(house, client, request)
    with house.holding():
        job: dict[str, Any] = {"id": house.new_id(), "modality": door.modality, "model": model}
        first = house.hold_job(client, **job)
        before, ids = charged(house, client, door), house.worker.ids()
        outcome = call()
        assert outcome.refused(429, code), outcome
        assert house.worker.ids() == ids
        paid = difference(charged(house, client, door), before)
        assert (paid["requests", ""], paid[unit, ""], paid[unit, model]) == (1, 0, 0)
        house.worker.store.cancel(first)


@pytest.mark.parametrize("model", [None, OFFERED.name, "best"])
def test_a_batch_that_is_cancelled_charges_the_lines_that_were_jobs(house: House, model: str | None) -> None:
    """Whichever name of a model its lines have: all are charged at first, and those that never were given back."""
    client = limited(house)
    named = {} if model is None else {"model": model}
    body = {"prompt": "a cat", "steps": 2, "n": 2, **named}
    lines = [{"custom_id": f"{k}", "method": "POST", "url": IMAGES, "body": body} for k in range(5)]
    file = house.upload(client, b"\n".join(json.dumps(line).encode() for line in lines), **BATCH)
    fields = {"input_file_id": file, "endpoint": IMAGES, "completion_window": "24h"}

    def paid() -> set[int]:
        return {house.used(client, RATE, "pictures", name) for name in ("", *([] if model is None else [OFFERED.name]))}

    with house.holding():
        known = house.worker.ids()
        id = str(ok(client.post("/v1/batches", json=fields)).json()["id"])
        assert paid() == {10}
        eventually(lambda: len(house.worker.ids() - known) == 2)
        # The batch knows of a line's job a moment after it was created.
        eventually(lambda: house.worker.redis.hget(f"diptych:batch:{id}", "next") == "2")
        ok(client.post(f"/v1/batches/{id}/cancel"))
        assert house.ended(client, id)["status"] == "cancelled"
    assert paid() == {4}


@pytest.mark.parametrize(("age_s", "back"), [(2 * 3600 - 60, 6), (2 * 3600 + 60, 0)])
def test_images_of_a_window_that_is_over_are_not_given_back(house: House, age_s: int, back: int) -> None:
    """They are in no counter any more: those of other requests would be given back in their place."""
    tenant = limited(house)
    body = {"prompt": "a cat", "steps": 2, "n": 2, "model": OFFERED.name}
    lines = [{"custom_id": f"{k}", "method": "POST", "url": IMAGES, "body": body} for k in range(5)]
    file = house.upload(tenant, b"\n".join(json.dumps(line).encode() for line in lines), **BATCH)
    fields = {"input_file_id": file, "endpoint": IMAGES, "completion_window": "24h"}
    with house.holding():
        known = house.worker.ids()
        id = str(ok(tenant.post("/v1/batches", json=fields)).json()["id"])
        eventually(lambda: len(house.worker.ids() - known) == 2)
        paid = {name: house.used(tenant, RATE, "pictures", name) for name in ("", OFFERED.name)}
        house.worker.redis.hset(f"diptych:batch:{id}", "created", str(int(time.time()) - age_s))
        ok(tenant.post(f"/v1/batches/{id}/cancel"))
        assert house.ended(tenant, id)["status"] == "cancelled"
    after = {name: house.used(tenant, RATE, "pictures", name) for name in paid}
    assert after == {name: count - back for name, count in paid.items()}


# -- bytes of files ----------------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "OpenAI's": {"files": {"file": ("a.png", PNG)}, "data": {"purpose": "vision"}},
    "Replicate's": {"files": {"content": ("a.png", PNG)}},
    "of a batch": {"files": {"file": ("a.jsonl", PNG)}, "data": {"purpose": "batch"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_takes_its_bytes_of_the_keys_quota(house: House, form: str) -> None:
    """The key's own, to the byte, whatever it is for; one that is deleted gives them back."""
    client = house.key(file_bytes=2 * len(PNG))
    ids = [ok(client.post("/v1/files", **FORMS[form])).json()["id"] for _ in range(2)]
    byte: dict[str, Any] = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    for refused in (FORMS[form], byte):
        check_error(client.post("/v1/files", **refused), 429, "file", "files_quota_exceeded")
    assert len(client.get("/v1/files").json()["data"]) == 2
    assert client.delete(f"/v1/files/{ids[0]}").status_code == 200
    ok(client.post("/v1/files", **FORMS[form]))
    check_error(client.post("/v1/files", **byte), 429, "file", "files_quota_exceeded")
