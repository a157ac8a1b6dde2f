"""What a key may not do at one door it may do at none: one table of rights over all doors (tests/api/doors.py)."""

from __future__ import annotations

import pytest

from tests.api.doors import DOORS, DRAFTER, INLINE, OFFERED, Door, House, Request, Tenants
from tests.api.pictures.test_edits import PNG, as_file, hole
from tests.api.test_access import Client

SETTINGS = {"sdapi": True, "rate": "100000/second"}
NEW = tuple(door for door in DOORS if "requeue" not in door.route)
"""The doors that need no job beforehand."""


@pytest.fixture(scope="module")
def narrow(house: House) -> Client:
    """A key that may use one model of images, and none of texts."""
    return house.key(models=OFFERED.name)


@pytest.fixture(scope="module")
def drawer(house: House) -> Client:
    """A key that may have pictures drawn, and no texts written."""
    return house.key("images", "files")


@pytest.mark.parametrize("door", DOORS, ids=str)
def test_a_door_makes_its_callers_job(house: House, tenants: Tenants, door: Door) -> None:
    """And nobody else's: what the other tables refuse is served otherwise."""
    before = house.worker.ids()
    outcome = door.submit(house, tenants.owner)
    assert outcome.accepted, outcome
    jobs = [house.worker.store.get(id) for id in house.worker.ids() - before]  # embeddings are erased once delivered
    assert {job.owner for job in jobs if job is not None} <= {tenants.owner.key_id}


# -- what requests name ------------------------------------------------------------------------------------------------


def reference(place: str, file: Request) -> Request:
    """The fields of a request that names a picture at this place."""
    return {
        "image": {"images": [file]},
        "further image": {"images": [INLINE, file]},
        "mask": {"images": [INLINE], "mask": file},
        "control": {"control": [{"model": "edges", "image": file}]},
        "second control": {"control": [{"model": "edges", "image": INLINE}, {"model": "edges", "image": file}]},
        "image prompt": {"image_prompts": [{"model": "base", "image": file}]},
    }[place]


PLACES = ("image", "further image", "mask", "control", "second control", "image prompt")


@pytest.mark.parametrize(
    ("door", "place"),
    [pytest.param(door, place, id=f"{door}: {place}") for door in NEW for place in PLACES
     if door.offers(reference(place, {}))],
)  # fmt: skip
def test_a_request_reads_its_owners_files_alone(house: House, tenants: Tenants, door: Door, place: str) -> None:
    """Another's does not exist for it, wherever it is named, and nothing is made; its own is read."""
    picture = as_file(hole()) if place == "mask" else PNG
    theirs, own = ({"file_id": house.upload(client, picture)} for client in tenants[:2])
    before = house.worker.ids()
    outcome = door.submit(house, tenants.other, **reference(place, theirs))
    assert outcome.refused(404, "file_not_found"), outcome
    assert house.worker.ids() == before
    outcome = door.submit(house, tenants.other, **reference(place, own))
    assert outcome.accepted, outcome


REFUSED: dict[str, tuple[Request, int, str]] = {
    "another model's name": ({"model": "nobody's"}, 404, "model_not_found"),
    "a LoRA that the model lacks": ({"lora": "nobody's"}, 400, "invalid_value"),
    "a control that the model lacks": ({"control": [{"model": "pose", "image": INLINE}]}, 400, "invalid_value"),
    "an IP-Adapter that the model lacks": (
        {"image_prompts": [{"model": "plus", "image": INLINE}]}, 400, "invalid_value"
    ),
    "more pictures than a request may have": ({"n": 1000}, 400, "invalid_value"),
    "a deadline that cannot be met": ({"deadline_s": 0.001}, 400, "deadline_hopeless"),
    "a cascade whose draft lacks a control": (
        {"cascade": {"draft": DRAFTER.name}, "control": [{"model": "edges", "image": INLINE}]}, 400, "invalid_value"
    ),
    "a webhook of a private address": ({"webhook_url": "http://127.0.0.1:9/"}, 400, "webhook_private"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("door", "name"),
    [pytest.param(door, name, id=f"{door}: {name}") for name, (request, *_) in REFUSED.items() for door in NEW
     if door.offers(request) and (door.modality == "image" or name == "another model's name")],
)  # fmt: skip
def test_what_is_refused_at_one_door_is_refused_at_all(house: House, tenants: Tenants, door: Door, name: str) -> None:
    request, status, code = REFUSED[name]
    before = house.worker.ids()
    outcome = door.submit(house, tenants.owner, **request)
    assert outcome.refused(status, code), outcome
    assert house.worker.ids() == before


@pytest.mark.parametrize("door", [door for door in NEW if door.offers({"model": "x"})], ids=str)
def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(house: House, narrow: Client, door: Door) -> None:
    """Its answer is that to a name that no model has, to the byte."""
    hidden, unknown = (door.submit(house, narrow, model=name) for name in (DRAFTER.name, "nobody's"))
    assert hidden.refused(404, "model_not_found") and hidden == unknown, (hidden, unknown)
    if door.modality == "image":
        assert door.submit(house, narrow, model=OFFERED.name).accepted


USES: tuple[tuple[str, Request, str], ...] = (
    ("a cascade's draft", {"cascade": {"draft": DRAFTER.name}}, "invalid_value"),
    ("an expanded prompt", {"expand_prompt": True}, "no_text_model"),
)


@pytest.mark.parametrize(
    ("door", "request_", "code"),
    [pytest.param(door, request, code, id=f"{door}: {name}") for name, request, code in USES for door in NEW
     if door.offers(request)],
)  # fmt: skip
def test_a_request_uses_no_model_that_its_key_may_not(
    house: House, tenants: Tenants, narrow: Client, door: Door, request_: Request, code: str
) -> None:
    before = house.worker.ids()
    outcome = door.submit(house, narrow, **request_)
    assert outcome.refused(400, code), outcome
    assert house.worker.ids() == before
    assert door.submit(house, tenants.owner, **request_).accepted


@pytest.mark.parametrize("door", [door for door in NEW if door.offers({"expand_prompt": True})], ids=str)
def test_a_prompt_is_expanded_for_who_may_write_texts(house: House, drawer: Client, door: Door) -> None:
    before = house.worker.ids()
    outcome = door.submit(house, drawer, expand_prompt=True)
    assert outcome.refused(403, "insufficient_scope"), outcome
    assert house.worker.ids() == before
    assert door.submit(house, drawer, expand_prompt=False).accepted


@pytest.mark.parametrize("modality", ["image", "text"])
def test_a_door_asks_for_its_scope(house: House, modality: str) -> None:
    """A key with all other scopes makes nothing, nor does one without a key."""
    client = house.key("files", "text" if modality == "image" else "images")
    before = house.worker.ids()
    for door in NEW:
        if door.modality == modality:
            outcome = door.submit(house, client)
            assert outcome.refused(403, "insufficient_scope"), (door.name, outcome)
    assert house.worker.ids() == before
