"""Two keys of one service: what one may do, is told and is signed with says nothing of the other."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator

import pytest

from core.config import Settings
from core.jobs.record import JobDraft
from tests.api.test_access import JOB, Client, Guarded, guarding
from tests.api.test_edits import PNG
from tests.api.test_webhooks import Receiver
from tests.api.world import Worker, check_error, eventually

SETTINGS = {"webhook_private": True}


@pytest.fixture(scope="module")
def doors(module_settings: Settings) -> Iterator[Guarded]:
    with guarding(module_settings) as doors:
        yield doors


def fail(worker: Worker, id: str) -> None:
    assert worker.store.leases.fail(id, worker.take(id).attempt, "engine_error", "it broke")


@pytest.mark.parametrize(("modality", "right", "wrong"), [("image", "images", "text"), ("text", "text", "images")])
def test_a_job_is_tried_again_with_its_scope(doors: Guarded, modality: str, right: str, wrong: str) -> None:
    """It belonged to a key that may no longer make such jobs."""
    worker = doors.worker
    owner = doors.key(wrong, "files")
    id = f"failed-{modality}"
    worker.store.create(JobDraft(id, modality, "emoji-xl", {"n": 1, "width": 64, "height": 64}, owner=owner.key_id))
    fail(worker, id)
    before = worker.ids()
    check_error(owner.post(f"/v1/jobs/{id}/requeue"), 403, code="insufficient_scope")
    check_error(doors.key(right).post(f"/v1/jobs/{id}/requeue"), 404, code="job_not_found")
    assert worker.ids() == before


def test_a_job_that_an_admin_tries_again_stays_its_owners(doors: Guarded) -> None:
    worker = doors.worker
    owner, admin = doors.key(rate="9/hour"), doors.key("admin", rate="9/hour")
    id = owner.order().json()["id"]
    fail(worker, id)
    again = admin.post(f"/v1/jobs/{id}/requeue")
    assert again.status_code == 202 and again.headers["x-ratelimit-remaining-requests"] == "8"
    assert worker.job(again.json()["id"]).owner == owner.key_id
    assert owner.get(f"/v1/jobs/{again.json()['id']}").status_code == 200
    assert owner.order().headers["x-ratelimit-remaining-requests"] == "7"


def test_webhooks_are_signed_with_their_owners_secret(doors: Guarded) -> None:
    """And not with another's, nor with that of nobody's jobs."""
    worker = doors.worker
    keys = [doors.key() for _ in range(2)]
    owners = ["", *(key.key_id for key in keys)]
    secrets = [base64.b64decode(doors.keyring.webhook_secret(id).removeprefix("whsec_")) for id in owners]
    assert len(set(secrets)) == 3
    for k, client in enumerate(keys, start=1):
        with Receiver() as receiver:
            id = client.order(webhook_url=receiver.url).json()["id"]
            worker.work(id)
            eventually(lambda heard=receiver.heard: heard)
        _, headers, body = receiver.heard[0]
        assert json.loads(body)["data"]["id"] == id
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        digests = [base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets]
        assert headers["webhook-signature"] == f"v1,{digests[k]}"


def test_an_idempotency_key_is_its_owners(doors: Guarded) -> None:
    """The same of another is another: neither is told the other's job, or that there is one."""
    worker = doors.worker
    keys = [doors.key(), doors.key()]

    def order() -> list[str]:
        return [key.post("/v1/jobs", json=JOB, headers={"Idempotency-Key": "mine"}).json()["id"] for key in keys]

    ids = order()
    assert order() == ids and len(set(ids)) == 2
    assert [worker.job(id).owner for id in ids] == [key.key_id for key in keys]


@pytest.mark.parametrize("field", ["images", "mask"])
def test_a_request_reads_its_owners_files_alone(doors: Guarded, field: str) -> None:
    """In whichever field it names another's: that one does not exist for it, and nothing is made."""
    worker = doors.worker
    owner, other, admin = doors.key("images", "files"), doors.key("images", "files"), doors.key("admin")

    def uploaded(client: Client) -> dict[str, str]:
        picture = {"file": ("a.png", PNG, "image/png")}
        return {"file_id": client.post("/v1/files", data={"purpose": "vision"}, files=picture).json()["id"]}

    mine, theirs = uploaded(other), uploaded(owner)
    fields = {"prompt": "a cat", "images": [mine]} | {field: [theirs] if field == "images" else theirs}
    job = {"type": "edit", **fields}
    before = worker.ids()
    for answer in (other.post("/v1/jobs", json=job), other.post("/v1/images/edits", json=fields)):
        check_error(answer, 404, code="file_not_found")
    assert worker.ids() == before
    if field == "images":
        assert [client.post("/v1/jobs", json=job).status_code for client in (admin, owner)] == [202, 202]
