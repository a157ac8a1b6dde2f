"""Who may do what where there are keys: scopes, owners, links, limits."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from api import cards
from api.pictures.links import sign, signed
from core.config import Settings, SettingsError, read
from core.jobs.keyring import USUAL_SCOPES, Keyring
from core.jobs.record import JobDraft, record_id
from tests.api.jobs.test_webhooks import Receiver
from tests.api.world import (
    CARD,
    PATIENCE_S,
    SERVE,
    Api,
    Worker,
    bearer,
    changed,
    check_error,
    eventually,
    ok,
    opened,
    process,
)

JOB = {"type": "image", "prompt": "a cat"}


class Client(httpx2.Client):
    """A client of a key, whose id it knows."""

    key_id = ""

    def order(self, **fields: Any) -> httpx2.Response:
        return self.post("/v1/jobs", json={**JOB, **fields})


class Guarded:
    """An API with keys, and clients that bring them, which are closed with `clients`."""

    def __init__(self, api: Api, keyring: Keyring, clients: ExitStack, worker: Worker) -> None:
        self.api, self.keyring, self.clients, self.worker = api, keyring, clients, worker

    def key(self, *scopes: str, **limits: str) -> Client:
        key, token = self.keyring.add("someone", scopes or USUAL_SCOPES, **limits)
        client = self.client(token)
        client.key_id = key.id
        eventually(lambda: client.get("/v1/models").status_code == 200)
        return client

    def client(self, token: str) -> Client:
        headers = bearer(token) if token else {}
        client = Client(base_url=self.api.url, timeout=PATIENCE_S, headers=headers, verify=False)
        return self.clients.enter_context(client)


@contextmanager
def guarding(settings: Settings) -> Iterator[Guarded]:
    """An API with a key and a worker."""
    with closing(Keyring.of(settings)) as keyring:
        keyring.add("the first")
        with opened(settings, CARD) as (api, worker), ExitStack() as clients:
            yield Guarded(api, keyring, clients, worker)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return changed(settings, public_url="https://pictures.example/base/", webhook_private=True)


@pytest.fixture
def doors(settings: Settings) -> Iterator[Guarded]:
    with guarding(settings) as doors:
        yield doors


def test_a_key_opens_and_nothing_else_does(doors: Guarded) -> None:
    """Nor a known id with a secret of the right form: nobody's, another key's, or off by one character."""
    worker = doors.worker
    key, token = doors.keyring.add("me", ("images", "admin"))
    assert doors.client(token).get("/v1/models").status_code == 200, "at once"
    client = doors.key()
    others = client.headers["authorization"][-43:]
    assert token[-43:] not in str(worker.redis.hgetall("diptych:keys")), "only hashes are kept"
    forged = [f"dpt_{key.id}_{secret}" for secret in ("a" * 43, others, key.hash[:43])]
    forged += [token[:-1] + ("a" if token[-1] != "a" else "b"), f"dpt_{client.key_id}_{token[-43:]}"]
    for wrong in ("", "unused", "dpt_000000000000_" + "a" * 43, *forged):
        refused = doors.client(wrong).order()
        check_error(refused, 401, code="invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    assert worker.ids() == set(), "nothing was made"
    assert client.order().status_code == 202
    assert client.get("/v1/models").status_code == 200
    stranger = doors.client("")
    for path in ("models", "jobs", "queues", "jobs/job_000000000000000000000000/events"):
        check_error(stranger.get(f"/v1/{path}"), 401, code="invalid_api_key")
    check_error(stranger.get("/v2/models/x/ready"), 401, code="invalid_api_key")
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/openapi.json"):
        assert stranger.get(path).status_code == 200
    assert doors.keyring.revoke(client.key_id)
    eventually(lambda: client.get("/v1/models").status_code == 401)


def test_the_first_key_closes_the_service_at_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """However old the API's snapshot of the keys is: nobody is admitted without one, and its jobs are its own."""
    monkeypatch.setattr(cards, "_EVERY_S", 3600.0)  # it never looks by itself
    for first, path in [("PUT", "/v1/jobs/mine"), ("PUT", "/v1/jobs/after"), ("DELETE", "/v1/jobs/before")]:
        with Worker(settings) as worker, closing(Keyring.of(settings)) as keyring:
            worker.redis.flushall()
            worker.announce()
            with Api(settings) as api:
                assert api.client.put("/v1/jobs/before", json=JOB).status_code == 202
                key, token = keyring.add("the first")
                if path == "/v1/jobs/mine":
                    owner = bearer(token)
                    assert api.client.put(path, json=JOB, headers=owner).status_code == 202
                    assert worker.job(record_id(key.id, "mine")).owner == key.id
                    assert api.get(path, headers=owner).status_code == 200
                    check_error(api.get("/v1/jobs/before", headers=owner), 404)
                else:
                    refused = api.client.request(first, path, json=JOB if first == "PUT" else None)
                    check_error(refused, 401, code="invalid_api_key")
                    assert worker.ids() == {"before"}


def test_after_the_last_key_nobody_comes_in_until_someone_says_so(settings: Settings) -> None:
    """Where `trust_network` lets anybody in before there is a key, as in containers; an old API and a fresh one."""
    settings = changed(settings, trust_network=True)
    with closing(Keyring.of(settings)) as keyring, opened(settings, CARD) as (api, worker):
        assert api.get("/v1/queues").status_code == 200, "there never was a key"
        key, _ = keyring.add("the only one")
        eventually(lambda: api.get("/v1/queues").status_code == 401)
        assert keyring.revoke(key.id)
        with Api(settings) as another:
            for one in (api, another):
                eventually(lambda one=one: not one.server._service.cards.now.keys)
                for path in ("/v1/queues", "/v1/jobs", "/v1/models"):
                    refused = one.get(path)
                    check_error(refused, 401, code="invalid_api_key")
                    assert "diptych keys" in refused.json()["error"]["message"], "the way back"
                check_error(one.post("/v1/jobs", **JOB), 401, code="invalid_api_key")
            worker.redis.delete("diptych:access")  # Redis was emptied
            looked = api.server._service.cards._looked
            eventually(lambda: api.server._service.cards._looked > looked + 1.5)  # after it
            check_error(api.get("/v1/queues"), 401, code="invalid_api_key")
            assert keyring.unlock()
            for one in (api, another):
                eventually(lambda one=one: one.get("/v1/queues").status_code == 200)


def test_a_key_of_an_older_version_leaves_a_closed_door_too(settings: Settings) -> None:
    """Neither the key's maker nor its revoker noted anything; an API of this version saw it in between."""
    settings = changed(settings, trust_network=True)
    with closing(Keyring.of(settings)) as keyring, Worker(settings) as worker:
        key, _ = keyring.add("old")
        worker.redis.delete("diptych:access")
        with Api(settings) as api:
            assert api.get("/v1/queues").status_code == 401
        worker.redis.hdel("diptych:keys", key.id)
        with Api(settings) as api:
            check_error(api.get("/v1/queues"), 401, code="invalid_api_key")


def test_no_key_fills_the_queue(settings: Settings) -> None:
    with guarding(changed(settings, max_queued=8)) as doors:
        worker = doors.worker
        greedy, modest, other = doors.key("images", "text"), doors.key(queued="1"), doors.key()
        ids = [greedy.order().json()["id"] for _ in range(4)]
        refused = greedy.order()
        error = check_error(refused, 429, code="queue_share_full")
        assert "(4)" in error["message"] and 1 <= int(refused.headers["retry-after"]) <= 120
        assert greedy.put(f"/v1/jobs/{ids[0]}", json=JOB).status_code == 422, "what is there is still found"
        assert modest.order().status_code == 202
        check_error(modest.order(), 429, code="queue_share_full")
        for _ in range(3):
            assert other.order().status_code == 202
        check_error(other.order(), 429, code="queue_full")
        worker.take(ids[0])  # what runs does not wait
        assert greedy.order().status_code == 202


def test_a_key_of_before_there_was_the_scope_of_files_has_it(doors: Guarded) -> None:
    old, token = doors.keyring.add("old", ("images",))
    record = {name: getattr(old, name) for name in ("id", "name", "hash", "scopes", "rate", "quota", "created")}
    doors.worker.redis.hset("diptych:keys", old.id, json.dumps(record))
    eventually(lambda: doors.client(token).get("/v1/files").status_code == 200)


def test_a_link_is_signed_for_one_picture_and_some_time(doors: Guarded, settings: Settings) -> None:
    worker = doors.worker
    owner, stranger = doors.key(), doors.client("")
    ids = [owner.order(n=2).json()["id"] for _ in range(2)]
    pictures = [worker.work(id) for id in ids]
    url = owner.get(f"/v1/jobs/{ids[0]}").json()["images"][1]["url"]
    assert url.startswith("https://pictures.example/base/v1/jobs/"), "what the public calls it"
    parts = urlsplit(url.removeprefix("https://pictures.example/base"))
    assert stranger.get(f"{parts.path}?{parts.query}").content == pictures[0][1]
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert 3000 < int(query["expires"]) - time.time() <= settings.link_s
    elsewhere = [parts.path.replace(ids[0], ids[1]), *(parts.path[:-1] + k for k in ("0", "2", "99", "-1", "x"))]
    later = {**query, "expires": str(int(query["expires"]) + 1)}
    for path, given in [*((path, query) for path in elsewhere), (parts.path, later)]:
        check_error(stranger.get(path, params=given), 403, "signature", "invalid_signature")
    check_error(stranger.get(parts.path), 401, code="invalid_api_key")


def test_links_end() -> None:
    secret = b"s" * 32
    link = ("job_1", 0, "key", "1000")
    made = sign(secret, *link)
    assert signed(secret, *link, made, 999) and not signed(secret, *link, made, 1000)
    assert not signed(b"t" * 32, *link, made, 999)
    assert not signed(secret, "job_1", 0, "", "1000", made, 999)


def picture_of(client: Client, worker: Worker, id: str, prompt: str) -> tuple[str, bytes]:
    """Have a picture drawn under a chosen id: the path of its link, and its bytes."""
    assert client.put(f"/v1/jobs/{id}", json={**JOB, "prompt": prompt}).status_code == 202
    claim = worker.take(record_id(client.key_id, id))
    data = f"{id}: {prompt}, for {client.key_id}".encode()
    image = {"key": worker.artifacts.put(data, "image/png"), "seed": 1, "width": 8, "height": 8,
             "media_type": "image/png", "size_bytes": len(data)}  # fmt: skip
    assert worker.store.leases.succeed(claim.id, claim.attempt, {"images": [image]}, [image["key"]])
    return path_of(client, id), data


def path_of(client: httpx2.Client, id: str) -> str:
    """A link's path and signature, without what the public calls the service."""
    parts = urlsplit(ok(client.get(f"/v1/jobs/{id}")).json()["images"][0]["url"])
    return f"{parts.path[parts.path.index('/v1/') :]}?{parts.query}"


def test_a_link_does_not_lead_to_the_picture_of_who_has_the_id_next(doors: Guarded) -> None:
    worker = doors.worker
    ann, bob, stranger = doors.key(), doors.key(), doors.client("")
    link, mine = picture_of(ann, worker, "logo", "a cat")
    assert stranger.get(link).content == mine
    assert ann.delete("/v1/jobs/logo").status_code == 200
    assert stranger.get(link).status_code == 403
    assert bob.put("/v1/jobs/logo", json=JOB).status_code == 202
    assert stranger.get(link).status_code == 403
    assert bob.post("/v1/jobs/logo/cancel").status_code == 200 and bob.delete("/v1/jobs/logo").status_code == 200
    for client in (bob, ann):
        other, theirs = picture_of(client, worker, "logo", "a dog")
        refused = stranger.get(link)
        check_error(refused, 403, "signature", "invalid_signature")
        assert theirs not in refused.content
        assert stranger.get(other).content == theirs


BEHIND = "import time; real = time.time; time.time = lambda: real() - 7200; " + SERVE


def test_links_work_whatever_the_clocks_of_apis_say(doors: Guarded, settings: Settings) -> None:
    worker = doors.worker
    owner = doors.key()
    link, data = picture_of(owner, worker, "clocks", "a cat")
    with process(BEHIND, settings) as (_, behind):
        behind.headers["Authorization"] = owner.headers["Authorization"]
        theirs = path_of(behind, "clocks")
        assert doors.client("").get(theirs).content == data, "signed by an API whose clock is two hours behind"
        del behind.headers["Authorization"]
        assert behind.get(link).content == data


def test_all_apis_sign_alike_after_redis_was_emptied(doors: Guarded, settings: Settings) -> None:
    worker = doors.worker
    worker.redis.flushall()
    with process(SERVE, settings) as (_, new):  # it has never seen the secret that was
        worker.announce()
        owner = doors.key()
        stranger = doors.client("")
        for client in (stranger, new):  # both have read that there are keys
            eventually(lambda: client.get("/v1/models").status_code == 401)  # noqa: B023
        new.headers["Authorization"] = owner.headers["Authorization"]
        _, data = picture_of(owner, worker, "emptied", "a cat")
        eventually(lambda: stranger.get(path_of(new, "emptied")).content == data, "two secrets, for ever")
        link = path_of(owner, "emptied")
        del new.headers["Authorization"]
        assert new.get(link).content == data


def test_requests_are_counted_by_key(doors: Guarded) -> None:
    few, many = doors.key("images", "files", rate="2/hour"), doors.key(rate="")
    for left in (1, 0):
        answer = few.order()
        assert answer.status_code == 202
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
    refused = few.order()
    check_error(refused, 429, code="rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-should-retry"] == "false", "an hour is longer than a client waits"
    assert few.get(f"/v1/jobs/{answer.json()['id']}").status_code == 200, "looking at one's job is not counted"
    for path in ("/v1/jobs", "/v1/files", "/v1/batches"):  # lists that may be long are
        check_error(few.get(path), 429, code="rate_limit_exceeded")
    answer = many.order()
    assert answer.status_code == 202 and answer.headers["x-ratelimit-limit-requests"] == "600", "the service's own"


def test_pictures_are_counted_by_key(doors: Guarded) -> None:
    worker = doors.worker
    client = doors.key(quota="5/day")
    assert client.put("/v1/jobs/mine", json={**JOB, "n": 4}).status_code == 202
    again = client.put("/v1/jobs/mine", json={**JOB, "n": 4})
    assert again.status_code == 202 and "x-ratelimit-remaining-pictures" not in again.headers, "it is counted once"
    before = worker.ids()
    refused = client.order(n=2)
    check_error(refused, 429, code="quota_exceeded")
    assert worker.ids() == before
    assert client.order().headers["x-ratelimit-remaining-pictures"] == "0"


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/images/generations", "/v1/chat/completions", "/v1/completions", "/v1/batches"]
)
def test_a_refused_body_counts(doors: Guarded, path: str) -> None:
    """Whatever is wrong with it: no JSON, another type, too long a list, or what no model draws; but no picture."""
    client = doors.key("images", "text", "files", rate="6/hour", quota="9/day")
    json_type = {"Content-Type": "application/json"}
    wrong = [{**JOB, "steps": 10**6}, {**JOB, "model": "nobody's"}, {**JOB, "deadline_s": 0.001}]
    bodies = ["{", "[]", *map(json.dumps, ({"messages": [{}] * 999, "control": [{}] * 99}, *wrong))]
    for left, content in zip((5, 4, 3, 2, 1, 0), bodies, strict=True):
        refused = client.post(path, content=content, headers=json_type)
        assert refused.status_code in (400, 404) and "x-ratelimit-remaining-pictures" not in refused.headers
        assert refused.headers["x-ratelimit-remaining-requests"] == str(left)
    check_error(client.post(path, content=b"{", headers=json_type), 429, code="rate_limit_exceeded")


@pytest.mark.parametrize(
    ("name", "value"),
    [("public_url", "pictures.example"), ("public_url", "https://a/?b"), ("cors_origins", "https://a, b"),
     ("cors_origins", "https://a/b"), ("redis_url", "redis://a b"), ("redis_url", "http://a"), ("rate", "0/second"),
     ("quota", "5/week"), ("link_s", "0"), ("key_queued", "101%"), ("rate", "600/minute, emoji-z=often"),
     ("tokens", "1"), ("key_jobs", "50%"), ("key_running", "emoji-z=0")],
)  # fmt: skip
def test_settings_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"DIPTYCH_{name.upper()}", value)
    with pytest.raises(SettingsError, match=f"^DIPTYCH_{name.upper()}: "):
        read()


# -- two keys of one service: what one may do, is told and is signed with says nothing of the other --------------------


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
        content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        digests = [base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode() for secret in secrets]
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
